"""Settings of the commands of `eagle-data`: what to read and keep, what to write, and how the target generates."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from eagle_mlx.errors import ConfigError
from eagle_mlx.policy.throughput import MOST_TOKENS
from eagle_mlx.sampling_params import SamplingParams, limit_of
from eagle_mlx.setting import AT_LEAST_0, AT_LEAST_1, DRAFT_TOKENS, REQUIRED, SEED, SHARE, Group, Limit, setting
from eagle_mlx.target_options import TargetOptions
from eagle_mlx.text import LEAST_DISTINCT

from .sources.reading import DataConfig, FilterOptions, Split
from .synthesis import DOMAINS, FILE, Domain, choose_domains

FIRST_ROWS = 32
"""Initial batch size: 32 x 500 tokens take 2.4 GB with an 8B model (36 layers, 8 KV heads of 128, 16 bits)."""
MOST_ROWS = 256
"""Maximum batch size. Its logits take 150 MB with a vocabulary of 150,000. `kv_bytes` limits the KV cache."""
_AUX_LAYERS = "layers that the head reads; P-EAGLE needs N-2 too (default: 1, N/2-1 and N-4 of N)"
_LAYERS = Limit(re.compile(r"\d+(,\d+)*").fullmatch, "must be layer numbers with commas, such as 1,6,10, not {}")
_SPLIT = (
    "part to read; heldout is one conversation in 25 (in small files one in 10), chosen by a hash of its prompt (for "
    "builtin:, of its file); train is the rest"
)
_SYSTEM = "system prompt that replaces a conversation's own, '' for none; if repeated, the seed chooses for each row"
_BATCH = f"batch size (default: {FIRST_ROWS}, doubled while that is faster, up to {MOST_ROWS})"
_MAP = "field names (role=from,content=value or prompt=question,completion=answer); repeatable, one for each SPEC"


@dataclass(frozen=True, kw_only=True)
class ChoiceOptions(Group):
    """Reading of rows, and their order."""

    seed: int = setting(DataConfig.seed, "seed of everything random", SEED)
    map: tuple[str, ...] = setting((), _MAP, metavar="[SPEC:]FIELD=NAME,…", repeat=True)
    filters: FilterOptions = field(default_factory=FilterOptions)

    def config(self, sources: Sequence[str], limit: int | None) -> DataConfig:
        """Return what to read from these sources. Raises ConfigError or DataError if a setting or source is invalid."""
        return DataConfig(sources=tuple(sources), limit=limit, **self.flat())


@dataclass(frozen=True, kw_only=True)
class ReadOptions(Group):
    """A target, the conversations that it reads, and whether to replace the output."""

    target: str = setting(REQUIRED, "folder or hub id of the model", metavar="MODEL")
    data: tuple[str, ...] = setting(REQUIRED, "sources to read; repeatable", metavar="SPEC[=WEIGHT]")
    split: Split | None = setting(None, _SPLIT, shown="train of builtin:, all of anything else")
    limit: int | None = setting(None, "maximum number of conversations from all sources together", AT_LEAST_1)
    overwrite: bool = setting(False, "replace an existing output")
    choice: ChoiceOptions = field(default_factory=ChoiceOptions)
    loading: TargetOptions = field(default_factory=TargetOptions)


@dataclass(frozen=True, kw_only=True)
class DraftingOptions(Group):
    """Batch size and draft head."""

    batch: int | None = setting(None, _BATCH, AT_LEAST_1)
    head: str | None = setting(None, "draft head, which saves time without changing the text", metavar="DIR_OR_ID")
    num_speculative_tokens: int = setting(MOST_TOKENS, "maximum drafted tokens per round", DRAFT_TOKENS, metavar="K")


@dataclass(frozen=True)
class MakeSampling(Group):
    """Sampling of answers and user turns."""

    temperatures: tuple[float, ...] = setting(
        (0.0, 0.8),
        "temperature of answers; if there are several, the seed chooses one per conversation",
        limit_of("temperature"),
        name="temperature",
        metavar="T",
    )
    top_p: float = setting(1.0, "top-p of answers", limit_of("top_p"))
    max_tokens: int = setting(512, "maximum tokens of an answer", AT_LEAST_1)
    user_temperature: float = setting(1.0, "temperature of user turns", limit_of("temperature"), metavar="T")
    user_top_p: float = setting(1.0, "top-p of user turns", limit_of("top_p"), metavar="P")
    user_tokens: int = setting(256, "maximum tokens of a user turn; longer ones are dropped", AT_LEAST_1)
    systems: tuple[str, ...] = setting(
        ("",),
        "system prompt for answers; '' for the template's own; if repeated, each conversation gets one",
        name="system",
        repeat=True,
    )


@dataclass(frozen=True, kw_only=True)
class MakeConfig(MakeSampling):
    """The way to make up conversations. Raises ConfigError on creation if a setting is invalid."""

    seed: int = 0
    domains: tuple[Domain, ...] = DOMAINS
    turns: tuple[float, ...] = (0.7, 0.2, 0.1)
    """Shares of conversations with one planned user turn, two, and so on."""
    questions: tuple[tuple[str, str], ...] = ()
    """System prompts (or "") and first user turns. Every second conversation begins with the next of them."""

    def _check(self) -> None:
        for name in ("domains", "turns", "temperatures", "systems"):
            if not getattr(self, name):
                raise ConfigError(f"{name} must have at least one value")
        if min(self.turns) < 0 or not sum(self.turns) > 0:
            raise ConfigError(f"--turns {self.turns}: each share must be 0 or more, and at least one must be above 0")

    def question(self) -> SamplingParams:
        return SamplingParams(temperature=self.user_temperature, top_p=self.user_top_p, max_tokens=self.user_tokens)

    def answer(self, temperature: float) -> SamplingParams:
        return SamplingParams(temperature=temperature, top_p=self.top_p, max_tokens=self.max_tokens)


@dataclass(frozen=True, kw_only=True)
class MakeOptions(Group):
    """The conversations to make, and the output."""

    target: str = setting(REQUIRED, "folder or hub id of the model", metavar="MODEL")
    output: Path = setting(REQUIRED, "file to write", metavar="FILE.jsonl[.gz]")
    rows: int | None = setting(None, "conversations to make", AT_LEAST_1)
    tokens: int | None = setting(None, "tokens to make, template included", AT_LEAST_1)
    seed: int = setting(MakeConfig.seed, "seed of everything random", SEED)
    overwrite: bool = setting(False, "replace an existing output")
    finish: bool = setting(False, "finish the output of an interrupted command, without making more")
    sampling: MakeSampling = field(default_factory=MakeSampling)
    domains: Path = setting(FILE, "file of domains (subjects) to write about", metavar="FILE.yaml")
    domain: tuple[str, ...] = setting((), "only these domains; repeatable", metavar="NAME[=WEIGHT]", repeat=True)
    turns: str = setting(
        ",".join(map(str, MakeConfig.turns)), "shares of conversations with one user turn, two, …", metavar="A,B,…"
    )
    drafting: DraftingOptions = field(default_factory=DraftingOptions)
    loading: TargetOptions = field(default_factory=TargetOptions)

    def config(self) -> MakeConfig:
        """Return how to make them up. Raises ConfigError if a setting is invalid."""
        domains = choose_domains(self.domain, self.domains)
        try:
            turns = tuple(map(float, self.turns.split(",")))
        except ValueError as e:
            raise ConfigError(f"--turns {self.turns}: it must be numbers with commas, such as 0.7,0.2,0.1") from e
        return MakeConfig(seed=self.seed, domains=domains, turns=turns, **vars(self.sampling))


@dataclass(frozen=True, kw_only=True)
class RegenerateOptions(ReadOptions):
    """Conversations to answer, and how."""

    output: Path = setting(REQUIRED, "file to write", metavar="FILE.jsonl")
    temperature: float = setting(SamplingParams.temperature, "0 is greedy", limit_of("temperature"))
    top_k: int = setting(SamplingParams.top_k, "0 keeps all tokens", limit_of("top_k"))
    top_p: float = setting(SamplingParams.top_p, "1 keeps all tokens", limit_of("top_p"))
    max_tokens: int = setting(512, "maximum tokens of an answer", AT_LEAST_1)
    system: tuple[str, ...] = setting((), _SYSTEM, repeat=True)
    least_distinct: float = setting(
        0.0, f"drop answers with a smaller share of distinct 4-grams; {LEAST_DISTINCT} drops loops", SHARE, metavar="R"
    )
    drafting: DraftingOptions = field(default_factory=DraftingOptions)


@dataclass(frozen=True, kw_only=True)
class CollectOptions(ReadOptions):
    """Conversations to capture, and where to write their states."""

    split: Split | None = setting("train", _SPLIT)
    output: Path = setting(REQUIRED, "folder for the shards", metavar="DIR")
    max_length: int = setting(2048, "maximum tokens of a conversation; the rest is cut off", AT_LEAST_1)
    aux_layers: str | None = setting(None, _AUX_LAYERS, _LAYERS, metavar="A,B,C")
    batch_tokens: int = setting(2048, "tokens per forward", AT_LEAST_1)
    bits: Literal[16, 8] = setting(16, "bits per value in the shards")
    resume: bool = setting(False, "capture the damaged shards of a complete DIR again")


@dataclass(frozen=True, kw_only=True)
class InspectOptions(Group):
    """Conversations to inspect."""

    data: tuple[str, ...] = setting(REQUIRED, "folder of shards, or sources", name="SOURCE", positional=True)
    target: str | None = setting(None, "render for this model, and mark the learned parts", metavar="MODEL")
    limit: int = setting(3, "conversations to show", AT_LEAST_1)
    histogram: int = setting(1000, "conversations in the histogram of lengths; 0 for no histogram", AT_LEAST_0)
    split: Split | None = setting("all", _SPLIT)
    choice: ChoiceOptions = field(default_factory=ChoiceOptions)
    loading: TargetOptions = field(default_factory=TargetOptions)


@dataclass(frozen=True)
class PresetsOptions(Group):
    """No settings."""
