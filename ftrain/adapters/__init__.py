"""Low-rank adapters beside a frozen base: training, merging, and the files of peft."""

from ftrain.adapters.lora import lora as lora
from ftrain.adapters.merging import merge as merge
from ftrain.adapters.merging import unmerge as unmerge
from ftrain.adapters.peft import like as like
from ftrain.adapters.peft import load as load
from ftrain.adapters.peft import save as save

__all__ = [
    "like",
    "load",
    "lora",
    "merge",
    "save",
    "unmerge",
]
