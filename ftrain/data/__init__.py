"""Data loading: a reproducible order, positions that can be saved, and batches of fixed shapes.

Built on torch's `Dataset` and `DataLoader`, whose worker processes it uses.
"""

from ftrain.data.array_dataset import arrays as arrays
from ftrain.data.device_prefetch import prefetch as prefetch
from ftrain.data.loader import Loader as Loader
from ftrain.data.loader import loader as loader
from ftrain.data.packing import block_mask as block_mask
from ftrain.data.packing import pack as pack
from ftrain.data.packing import packed as packed
from ftrain.data.pad_batch import pad as pad
from ftrain.data.pad_batch import padding as padding
from ftrain.data.permutation import shuffled as shuffled
from ftrain.data.stateful import position as position
from ftrain.data.stateful import seek as seek
from ftrain.data.token_files import TokenDocuments as TokenDocuments
from ftrain.data.token_files import TokenFile as TokenFile
from ftrain.data.token_files import TokenWriter as TokenWriter
from ftrain.data.token_files import write_tokens as write_tokens

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
