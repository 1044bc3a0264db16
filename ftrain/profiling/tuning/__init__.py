"""Choose microbatches and rematerialisation for a step and a limit of memory."""

from ftrain.profiling.tuning.record import Trials as Trials
from ftrain.profiling.tuning.run import trials as trials
from ftrain.profiling.tuning.run import tune as tune
