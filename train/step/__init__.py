"""One optimizer step: losses, gradients over all streams, the optimizers and their schedule."""

from .precision import file_type, pass_type
from .schedule import Span, learning_rate_factor, span_of
from .step import NotFiniteError, Stepper, StepResult

__all__ = ["NotFiniteError", "Span", "StepResult", "Stepper", "file_type", "learning_rate_factor", "pass_type", "span_of"]
