"""Draft steps in training, each fed with the one before it: for EAGLE-3 heads, and for heads of any make."""

from .eagle3 import unroll
from .feedback import unroll_feedback
from .recompute import Relay, holding, weights_but

__all__ = ["Relay", "holding", "unroll", "unroll_feedback", "weights_but"]
