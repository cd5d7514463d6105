"""EAGLE-MLX: lossless speculative decoding with draft heads on Apple's MLX, and training of such heads.

import eagle_mlx as em

target = em.load_target("checkpoints/target")
head = em.load_head("checkpoints/head", target)
engine = em.Engine(target, proposer=em.HeadProposer(head), policy=em.FixedPolicy(4))
print(engine.generate(["def fib(n):"], em.SamplingParams(max_tokens=64))[0].text)
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from eagle_mlx import blas
from eagle_mlx.late import late_names

blas.activate()  # before anything imports MLX

if TYPE_CHECKING:
    from eagle_mlx.engine import Engine
    from eagle_mlx.engine.cost_curve import learn_costs
    from eagle_mlx.errors import EagleError, HeadWarning
    from eagle_mlx.head_check import load_head
    from eagle_mlx.policy import AcceptancePolicy, FixedPolicy, HybridPolicy, ThroughputPolicy
    from eagle_mlx.proposers.draft_model import DraftModelProposer
    from eagle_mlx.proposers.head import HeadProposer
    from eagle_mlx.proposers.memory import Memory
    from eagle_mlx.proposers.ngram import HybridProposer, NgramProposer
    from eagle_mlx.request import Chunk, Output
    from eagle_mlx.sampling_params import SamplingParams
    from eagle_mlx.target import Target, load_target

__all__ = [
    "AcceptancePolicy",
    "Chunk",
    "DraftModelProposer",
    "EagleError",
    "Engine",
    "FixedPolicy",
    "HeadProposer",
    "HeadWarning",
    "HybridPolicy",
    "HybridProposer",
    "Memory",
    "NgramProposer",
    "Output",
    "SamplingParams",
    "Target",
    "ThroughputPolicy",
    "__version__",
    "learn_costs",
    "load_head",
    "load_target",
]

__version__ = "0.1.0.dev0"
__getattr__ = late_names(__name__, __file__)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
