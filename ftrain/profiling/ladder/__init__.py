"""Measure the techniques of the performance guides on a step: alone, and stacked."""

from ftrain.profiling.ladder.record import Ladder as Ladder
from ftrain.profiling.ladder.run import ladder as ladder
from ftrain.profiling.ladder.techniques import TECHNIQUES as TECHNIQUES
from ftrain.profiling.ladder.techniques import Case as Case
from ftrain.profiling.ladder.techniques import Technique as Technique
