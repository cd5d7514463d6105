"""Hidden states on disk: shards in 16 or 8 bits, a manifest with checksums, and a writer that can resume."""

from .format import BITS, MANIFEST, ShardMeta, ShardReader, bytes_per_token, unfinished_folder
from .writer import ShardWriter

__all__ = [
    "BITS",
    "MANIFEST",
    "ShardMeta",
    "ShardReader",
    "ShardWriter",
    "bytes_per_token",
    "unfinished_folder",
]
