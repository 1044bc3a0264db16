"""Many devices: the mesh of ranks, and the states that are divided over them."""

from ftrain.parallel.compression import powersgd as powersgd
from ftrain.parallel.compression import sign as sign
from ftrain.parallel.mesh import mesh as mesh
from ftrain.parallel.state import divided as divided
from ftrain.parallel.state import whole as whole

__all__ = ["divided", "mesh", "powersgd", "sign", "whole"]
