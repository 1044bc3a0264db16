"""Low-rank adapters beside a frozen base: training, merging, and the files of peft."""

from ftrain.transforms.lora.lora import lora as lora
from ftrain.transforms.lora.merging import merge as merge
from ftrain.transforms.lora.merging import unmerge as unmerge
from ftrain.transforms.lora.peft import like as like
from ftrain.transforms.lora.peft import load as load
from ftrain.transforms.lora.peft import save as save

__all__ = [
    "like",
    "load",
    "lora",
    "merge",
    "save",
    "unmerge",
]
