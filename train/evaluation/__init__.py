"""What a head is worth: acceptance by real decoding, and texts for people to read."""

from .acceptance import Acceptance, Evaluator
from .generations import Generation, per_round, write_generations

__all__ = ["Acceptance", "Evaluator", "Generation", "per_round", "write_generations"]
