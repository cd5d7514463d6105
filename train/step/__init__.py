"""The optimizer step: losses, gradients over all streams, optimizers and learning rate schedules."""

from .optimizers import Cosine, Schedule, WarmupStableDecay, learning_rate_factor, span_of
from .step import NotFiniteError, Stepper, StepResult
