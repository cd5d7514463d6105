"""`eagle-data make`: have the target make up conversations."""

from __future__ import annotations

import sys
import textwrap
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from eagle_mlx.cpu import tune_process
from eagle_mlx.errors import ConfigError, DataError
from eagle_mlx.setting import AT_LEAST_1, REQUIRED, Group, setting
from eagle_mlx.target import Target
from eagle_mlx.target_options import TargetOptions

from .capturing import shard_meta
from .jsonl import check_idle, check_new, partial_path
from .options import AUX_LAYERS, TARGET_HELP, DraftingOptions, aux_layers_of, engine_of, tokenizer_of
from .synthesis.file import Limits, Wanted, make_to_file
from .synthesis.shards import ShardPlace
from .synthesis.tries import MakeConfig, beginning
from .synthesis.user_turns import DOMAINS, FILE, choose_domains, steerable

_SHARES = textwrap.indent(textwrap.fill(", ".join(f"{domain.name}={domain.weight:g}" for domain in DOMAINS), 110), "  ")
HELP = f"""\
Have the target make up conversations: no data set, no licence question, no network.

The target is given its own chat template up to the place where the user speaks, and goes on by itself: it writes the
user's turn (Magpie, Xu et al. 2024, arXiv 2406.08464), then answers it, and may ask again. What a head has to predict
is the target's own answers, and these are.

A target without a chat template writes plain texts instead, from the beginning of a text on, drawn as user turns are.

A system prompt steers what most user turns are about, and some are begun for the target; no answer sees that prompt.
--domains FILE.yaml names domains of yours, with what they begin with ({FILE.name} is an example). The project's own:
{_SHARES}

Tries are left out that came to nothing: user turns that do not end, loop, hold special tokens or are an assistant's;
answers that loop, refuse or are empty; and whatever begins like another. The counts are printed at the end. One
conversation in 25 is on the held-out side by a hash of its prompt: --split train and --split heldout tell them apart.

The same seed gives the same file. What is done lies in FILE.jsonl.partial until FILE.jsonl is whole. Ctrl-C, a SIGTERM
or a crash lose no row that was made: the same command continues with that file by itself. --rows, --tokens, --batch and
--head may differ. To begin anew, delete the .partial file.

--finish, beside the same command, makes no more: FILE.jsonl and the shards get what is done.

--capture keeps the hidden states of the forwards that generate, in shards as `eagle-data collect` makes them, of the
conversations to learn from: nothing is read again. Then --rows and --tokens must stay what they were, too.

examples:
  eagle-data make --target Qwen3-4B --rows 2000 --output own.jsonl
  eagle-data make --target Qwen3-4B --tokens 3000000 --output own.jsonl --domain any=2 --domain code --seed 1
  eagle-data make --target Qwen3-4B --rows 2000 --output own.jsonl --domains what-my-users-ask.yaml
  eagle-train --target Qwen3-4B --data own.jsonl --output out/head
  eagle-data make --target Qwen3-4B --rows 2000 --output own.jsonl --capture out/shards --bits 8
  eagle-train --target Qwen3-4B --shards out/shards --eval-data own.jsonl --output out/head
"""


_DEFAULT = MakeConfig()


@dataclass(frozen=True)
class WritingOptions(Group):
    """What to write, and how to sample it."""

    domains: Path = setting(
        FILE,
        "domains of yours: under each name weight, system, openings; the project's own are the default",
        metavar="FILE.yaml",
    )
    domain: tuple[str, ...] = setting((), "only these domains; repeatable", metavar="NAME[=WEIGHT]", repeat=True)
    turns: str = setting(
        ",".join(f"{share:g}" for share in _DEFAULT.turns),
        "shares of conversations in which the user is to speak once, twice, …",
        metavar="A,B,…",
    )
    temperature: tuple[float, ...] = setting(
        _DEFAULT.temperatures,
        "of the answers; of several each conversation gets one by the seed: heads serve both greedy and sampled text",
        metavar="T",
    )
    top_p: float = setting(_DEFAULT.top_p, "of the answers")
    max_tokens: int = setting(_DEFAULT.max_tokens, "of one answer", AT_LEAST_1)
    user_temperature: float = setting(_DEFAULT.user_temperature, "of user turns", metavar="T")
    user_top_p: float = setting(_DEFAULT.user_top_p, "of user turns", metavar="P")
    user_tokens: int = setting(_DEFAULT.user_tokens, "by which a user turn must have ended", AT_LEAST_1)
    system: tuple[str, ...] = setting(
        (),
        "system prompt to answer under, '' for the template's own; of several each conversation gets one",
        repeat=True,
    )

    def config(self, seed: int) -> MakeConfig:
        """Return the configuration for this seed. Raises ConfigError if a setting is invalid."""
        return MakeConfig(
            seed=seed,
            domains=choose_domains(self.domain, self.domains),
            turns=_shares(self.turns),
            user_temperature=self.user_temperature,
            user_top_p=self.user_top_p,
            user_tokens=self.user_tokens,
            temperatures=self.temperature,
            top_p=self.top_p,
            max_tokens=self.max_tokens,
            systems=self.system or ("",),
        )


@dataclass(frozen=True, kw_only=True)
class MakeOptions(Group):
    """How much to make, and where to write it."""

    target: str = setting(REQUIRED, TARGET_HELP, metavar="MODEL")
    output: Path = setting(REQUIRED, "file to make", metavar="FILE.jsonl[.gz]")
    rows: int | None = setting(None, "conversations to make", AT_LEAST_1)
    tokens: int | None = setting(None, "tokens to make, template included", AT_LEAST_1)
    seed: int = setting(_DEFAULT.seed, "of all that is drawn")
    overwrite: bool = setting(False, "replace an output that exists")
    finish: bool = setting(False, "make no more: what an interrupted command did is enough")
    capture: Path | None = setting(
        None, "folder of shards to make too: the states of these very forwards", metavar="DIR"
    )
    aux_layers: str | None = setting(None, AUX_LAYERS, metavar="A,B,C")
    bits: Literal[16, 8] = setting(16, "of a value in the shards")
    writing: WritingOptions = field(default_factory=WritingOptions)
    drafting: DraftingOptions = field(default_factory=DraftingOptions)
    loading: TargetOptions = field(default_factory=TargetOptions)


def run(options: MakeOptions) -> None:
    """Check the template first, so that an unusable target is reported at once, then make conversations."""
    check_new(options.output, options.overwrite)
    check_idle(options.output)
    limits = _limits(options)
    wanted = Wanted(options.rows or 0, options.tokens or 0)
    config = options.writing.config(options.seed)
    tune_process()
    target = options.loading.load(options.target)
    _tell_unsteered(target, config)
    place, layers = _place(options, target)
    try:
        engine = engine_of(options.drafting, options.loading, target, layers)
        report = make_to_file(engine, config, wanted, options.output, options.overwrite, True, place, limits=limits)
    except KeyboardInterrupt as e:
        part = partial_path(options.output)
        if not part.exists():
            raise
        e.args = (f"what is done is in {part}, and the same command continues with it",)
        raise
    print(f"{options.output}: {report.summary()}")


def _limits(options: MakeOptions) -> Limits:
    """Return the conditions that end the file early. Raises DataError if there is nothing to finish."""
    if not options.finish:
        return Limits()
    if not (begun := partial_path(options.output)).exists():
        raise DataError(f"there is no {begun} to finish; leave --finish out, and the conversations are made")
    return Limits(enough=lambda made, coming: True, first=False)


def _place(options: MakeOptions, target: Target) -> tuple[ShardPlace | None, tuple[int, ...]]:
    """Return the place for hidden states and the layers to capture, or None and no layers without `--capture`."""
    if options.capture is None:
        return None, ()
    aux_layers = aux_layers_of(options.aux_layers, target)
    place = ShardPlace(options.capture, shard_meta(target, aux_layers, options.bits), options.overwrite)
    return place, (*aux_layers, target.num_layers - 1)


def _tell_unsteered(target: Target, config: MakeConfig) -> None:
    """Warn about settings that have no effect. Raises TargetError if the target cannot make up anything."""
    tokenizer = tokenizer_of(target)
    if not tokenizer.has_chat_template:
        begin = tokenizer.decode(beginning(tokenizer, target.name))
        print(
            f"the target has no chat template, so it writes texts from their beginning on ({begin!r}): of no effect "
            "are --domain, --turns, --system, --temperature, --top-p and --user-tokens",
            file=sys.stderr,
        )
        return
    usable = {domain.name for domain in steerable(tokenizer, config.domains, target.name)}
    if left := [domain.name for domain in config.domains if domain.name not in usable]:
        print(f"the chat template takes no system prompt, so nothing steers to: {', '.join(left)}", file=sys.stderr)


def _shares(text: str) -> tuple[float, ...]:
    try:
        return tuple(float(part) for part in text.split(","))
    except ValueError as e:
        raise ConfigError(f"--turns {text}: it must be numbers with commas, such as 0.7,0.2,0.1") from e
