"""EAGLE-MLX: draft heads for language models on Apple's MLX, trained and used losslessly.

import eagle_mlx as em

target = em.load_target("checkpoints/target")
head = em.load_head("checkpoints/head", target)
engine = em.Engine(target, proposer=em.HeadProposer(head), policy=em.FixedPolicy(4))
print(engine.generate(["def fib(n):"], em.SamplingParams(max_tokens=64))[0].text)
"""

from eagle_mlx import blas

blas.activate()  # before anything imports MLX

from eagle_mlx.engine import Engine  # noqa: E402
from eagle_mlx.errors import EagleError, HeadWarning  # noqa: E402
from eagle_mlx.output import Chunk, Output  # noqa: E402
from eagle_mlx.params import SamplingParams  # noqa: E402
from eagle_mlx.policy import AcceptancePolicy, FixedPolicy, ThroughputPolicy  # noqa: E402
from eagle_mlx.proposers.draft_model import DraftModelProposer  # noqa: E402
from eagle_mlx.proposers.head import HeadProposer  # noqa: E402
from eagle_mlx.proposers.ngram import NgramProposer  # noqa: E402
from eagle_mlx.sanity import load_head  # noqa: E402
from eagle_mlx.target import Target, load_target  # noqa: E402

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
