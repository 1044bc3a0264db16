"""The techniques of the performance guides, measured on a step: alone, and one on top of the other."""

from ftrain.ladder.record import Ladder as Ladder
from ftrain.ladder.record import Row as Row
from ftrain.ladder.run import ladder as ladder
from ftrain.ladder.techniques import TECHNIQUES as TECHNIQUES
from ftrain.ladder.techniques import Case as Case
from ftrain.ladder.techniques import Technique as Technique
