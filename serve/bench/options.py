"""Settings of eagle-bench, and the names of its modes."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Literal

import eagle_mlx as em
from eagle_mlx.errors import ConfigError
from eagle_mlx.sampling_params import limit_of
from eagle_mlx.setting import AT_LEAST_0, AT_LEAST_1, SEED, SHARE, Group, Limit, between, setting
from eagle_mlx.target_options import TargetOptions
from eagle_mlx.text import LEAST_DISTINCT

from .. import speculation
from ..speculation import MemoryOptions

ModeName = Literal["mlx-lm", "mlx-lm-batch", "mlx-lm-draft", "plain", "ngram", "draft", "eagle", "hybrid"]
BASELINES: tuple[ModeName, ...] = ("mlx-lm", "mlx-lm-batch", "mlx-lm-draft")
NEEDS: dict[ModeName, tuple[str, ...]] = {
    "eagle": ("--head",),
    "hybrid": ("--head", "--draft-model"),
    "draft": ("--draft-model",),
    "mlx-lm-draft": ("--draft-model",),
}
"""Modes that need a second model, and the flags that name one."""
USE_HEAD: tuple[ModeName, ...] = ("eagle", "hybrid")
_PICTURE = Limit(lambda file: file.suffix in (".png", ".pdf", ".svg"), "must end in .png, .pdf or .svg, not {}")
RANDOM = "random"  # the value of `--head` for random weights: the worst case


@dataclass(frozen=True)
class BenchConfig(Group):
    """The way to measure."""

    max_tokens: int = setting(128, "maximum number of new tokens", AT_LEAST_1)
    temperature: float = 0.0
    repeats: int = setting(3, "number of measurements", AT_LEAST_1)
    seed: int = setting(
        0, "seed of the first prompt if the temperature is above 0; later prompts count up from it", SEED
    )
    least_distinct: float = setting(
        LEAST_DISTINCT,
        "minimum share of distinct 4-grams in a reference continuation; prompts with less loop, and are left out",
        SHARE,
        metavar="R",
    )
    acceptance: Literal["coupled", "rejection"] = setting(
        "coupled", "acceptance rule for sampled drafts; only coupled texts can be compared"
    )
    ignore_eos: bool = setting(False, "make every continuation --max-tokens long")
    turn: int = setting(
        0,
        "switch modes after N tokens per row instead of after whole prompts; helps if the machine's speed "
        "varies; mlx-lm-batch always takes one long turn",
        AT_LEAST_0,
        shown="",
    )

    def params(self, count: int, max_tokens: int) -> list[em.SamplingParams]:
        seeds = [self.seed + index if self.temperature else None for index in range(count)]
        common = em.SamplingParams(self.temperature, max_tokens=max_tokens, acceptance=self.acceptance)
        return [replace(common, ignore_eos=self.ignore_eos, seed=seed) for seed in seeds]


@dataclass(frozen=True)
class BenchOptions(Group):
    """The modes to measure, and the prompts."""

    target: str | None = setting(None, speculation.TARGET_HELP, metavar="MODEL")
    head: str | None = setting(
        None,
        "folder or hub id of the head; auto (the default) finds one, as in eagle-serve; none uses no head; "
        "random is the worst case",
    )
    head_bits: speculation.HeadBits | None = setting(None, speculation.HEAD_BITS)
    draft_window: int | None = setting(None, speculation.DRAFT_WINDOW, AT_LEAST_0)
    draft_sink: int | None = setting(None, speculation.DRAFT_SINK, AT_LEAST_0, metavar="S")
    draft_model: str | None = setting(
        None, "folder or hub id of a small model with the same tokenizer", metavar="MODEL", also=("draft_model_path",)
    )
    modes: tuple[ModeName, ...] | None = setting(None, "ways to decode (default: all for which you give a model)")
    batch: tuple[int, ...] = setting((1,), "rows that decode together", AT_LEAST_1)
    depth: tuple[int, ...] | None = setting(
        None,
        "draft tokens per round; the maximum if the policy adapts (default: 4, or 8 if the only policy is throughput)",
        between(1, 20),
        metavar="K",
    )
    nodes: tuple[int, ...] = setting(
        (0,),
        "tokens in a draft tree of up to --depth levels; 0 drafts chains; --nodes 0 16 compares both",
        speculation.NODES,
    )
    policy: tuple[speculation.PolicyName, ...] = setting(
        ("fixed",), "how to choose the number of draft tokens, up to --depth; fixed always drafts --depth tokens"
    )
    temperature: tuple[float, ...] = setting(
        (BenchConfig.temperature,), "sampling temperature; 0 is greedy", limit_of("temperature"), metavar="T"
    )
    prompts: Path | None = setting(
        None, "jsonl file of rows with `messages`, `prompt` or `turns` (default: held-out Python functions)"
    )
    limit: int = setting(100, "number of prompts, spread evenly over categories", AT_LEAST_1)
    filler: int | None = setting(
        None,
        "put N tokens of text before each prompt; a different text each time, to measure long contexts",
        AT_LEAST_1,
    )
    prior: bool = setting(
        False, "with --policy throughput: start from the target's cost curve; it is measured at the start and saved"
    )
    json: Path | None = setting(None, "write the figures to this file")
    plot: Path | None = setting(None, "draw the figures as a bar chart", _PICTURE, metavar="FILE.png")
    quiet: bool = setting(False, "no progress bars")
    measuring: BenchConfig = field(default_factory=BenchConfig)
    memory: MemoryOptions = field(default_factory=MemoryOptions)
    loading: TargetOptions = field(default_factory=TargetOptions)

    @property
    def depths(self) -> tuple[int, ...]:
        """`depth`, or the default that suits all policies."""
        return self.depth or (min(speculation.DEFAULT_TOKENS[policy] for policy in self.policy),)

    def _check(self) -> None:
        if any(0 < size <= min(self.depths) for size in self.nodes):
            raise ConfigError(f"--nodes must be above --depth {min(self.depths)}, or 0 for chains")
