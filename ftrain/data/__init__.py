"""Data loading: a reproducible order, positions that can be saved, and batches of fixed shapes.

It takes torch's `Dataset`, and uses the worker processes of torch's `DataLoader`.
"""

from ftrain.data.array_dataset import arrays
from ftrain.data.device_prefetch import prefetch
from ftrain.data.loader import Loader, loader
from ftrain.data.packing import block_mask, pack, packed
from ftrain.data.pad_batch import pad, padding
from ftrain.data.permutation import shuffled
from ftrain.data.stateful import position, seek
from ftrain.data.token_files import TokenDocuments, TokenFile, TokenWriter, write_tokens

__all__ = [
    "Loader",
    "TokenDocuments",
    "TokenFile",
    "TokenWriter",
    "arrays",
    "block_mask",
    "loader",
    "pack",
    "packed",
    "pad",
    "padding",
    "position",
    "prefetch",
    "seek",
    "shuffled",
    "write_tokens",
]
