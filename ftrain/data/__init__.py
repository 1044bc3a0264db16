"""Data: batches in an order that is a pure function, at a position that is a few whole numbers, in shapes that hold.

Built on torch's `Dataset` and `DataLoader`, whose worker processes it uses.
"""

from ftrain.data.arrays import arrays as arrays
from ftrain.data.loader import loader as loader
from ftrain.data.pack import block_mask as block_mask
from ftrain.data.pack import pack as pack
from ftrain.data.pack import packed as packed
from ftrain.data.pad_batch import pad as pad
from ftrain.data.padding_stats import padding as padding
from ftrain.data.passes import Loader as Loader
from ftrain.data.permutation import shuffled as shuffled
from ftrain.data.prefetch import prefetch as prefetch
from ftrain.data.stateful import position as position
from ftrain.data.stateful import seek as seek
from ftrain.data.tokens import TokenDocuments as TokenDocuments
from ftrain.data.tokens import TokenFile as TokenFile
from ftrain.data.tokens import TokenWriter as TokenWriter
from ftrain.data.tokens import write_tokens as write_tokens

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
