"""EAGLE-MLX: lossless speculative decoding with draft heads on Apple's MLX, and training of such heads.

import eagle_mlx as em

target = em.load_target("checkpoints/target")
head = em.load_head("checkpoints/head", target)
engine = em.Engine(target, proposer=em.HeadProposer(head), policy=em.FixedPolicy(4))
print(engine.generate(["def fib(n):"], em.SamplingParams(max_tokens=64))[0].text)
"""

from __future__ import annotations

import sys
from importlib import import_module, metadata
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
    "__version__",
    "learn_costs",
    "load_head",
    "load_target",
]

_HOMES = {
    "engine": ("Engine",),
    "engine.cost_curve": ("learn_costs",),
    "errors": ("EagleError", "HeadWarning"),
    "head_check": ("load_head",),
    "policy": ("AcceptancePolicy", "FixedPolicy", "HybridPolicy", "ThroughputPolicy"),
    "proposers.draft_model": ("DraftModelProposer",),
    "proposers.head": ("HeadProposer",),
    "proposers.hybrid": ("HybridProposer",),
    "proposers.ngram": ("NgramProposer",),
    "request": ("Chunk", "Output"),
    "sampling_params": ("SamplingParams",),
    "target": ("Target", "load_target"),
}
"""The public names of each module. A module is imported on first use, because importing mlx-lm takes over a second."""


__version__ = metadata.version("eagle-mlx")


def __getattr__(name: str) -> object:
    for home, names in _HOMES.items():
        if name in names:
            value = globals()[name] = getattr(import_module(f"{__name__}.{home}"), name)
            return value
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
