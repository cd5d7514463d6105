"""One optimizer step: losses, gradients over all streams, the optimizers and their schedule."""

from .schedule import Span, learning_rate_factor, span_of
from .step import NotFiniteError, Stepper, StepResult

__all__ = ["NotFiniteError", "Span", "StepResult", "Stepper", "learning_rate_factor", "span_of"]
