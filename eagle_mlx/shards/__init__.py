"""Hidden states on disk: shards of samples in 16 or 8 bits, a manifest with checksums, a writer that can continue."""

from .budget import CacheChoice, choose_cache, states_bytes
from .format import BITS, Sample, ShardFile, ShardMeta, bytes_per_token
from .manifest import MANIFEST
from .reader import ShardReader
from .repair import ShardRepair
from .unfinished import unfinished_folder
from .writer import ShardWriter

__all__ = [
    "BITS",
    "MANIFEST",
    "CacheChoice",
    "Sample",
    "ShardFile",
    "ShardMeta",
    "ShardReader",
    "ShardRepair",
    "ShardWriter",
    "bytes_per_token",
    "choose_cache",
    "states_bytes",
    "unfinished_folder",
]
