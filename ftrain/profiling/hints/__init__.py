"""`hints`: what makes a step slow, and what to do about it."""

from ftrain.profiling.hints.rules import Facts as Facts
from ftrain.profiling.hints.rules import Hint as Hint
from ftrain.profiling.hints.rules import Remedy as Remedy
from ftrain.profiling.hints.rules import run_rules as run_rules
from ftrain.profiling.hints.run import facts_of as facts_of
from ftrain.profiling.hints.run import hints as hints
from ftrain.profiling.hints.run import measured_hints as measured_hints
