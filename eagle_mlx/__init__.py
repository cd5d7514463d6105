"""EAGLE-MLX: draft heads for language models on Apple's MLX, trained and used losslessly.

import eagle_mlx as em

target = em.load_target("checkpoints/target")
head = em.load_head("checkpoints/head", target)
engine = em.Engine(target, proposer=em.HeadProposer(head), policy=em.FixedPolicy(4))
print(engine.generate(["def fib(n):"], em.SamplingParams(max_tokens=64))[0].text)
"""

import eagle_mlx.cpu  # noqa: F401  (first: it brings the fast BLAS before MLX)
from eagle_mlx.engine import Engine
from eagle_mlx.engine.output import Chunk, Output
from eagle_mlx.errors import EagleError, HeadWarning
from eagle_mlx.head_check import load_head
from eagle_mlx.policy import AcceptancePolicy, FixedPolicy, ThroughputPolicy
from eagle_mlx.proposers.draft_model import DraftModelProposer
from eagle_mlx.proposers.head import HeadProposer
from eagle_mlx.proposers.ngram import NgramProposer
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
    "NgramProposer",
    "Output",
    "SamplingParams",
    "Target",
    "ThroughputPolicy",
    "load_head",
    "load_target",
]
