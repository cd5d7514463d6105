"""`eagle-data make`: have the target make up conversations."""

from __future__ import annotations

import sys
import textwrap
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Literal

from eagle_mlx.cpu import tune_process
from eagle_mlx.errors import ConfigError, DataError
from eagle_mlx.files import check_idle, check_writable
from eagle_mlx.setting import AT_LEAST_1, REQUIRED, SEED, Group, setting
from eagle_mlx.target import Target
from eagle_mlx.target_options import TargetOptions

from .capturing import ShardPlace, shard_meta
from .jsonl import check_new, partial_path
from .options import AUX_LAYERS, LAYER_NUMBERS, TARGET_HELP, DraftingOptions, aux_layers_of, engine_of, tokenizer_of
from .synthesis.file import MakeLimits, Wanted, make_to_file
from .synthesis.tries import MakeConfig, MakeSampling, beginning
from .synthesis.user_turns import DOMAINS, FILE, choose_domains, steerable

_SHARES = textwrap.indent(textwrap.fill(", ".join(f"{domain.name}={domain.weight:g}" for domain in DOMAINS), 110), "  ")
HELP = f"""\
Have the target make up conversations. You need no data set, no license and no network.

The target continues its own chat template at the place of a user turn: it writes the user's turn (Magpie, Xu et al.
2024, arXiv 2406.08464), answers it, and may ask again. For most user turns, a system prompt, which the answers do not
see, sets the topic. --domains FILE.yaml defines your own ({FILE.name} is an example). The default domains are:
{_SHARES}

Unusable tries are dropped and counted. The same seed gives the same file. Finished rows are in FILE.jsonl.partial until
FILE.jsonl is complete, and the same command continues with it after an interruption; --rows, --tokens, --batch and
--head may change. To start over, delete it. To stop early, add --finish.

--capture also stores the hidden states of the conversations to learn from in shards, like `eagle-data collect` but
without reading them again. Then --rows and --tokens may not change.

examples:
  eagle-data make --target Qwen3-4B --rows 2000 --output own.jsonl
  eagle-data make --target Qwen3-4B --tokens 3000000 --output own.jsonl --domain any=2 --domain code --seed 1
  eagle-train --target Qwen3-4B --data own.jsonl --output out/head
  eagle-data make --target Qwen3-4B --rows 2000 --output own.jsonl --capture out/shards --bits 8
  eagle-train --target Qwen3-4B --shards out/shards --eval-data own.jsonl --output out/head
"""


@dataclass(frozen=True)
class WritingOptions(MakeSampling):
    """What to write, and how to sample it."""

    domains: Path = setting(
        FILE,
        "file of domains (subjects) to write about; each name has the keys weight, system and openings",
        metavar="FILE.yaml",
    )
    domain: tuple[str, ...] = setting((), "only these domains; repeatable", metavar="NAME[=WEIGHT]", repeat=True)
    turns: str = setting(
        ",".join(f"{share:g}" for share in MakeConfig.turns),
        "shares of conversations with one user turn, two, …",
        metavar="A,B,…",
    )

    def config(self, seed: int) -> MakeConfig:
        """Return the configuration for this seed. Raises ConfigError if a setting is invalid."""
        sampling = {field.name: getattr(self, field.name) for field in fields(MakeSampling)}
        domains = choose_domains(self.domain, self.domains)
        try:
            turns = tuple(map(float, self.turns.split(",")))
        except ValueError as e:
            raise ConfigError(f"--turns {self.turns}: it must be numbers with commas, such as 0.7,0.2,0.1") from e
        return MakeConfig(seed=seed, domains=domains, turns=turns, **sampling)


@dataclass(frozen=True, kw_only=True)
class MakeOptions(Group):
    """The number of conversations to make, and the output."""

    target: str = setting(REQUIRED, TARGET_HELP, metavar="MODEL")
    output: Path = setting(REQUIRED, "file to write", metavar="FILE.jsonl[.gz]")
    rows: int | None = setting(None, "conversations to make", AT_LEAST_1)
    tokens: int | None = setting(None, "tokens to make, template included", AT_LEAST_1)
    seed: int = setting(MakeConfig.seed, "seed of everything random", SEED)
    overwrite: bool = setting(False, "replace an existing output")
    finish: bool = setting(False, "finish the output of an interrupted command, without making more")
    capture: Path | None = setting(None, "folder for shards with the hidden states", metavar="DIR")
    aux_layers: str | None = setting(None, AUX_LAYERS, LAYER_NUMBERS, metavar="A,B,C")
    bits: Literal[16, 8] = setting(16, "bits per value in the shards")
    writing: WritingOptions = field(default_factory=WritingOptions)
    drafting: DraftingOptions = field(default_factory=DraftingOptions)
    loading: TargetOptions = field(default_factory=TargetOptions)


def run(options: MakeOptions) -> None:
    """Check the template first, so that an unusable target is reported at once, then make conversations."""
    check_new(options.output, options.overwrite)
    begun, limits = partial_path(options.output), MakeLimits()
    check_idle(begun)
    if options.capture is not None:
        check_writable(options.capture)
    if options.finish:
        if not begun.exists():
            raise DataError(f"there is no {begun} to finish; leave out --finish to make conversations")
        limits = MakeLimits(enough=lambda made, coming: True, first=False)
    wanted = Wanted(options.rows or 0, options.tokens or 0)
    config = options.writing.config(options.seed)
    tune_process()
    target = options.loading.load(options.target)
    _tell_unsteered(target, config)
    place: ShardPlace | None = None
    if options.capture is not None:
        meta = shard_meta(target, aux_layers_of(options.aux_layers, target), options.bits)
        place = ShardPlace(options.capture, meta, options.overwrite)
    engine = engine_of(options.drafting, options.loading, target, place)
    report = make_to_file(engine, config, wanted, options.output, options.overwrite, True, place, limits=limits)
    print(f"{options.output}: {report.summary()}")


def _tell_unsteered(target: Target, config: MakeConfig) -> None:
    """Tell what the target cannot be steered to. Raises TargetError if it cannot make up anything."""
    tokenizer = tokenizer_of(target)
    if not tokenizer.has_chat_template:
        begin = tokenizer.decode(beginning(tokenizer, target.name))
        print(f"without a chat template, the target writes texts from their beginning ({begin!r})", file=sys.stderr)
        return
    usable = {domain.name for domain in steerable(tokenizer, config.domains, target.name)}
    if left := ", ".join(domain.name for domain in config.domains if domain.name not in usable):
        print(f"the chat template accepts no system prompt, so these domains are left out: {left}", file=sys.stderr)
