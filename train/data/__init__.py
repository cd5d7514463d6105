"""What a run learns from: samples, packed into rows, in prefetched batches."""

from .batches import Batches, Rows
from .packing import Piece
from .samples import InMemory, Joined, OnDisk, Samples, Tokens
from .self_made import make_data
from .sources import TrainData, capture_rows, data_on_disk, heldout_prompts, training_data

__all__ = [
    "Batches",
    "InMemory",
    "Joined",
    "OnDisk",
    "Piece",
    "Rows",
    "Samples",
    "Tokens",
    "TrainData",
    "capture_rows",
    "data_on_disk",
    "heldout_prompts",
    "make_data",
    "training_data",
]
