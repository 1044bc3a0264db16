"""Wrappers: each takes a step and returns a step, and each lives in a file of its own."""

from ftrain.transforms.accumulate import accumulate as accumulate
from ftrain.transforms.amp import with_amp as with_amp
from ftrain.transforms.averaged import averaged as averaged
from ftrain.transforms.clip import clip as clip
from ftrain.transforms.compiled import compiled as compiled
from ftrain.transforms.donated import donated as donated
from ftrain.transforms.ema import ema as ema
from ftrain.transforms.empty_cache import empty_cache as empty_cache
from ftrain.transforms.matmul_precision import matmul_precision as matmul_precision
from ftrain.transforms.offload import offload as offload
from ftrain.transforms.remat import remat as remat
from ftrain.transforms.skip import skip_nonfinite as skip_nonfinite
from ftrain.transforms.swa import swa as swa
from ftrain.transforms.update_in_backward import update_in_backward as update_in_backward
