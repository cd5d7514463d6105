"""EAGLE-MLX: lossless speculative decoding with draft heads on Apple's MLX, and training of such heads.

import eagle_mlx as em

target = em.load_target("checkpoints/target")
head = em.load_head("checkpoints/head", target)
engine = em.Engine(target, proposer=em.HeadProposer(head), policy=em.FixedPolicy(4))
print(engine.generate(["def fib(n):"], em.SamplingParams(max_tokens=64))[0].text)
"""

from __future__ import annotations

import sys
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING

try:
    import eagle_mlx.cpu  # noqa: F401  (first: it loads the fast BLAS before MLX)
except KeyboardInterrupt:
    if not Path(sys.argv[0]).name.startswith("eagle-"):  # imported by another program
        raise
    print("interrupted", file=sys.stderr)
    raise SystemExit(130) from None

if TYPE_CHECKING:
    from eagle_mlx.engine import Engine
    from eagle_mlx.engine.cost_curve import learn_costs
    from eagle_mlx.errors import EagleError, HeadWarning
    from eagle_mlx.head_check import load_head
    from eagle_mlx.policy import AcceptancePolicy, FixedPolicy, HybridPolicy, ThroughputPolicy
    from eagle_mlx.proposers.draft_model import DraftModelProposer
    from eagle_mlx.proposers.head import HeadProposer
    from eagle_mlx.proposers.hybrid import HybridProposer
    from eagle_mlx.proposers.ngram import NgramProposer
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
    "NgramProposer",
    "Output",
    "SamplingParams",
    "Target",
    "ThroughputPolicy",
    "learn_costs",
    "load_head",
    "load_target",
]

_HOMES = {
    "AcceptancePolicy": "policy",
    "Chunk": "request",
    "DraftModelProposer": "proposers.draft_model",
    "EagleError": "errors",
    "Engine": "engine",
    "FixedPolicy": "policy",
    "HeadProposer": "proposers.head",
    "HeadWarning": "errors",
    "HybridPolicy": "policy",
    "HybridProposer": "proposers.hybrid",
    "NgramProposer": "proposers.ngram",
    "Output": "request",
    "SamplingParams": "sampling_params",
    "Target": "target",
    "ThroughputPolicy": "policy",
    "learn_costs": "engine.cost_curve",
    "load_head": "head_check",
    "load_target": "target",
}
"""The module of each public name. It is imported on first use, because importing mlx-lm takes over a second."""


def __getattr__(name: str) -> object:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = globals()[name] = getattr(import_module(f"{__name__}.{_HOMES[name]}"), name)
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
