"""Devices by name: `get("cuda")`, `of(tensor.device)`, `default()`, and `register` for one more."""

from ftrain.backends import cpu, cuda
from ftrain.backends.registry import Backend as Backend
from ftrain.backends.registry import Memory as Memory
from ftrain.backends.registry import Recorder as Recorder
from ftrain.backends.registry import default as default
from ftrain.backends.registry import get as get
from ftrain.backends.registry import names as names
from ftrain.backends.registry import of as of
from ftrain.backends.registry import register as register
from ftrain.backends.registry import resolve as resolve

for _module in (cpu, cuda):
    register(_module.BACKEND)
