"""What costs a step its speed, and what to do about it."""

from ftrain.hints.facts import Facts as Facts
from ftrain.hints.rules import Hint as Hint
from ftrain.hints.rules import judge as judge
from ftrain.hints.run import facts_of as facts_of
from ftrain.hints.run import hints as hints
