"""Where the memory and the work of a step go, predicted and measured."""

from ftrain.anatomy.record import Anatomy as Anatomy
from ftrain.anatomy.run import anatomy as anatomy
