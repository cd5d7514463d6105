"""The command `eagle-data`: collect hidden states, regenerate answers, look at data."""

from __future__ import annotations

import argparse
import shutil
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import fields
from itertools import chain, islice
from pathlib import Path

from mlx_lm.tokenizer_utils import TokenizerWrapper

from eagle_mlx import blas
from eagle_mlx.engine import Engine
from eagle_mlx.errors import ConfigError, DataError, EagleError, OutputError, ShardError, TargetError
from eagle_mlx.folders import check_free
from eagle_mlx.heads.eagle3 import default_aux_layers
from eagle_mlx.lanes import tune_process
from eagle_mlx.loops import LEAST_DISTINCT
from eagle_mlx.params import SamplingParams
from eagle_mlx.shards import BITS, MANIFEST, ShardReader, ShardRepair, bytes_per_token
from eagle_mlx.target import Target, load_target

from .builtin import Side
from .chat import Rendered, render, render_all
from .conversation import SHAPES, Conversation
from .jsonl import check_new, write_jsonl
from .regenerate import RegenerateReport, regenerate
from .shard_capture import ShardCapture
from .sources import SPECS, SPLITS, load_conversations

_HELP = f"""\
Prepare data for training a draft head.

  eagle-data inspect     look at conversations as the target sees them, or check a folder of shards
  eagle-data regenerate  have the target answer the prompts itself: what it says is what a head has to predict
  eagle-data collect     run the target over conversations and keep its hidden states in shards

Where data comes from (--data):
{SPECS}

Rows of files and of the hub's data sets:
{SHAPES}

examples:
  eagle-data inspect builtin:python --target checkpoints/target
  eagle-data regenerate --target checkpoints/target --data chats.jsonl --output answers.jsonl --max-tokens 256
  eagle-data collect --target checkpoints/target --data answers.jsonl --limit 1000 --output out/shards
  eagle-data inspect out/shards
  eagle-data collect --repair out/shards

A capture that was interrupted goes on when the same command is given again.
"""

_SPLIT_HELP = (
    "train leaves out one conversation in 25, chosen by a hash of its prompt (of its file for builtin:), heldout is "
    "those alone"
)


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command and return its exit code: 0, 2 after an error that the user can mend, 130 when interrupted."""
    given = list(sys.argv[1:] if argv is None else argv)
    try:
        given = _with_recorded(given)
    except EagleError as e:
        print(f"error: {e}", file=sys.stderr)
        return 2
    args = _parser().parse_args(given, argparse.Namespace(given=given))
    print(f"blas: {blas.activate()}", file=sys.stderr)
    try:
        command: Callable[[argparse.Namespace], None] = args.command
        command(args)
    except EagleError as e:
        print(f"error: {e}", file=sys.stderr)
        return 2
    except KeyboardInterrupt as e:
        print(f"interrupted; {e or 'nothing was written'}", file=sys.stderr)
        return 130
    return 0


def collect(args: argparse.Namespace) -> None:
    """Render all conversations first, so that bad data shows at once, then capture what is not there yet."""
    if not args.resume:
        check_free(args.output, args.overwrite)
    tune_process()
    target = load_target(args.target)
    aux_layers = _aux_layers(args.aux_layers, target)
    if args.max_length > target.context_length:
        raise ConfigError(f"--max-length {args.max_length}: the target's context is {target.context_length} tokens")
    samples, report = render_all(_tokenizer(target), _conversations(args, args.split), args.max_length)
    print(
        f"{report.conversations:,} conversations, {report.tokens:,} tokens, {report.loss_tokens:,} to learn; "
        f"{report.cut:,} cut at {args.max_length} tokens, {report.dropped:,} dropped since no answer was left"
    )
    if not samples:
        raise DataError(f"nothing to capture from {', '.join(args.data)}; try --split all or a larger --max-length")
    plan = ShardCapture(target, aux_layers, samples, args.bits, args.batch_tokens)
    with plan.open(args.output, args.overwrite, args.resume, args.given) as shards:
        missing = plan.missing(shards)
        for fault in shards.aside if isinstance(shards, ShardRepair) else ():
            print(f"{fault}; it is captured again")
        if shards.files:
            print(f"{len(shards.files):,} of {len(plan):,} shards are whole and stay as they are")
        need = plan.tokens(missing) * bytes_per_token(plan.meta)
        _check_space(args.output, need)
        print(
            f"layers {aux_layers} and the last one of {target.num_layers} in {args.bits} bits; "
            f"{plan.tokens(missing):,} tokens, {need / 1e6:,.1f} MB to {args.output}"
        )
        try:
            plan.run(shards, progress=True)
        except KeyboardInterrupt:
            if not shards.files:
                raise
            kept = f"{len(shards.files):,} of {len(plan):,} shards are kept, and the same command goes on with them"
            raise KeyboardInterrupt(kept) from None


def regenerate_file(args: argparse.Namespace) -> None:
    check_new(args.output, args.overwrite)
    params = SamplingParams(
        temperature=args.temperature, top_k=args.top_k, top_p=args.top_p, seed=args.seed, max_tokens=args.max_tokens
    )
    conversations = list(_conversations(args, args.split))
    if not conversations:
        raise DataError(f"nothing to answer in {', '.join(args.data)}; try --split all")
    engine = Engine(load_target(args.target), max_batch=args.batch)
    report = RegenerateReport()
    answered = regenerate(engine, conversations, params, True, report, args.least_distinct)
    count = write_jsonl(args.output, answered, args.overwrite)
    print(
        f"{count:,} conversations with {report.answers:,} answers of {report.tokens:,} tokens to {args.output}; "
        f"{report.cut:,} answers cut at {args.max_tokens} tokens, {report.looping:,} left out as loops, "
        f"{report.too_long:,} prompts too long for the context, {report.dropped:,} conversations dropped"
    )


def inspect(args: argparse.Namespace) -> None:
    if (Path(args.source) / MANIFEST).is_file():
        _inspect_shards(Path(args.source))
        return
    tokenizer = _tokenizer(load_target(args.target)) if args.target else None
    for conversation in load_conversations(args.source, args.split, args.limit, args.seed):
        print(f"--- {conversation.origin}")
        if tokenizer is None:
            print(conversation.text or "\n".join(f"[{m.role}] {m.content}" for m in conversation.messages))
            continue
        rendered = render(tokenizer, conversation)
        print(_marked(rendered, tokenizer.decode))
        print(f"--- {len(rendered.tokens)} tokens, {sum(rendered.loss_mask)} to learn, which stand between ⟦ and ⟧")


def _inspect_shards(folder: Path) -> None:
    reader = ShardReader(folder)
    reader.verify()
    for field in fields(reader.meta):
        print(f"{field.name:12} {getattr(reader.meta, field.name)}")
    size = sum(f.size for f in reader.files)
    print(f"{len(reader):,} conversations, {reader.tokens:,} tokens, {reader.loss_tokens:,} to learn")
    print(f"{len(reader.files):,} shards, {size / 1e6:,.1f} MB; every SHA-256 is right")


def _marked(rendered: Rendered, decode: Callable[[list[int]], str]) -> str:
    """The text with the parts to learn between ⟦ and ⟧."""
    parts, start = [], 0
    for i in range(1, len(rendered.tokens) + 1):
        if i == len(rendered.tokens) or rendered.loss_mask[i] != rendered.loss_mask[start]:
            text = decode(rendered.tokens[start:i])
            parts.append(f"⟦{text}⟧" if rendered.loss_mask[start] else text)
            start = i
    return "".join(parts)


def _conversations(args: argparse.Namespace, split: Side | None) -> Iterator[Conversation]:
    def load(spec: str) -> Iterator[Conversation]:
        return load_conversations(spec, split or ("train" if spec.startswith("builtin:") else "all"), None, args.seed)

    return islice(chain.from_iterable(map(load, args.data)), args.limit)


def _aux_layers(wish: str | None, target: Target) -> tuple[int, ...]:
    if wish is None:
        return default_aux_layers(target.num_layers)
    try:
        layers = tuple(int(part) for part in wish.split(","))
    except ValueError as e:
        raise ConfigError(f"--aux-layers {wish}: it must be layer numbers with commas, such as 1,6,10") from e
    if not all(0 <= layer < target.num_layers for layer in layers):
        raise ConfigError(f"--aux-layers {wish}: the target has layers 0 to {target.num_layers - 1}")
    return layers


def _with_recorded(argv: list[str]) -> list[str]:
    """`collect --repair DIR` as the command that made the folder, with `--resume`; anything else as it is.

    What else was given comes last, and so prevails. Raises ShardError for a folder that names no command.
    """
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    parser.add_argument("--repair", type=Path)
    found, rest = parser.parse_known_args(argv)
    if found.repair is None or rest[:1] != ["collect"]:
        return argv
    recorded = ShardReader(found.repair).manifest.command
    if not recorded:
        raise ShardError(f"{found.repair} does not say which command made it; give that command again with --resume")
    return [*recorded, "--output", str(found.repair), "--resume", *rest[1:]]


def _check_space(folder: Path, need: int) -> None:
    place = next(p for p in folder.absolute().parents if p.exists())
    free = shutil.disk_usage(place).free
    if need > free:
        raise OutputError(
            f"{folder} needs {need / 1e6:,.1f} MB and {place} has {free / 1e6:,.1f} MB free; give a smaller --limit, "
            "or train online, which keeps no hidden states on disk"
        )


def _tokenizer(target: Target) -> TokenizerWrapper:
    if target.tokenizer is None:
        raise TargetError(f"{target.name} has no tokenizer")
    return target.tokenizer


def _parser() -> argparse.ArgumentParser:
    raw = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser("eagle-data", description=_HELP, formatter_class=raw, usage="%(prog)s COMMAND …")
    commands = parser.add_subparsers(required=True, metavar="COMMAND", help=argparse.SUPPRESS)

    part = commands.add_parser("collect", description="Run the target over conversations; keep its hidden states.")
    part.set_defaults(command=collect)
    _add_data(part, "train")
    part.add_argument("--output", type=Path, required=True, metavar="DIR", help="folder of shards to make")
    part.add_argument("--max-length", type=_positive, default=2048, metavar="N", help="tokens kept (%(default)s)")
    part.add_argument("--aux-layers", metavar="A,B,C", help="layers whose output the head reads (1, N/2-1, N-4 of N)")
    part.add_argument("--batch-tokens", type=_positive, default=2048, metavar="N", help="per forward (%(default)s)")
    part.add_argument("--bits", type=int, choices=BITS, default=16, help="of a value on the disk (%(default)s)")
    part.add_argument("--resume", action="store_true", help="repair a DIR that exists: capture anew what is damaged")
    part.add_argument("--repair", metavar="DIR", help="the command that made DIR once more, with --resume")

    part = commands.add_parser("regenerate", description="Replace every assistant answer by the target's own.")
    part.set_defaults(command=regenerate_file)
    _add_data(part, None)
    part.add_argument("--output", type=Path, required=True, metavar="FILE.jsonl", help="file to make")
    defaults = SamplingParams()
    part.add_argument("--temperature", type=float, default=defaults.temperature, help="%(default)s; 0 is greedy")
    part.add_argument("--top-k", type=int, default=defaults.top_k, help="%(default)s; 0 keeps all")
    part.add_argument("--top-p", type=float, default=defaults.top_p, help="%(default)s; 1 keeps all")
    part.add_argument("--max-tokens", type=int, default=512, metavar="N", help="of one answer (%(default)s)")
    part.add_argument("--batch", type=_positive, default=8, metavar="N", help="answers made at once (%(default)s)")
    part.add_argument(
        "--least-distinct",
        type=float,
        default=0.0,
        metavar="R",
        help=f"leave out answers with a smaller share of distinct 4-grams; {LEAST_DISTINCT} drops loops (%(default)s)",
    )

    part = commands.add_parser("inspect", description="Look at conversations, or check a folder of shards.")
    part.set_defaults(command=inspect)
    part.add_argument("source", help="a folder of shards, or what --data takes")
    part.add_argument("--target", help="show what is rendered for this model, and what of it is learnt")
    part.add_argument("--limit", type=_positive, default=3, metavar="N", help="conversations to show (%(default)s)")
    _add_choice(part, "all")
    return parser


def _add_data(parser: argparse.ArgumentParser, split: str | None) -> None:
    parser.add_argument("--target", required=True, help="the model: a folder or a hub id")
    parser.add_argument("--data", required=True, action="append", metavar="SPEC", help="what to read; repeatable")
    parser.add_argument("--limit", type=_positive, metavar="N", help="conversations at most, all sources together")
    parser.add_argument("--overwrite", action="store_true", help="replace an output that exists")
    _add_choice(parser, split)


def _add_choice(parser: argparse.ArgumentParser, split: str | None) -> None:
    default = split or "train of builtin:, all of anything else"
    parser.add_argument("--split", choices=SPLITS, default=split, help=f"{_SPLIT_HELP} ({default})")
    parser.add_argument("--seed", type=int, default=0, help="of the order, and of sampling (%(default)s)")


def _positive(text: str) -> int:
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"{text} must be at least 1")
    return value


if __name__ == "__main__":
    sys.exit(main())
