"""Draft steps in training, each fed with the one before it: for EAGLE-3 heads, and for heads of any make."""

from .eagle3 import unroll
from .feedback import unroll_feedback
from .recompute import holding, weights_but
from .relay import Relay

__all__ = ["Relay", "holding", "unroll", "unroll_feedback", "weights_but"]
