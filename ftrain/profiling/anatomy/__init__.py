"""The memory and the work of a step, predicted and measured."""

from ftrain.profiling.anatomy.record import Anatomy as Anatomy
from ftrain.profiling.anatomy.run import anatomy as anatomy
from ftrain.profiling.anatomy.run import anatomy_for as anatomy_for
