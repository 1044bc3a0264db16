"""Checkpoints: trees on disk as safetensors and a manifest, written atomically and verified."""

from ftrain.checkpoint.checkpoints import Checkpoints as Checkpoints
from ftrain.checkpoint.reading import load as load
from ftrain.checkpoint.reading import verify as verify
from ftrain.checkpoint.saving_on_ranks import save as save

__all__ = [
    "Checkpoints",
    "load",
    "save",
    "verify",
]
