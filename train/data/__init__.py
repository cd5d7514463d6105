"""What a run learns from: samples, packed into rows, in prefetched batches."""

from .batches import Batches, Rows
from .capture import capture_rows
from .samples import InMemory, Samples
from .self_made import make_data
from .sources import TrainData, heldout_prompts, training_data

__all__ = [
    "Batches",
    "InMemory",
    "Rows",
    "Samples",
    "TrainData",
    "capture_rows",
    "heldout_prompts",
    "make_data",
    "training_data",
]
