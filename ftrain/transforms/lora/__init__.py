"""Low-rank adapters beside a frozen base: training, merging, and the files of peft."""

from ftrain.transforms.lora.lora import lora
from ftrain.transforms.lora.merging import merge, unmerge
from ftrain.transforms.lora.peft import like, load, save

__all__ = ["like", "load", "lora", "merge", "save", "unmerge"]
