"""Flags that the commands of `eagle-data` share: what is read, what of it is kept, and how the target generates."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator, Sequence
from typing import get_args

from mlx_lm.tokenizer_utils import TokenizerWrapper

from eagle_mlx.engine import Engine
from eagle_mlx.errors import ConfigError, TargetError
from eagle_mlx.head_check import head_warning
from eagle_mlx.heads import load_head
from eagle_mlx.heads.eagle3 import default_aux_layers
from eagle_mlx.heads.precision import quantize_for
from eagle_mlx.policy import FixedPolicy, Policy, ThroughputPolicy
from eagle_mlx.policy.throughput import MOST_TOKENS
from eagle_mlx.proposers.base import Proposer
from eagle_mlx.proposers.capturing import CapturingProposer
from eagle_mlx.proposers.head import HeadProposer
from eagle_mlx.target import Target
from eagle_mlx.target_options import add_target_arguments, options_of

from .conversation import Conversation
from .sources.reading import SPLITS, DataConfig, Dedupe, ReadReport, read_conversations
from .synthesis.loop import FIRST_ROWS, MOST_ROWS, let_grow

_SPLIT_HELP = (
    "train leaves out one conversation in 25, chosen by a hash of its prompt (of its file for builtin:), heldout is "
    "those alone"
)


def add_data(parser: argparse.ArgumentParser, split: str | None) -> None:
    """`--target`, `--data` and all that goes with them."""
    add_target(parser)
    parser.add_argument(
        "--data", required=True, nargs="+", action="extend", metavar="SPEC[=WEIGHT]", help="what to read; repeatable"
    )
    parser.add_argument("--limit", type=positive, metavar="N", help="conversations at most, all sources together")
    parser.add_argument("--overwrite", action="store_true", help="replace an output that exists")
    add_choice(parser, split)


def add_target(parser: argparse.ArgumentParser, optional: str = "") -> None:
    """`--target`, and how it is loaded; `optional` says what it is for, where it may be left out."""
    parser.add_argument("--target", required=not optional, help=optional or "the model: a folder or a hub id")
    add_target_arguments(parser)


def add_choice(parser: argparse.ArgumentParser, split: str | None) -> None:
    """The flags that say which conversations of a source are wanted, and in which order."""
    default = DataConfig(("builtin:python",))
    shown = split or "train of builtin:, all of anything else"
    parser.add_argument("--split", choices=SPLITS, default=split, help=f"{_SPLIT_HELP} ({shown})")
    parser.add_argument("--seed", type=int, default=default.seed, help="of the order, and of sampling (%(default)s)")
    parser.add_argument(
        "--map",
        action="append",
        default=[],
        metavar="[SPEC:]FIELD=NAME,…",
        help="what the rows call their fields: role=from,content=value or prompt=question,completion=answer; "
        "repeatable, one for each SPEC",
    )
    parser.add_argument("--stream", action="store_true", help="read rows as they come and store none: for huge sets")
    parser.add_argument("--skip-bad", action="store_true", help="leave out and count rows that cannot be used")
    parser.add_argument("--keep-turns", default="", metavar="MIN:MAX", help="keep conversations of so many user turns")
    parser.add_argument("--keep-tokens", default="", metavar="MIN:MAX", help="keep conversations of so many tokens")
    parser.add_argument(
        "--dedupe",
        choices=get_args(Dedupe),
        default=default.dedupe,
        help="keep the first of those with the same prompt, or of the same whole (%(default)s)",
    )


def add_drafting(parser: argparse.ArgumentParser) -> None:
    """How many decode at once, and what drafts for them."""
    parser.add_argument(
        "--batch",
        type=positive,
        metavar="N",
        help=f"made at once (default: {FIRST_ROWS}, doubled while that makes more tokens a second, up to {MOST_ROWS})",
    )
    parser.add_argument("--head", metavar="DIR_OR_ID", help="a draft head of the target: the same text, sooner")
    parser.add_argument(
        "--num-speculative-tokens",
        type=int,
        default=MOST_TOKENS,
        metavar="K",
        help="drafted a round at most (%(default)s)",
    )


def engine_of(args: argparse.Namespace, target: Target, captured: Sequence[int] = ()) -> Engine:
    """The engine that `add_drafting` asks for, which keeps the hidden states of the layers `captured`, if any.

    Raises HeadError for a head that is none of the target's.
    """
    if args.num_speculative_tokens < 0:
        raise ConfigError(f"--num-speculative-tokens must be at least 0; got {args.num_speculative_tokens}")
    proposer, policy = _drafting(args, target)
    options_of(args).wire_active()
    if captured:
        proposer = CapturingProposer(captured, proposer)
    engine = Engine(target, proposer, policy=policy, max_batch=args.batch or FIRST_ROWS)
    return engine if args.batch else let_grow(engine)


def _drafting(args: argparse.Namespace, target: Target) -> tuple[Proposer | None, Policy]:
    if args.head is None or args.num_speculative_tokens == 0:
        return None, FixedPolicy(0)
    head = load_head(args.head, target)
    quantize_for(head, target)
    said = head_warning(head, target)
    if said is not None:
        print(f"warning: {said}", file=sys.stderr)
    return HeadProposer(head), ThroughputPolicy(args.num_speculative_tokens)


def data_config(args: argparse.Namespace, limit: int | None = None) -> DataConfig:
    """What the flags say. Raises ConfigError or DataError for what cannot be."""
    return DataConfig(
        sources=tuple(args.data),
        map=tuple(args.map),
        limit=limit or 0,
        seed=args.seed,
        stream=args.stream,
        skip_bad=args.skip_bad,
        keep_turns=args.keep_turns,
        keep_tokens=args.keep_tokens,
        dedupe=args.dedupe,
    )


def conversations(
    args: argparse.Namespace, tokenizer: TokenizerWrapper | None, report: ReadReport
) -> Iterator[Conversation]:
    """The conversations that the flags ask for."""
    return read_conversations(data_config(args, args.limit), args.split, tokenizer, report)


def aux_layers_of(wish: str | None, target: Target) -> tuple[int, ...]:
    """The layers that `--aux-layers` names, or those that EAGLE-3 heads read. Raises ConfigError for what are none."""
    if wish is None:
        return default_aux_layers(target.num_layers)
    try:
        layers = tuple(int(part) for part in wish.split(","))
    except ValueError as e:
        raise ConfigError(f"--aux-layers {wish}: it must be layer numbers with commas, such as 1,6,10") from e
    if not all(0 <= layer < target.num_layers for layer in layers):
        raise ConfigError(f"--aux-layers {wish}: the target has layers 0 to {target.num_layers - 1}")
    return layers


def tokenizer_of(target: Target) -> TokenizerWrapper:
    if target.tokenizer is None:
        raise TargetError(f"{target.name} has no tokenizer")
    return target.tokenizer


def positive(text: str) -> int:
    """A number for argparse, of at least 1."""
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"{text} must be at least 1")
    return value
