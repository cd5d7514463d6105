"""One optimizer step: losses, gradients over all streams, the optimizers and their schedule."""

from .schedule import Phase, Schedule, Span, learning_rate_factor, span_of
from .step import NotFiniteError, Stepper, StepResult

__all__ = ["NotFiniteError", "Phase", "Schedule", "Span", "StepResult", "Stepper", "learning_rate_factor", "span_of"]
