"""Draft steps in training, each reading what the one before it made: for EAGLE-3 heads, and for heads of any make."""

from .eagle3 import unroll
from .recompute import holding, weights_but
from .recycling import recycle

__all__ = ["holding", "recycle", "unroll", "weights_but"]
