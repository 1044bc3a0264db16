"""Where the memory and the work of a step go, predicted and measured."""

from ftrain.profiling.anatomy.record import Anatomy as Anatomy
from ftrain.profiling.anatomy.run import anatomy as anatomy
