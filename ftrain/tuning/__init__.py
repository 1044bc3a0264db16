"""The microbatch and the rematerialisation that suit a step and a limit of memory."""

from ftrain.tuning.record import Trials as Trials
from ftrain.tuning.run import trials as trials
from ftrain.tuning.run import tune as tune
