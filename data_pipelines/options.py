"""Settings that the commands of `eagle-data` share: what to read and keep, and how the target generates."""

from __future__ import annotations

import re
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field

from mlx_lm.tokenizer_utils import TokenizerWrapper

from eagle_mlx.engine import Engine
from eagle_mlx.errors import ConfigError, TargetError
from eagle_mlx.head_check import head_warning
from eagle_mlx.heads import load_head
from eagle_mlx.heads.eagle3 import default_aux_layers
from eagle_mlx.heads.precision import quantize_for
from eagle_mlx.policy.throughput import MOST_TOKENS
from eagle_mlx.setting import AT_LEAST_1, DRAFT_TOKENS, REQUIRED, SEED, Group, Limit, setting
from eagle_mlx.target import Target
from eagle_mlx.target_options import TargetOptions

from .capturing import ShardPlace
from .sources.reading import DataConfig, FilterOptions, Split
from .synthesis.loop import FIRST_ROWS, MOST_ROWS, growing_engine

TARGET_HELP = "folder or hub id of the model"
AUX_LAYERS = "layers that the head reads (default: 1, N/2-1 and N-4 of N)"
LAYER_NUMBERS = Limit(
    re.compile(r"\d+(,\d+)*").fullmatch,
    "must be layer numbers with commas, such as 1,6,10, not {}",
)
SPLIT_HELP = (
    "part to read; heldout is one conversation in 25 (in small files one in 10), chosen by a hash of its prompt (for "
    "builtin:, of its file); train is the rest"
)


@dataclass(frozen=True, kw_only=True)
class ChoiceOptions(Group):
    """How rows are read, and in which order."""

    seed: int = setting(DataConfig.seed, "seed of everything random", SEED)
    map: tuple[str, ...] = setting(
        (),
        "field names of the rows (role=from,content=value or prompt=question,completion=answer); repeatable, "
        "one for each SPEC",
        metavar="[SPEC:]FIELD=NAME,…",
        repeat=True,
    )
    filters: FilterOptions = field(default_factory=FilterOptions)

    def config(self, sources: Sequence[str], limit: int | None) -> DataConfig:
        """Return what to read from these sources. Raises ConfigError or DataError if a setting or source is invalid."""
        return DataConfig(sources=tuple(sources), limit=limit or 0, **self.flat())


@dataclass(frozen=True, kw_only=True)
class ReadOptions(Group):
    """A target, the conversations that it reads, and whether to replace the output."""

    target: str = setting(REQUIRED, TARGET_HELP, metavar="MODEL")
    data: tuple[str, ...] = setting(REQUIRED, "sources to read; repeatable", metavar="SPEC[=WEIGHT]")
    split: Split | None = setting(None, SPLIT_HELP, shown="train of builtin:, all of anything else")
    limit: int | None = setting(None, "maximum number of conversations from all sources together", AT_LEAST_1)
    overwrite: bool = setting(False, "replace an existing output")
    choice: ChoiceOptions = field(default_factory=ChoiceOptions)
    loading: TargetOptions = field(default_factory=TargetOptions)

    def data_config(self) -> DataConfig:
        """Return what to read. Raises ConfigError or DataError if a setting or source is invalid."""
        return self.choice.config(self.data, self.limit)


@dataclass(frozen=True, kw_only=True)
class DraftingOptions(Group):
    """Batch size and draft head."""

    batch: int | None = setting(
        None, f"batch size (default: {FIRST_ROWS}, doubled while that is faster, up to {MOST_ROWS})", AT_LEAST_1
    )
    head: str | None = setting(
        None, "draft head for the target; makes decoding faster without changing the text", metavar="DIR_OR_ID"
    )
    num_speculative_tokens: int = setting(MOST_TOKENS, "maximum drafted tokens per round", DRAFT_TOKENS, metavar="K")


def engine_of(
    options: DraftingOptions, loading: TargetOptions, target: Target, place: ShardPlace | None = None
) -> Engine:
    """Return an engine that captures for a `place`, if any. Raises HeadError if the head does not fit the target."""
    head = None
    if options.head is not None and options.num_speculative_tokens:
        head = load_head(options.head, target)
        quantize_for(head, target)
        if (said := head_warning(head, target)) is not None:
            print(f"warning: {said}", file=sys.stderr)
    loading.wire_active()
    return growing_engine(target, head, place, options.num_speculative_tokens, options.batch)


def aux_layers_of(wish: str | None, target: Target) -> tuple[int, ...]:
    """Return the layers of `--aux-layers`, or EAGLE-3's default layers. Raises ConfigError if a layer is invalid."""
    if wish is None:
        return default_aux_layers(target.num_layers)
    layers = tuple(map(int, wish.split(",")))
    if max(layers) >= target.num_layers:
        raise ConfigError(f"--aux-layers {wish}: the target has layers 0 to {target.num_layers - 1}")
    return layers


def tokenizer_of(target: Target) -> TokenizerWrapper:
    if target.tokenizer is None:
        raise TargetError(f"{target.name} has no tokenizer")
    return target.tokenizer
