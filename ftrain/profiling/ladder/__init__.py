"""The techniques of the performance guides, measured on a step: alone, and one on top of the other."""

from ftrain.profiling.ladder.record import Ladder as Ladder
from ftrain.profiling.ladder.run import ladder as ladder
from ftrain.profiling.ladder.techniques import TECHNIQUES as TECHNIQUES
from ftrain.profiling.ladder.techniques import Case as Case
from ftrain.profiling.ladder.techniques import Technique as Technique
