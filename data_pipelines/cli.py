"""The command `eagle-data`: make up conversations, regenerate answers, collect hidden states, look at data."""

from __future__ import annotations

import argparse
import shutil
import signal
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import FrameType

from eagle_mlx.cpu import blas, tune_process
from eagle_mlx.errors import ConfigError, DataError, EagleError, OutputError, ShardError
from eagle_mlx.files import check_free, locked
from eagle_mlx.progress import counted
from eagle_mlx.shards import BITS, ShardReader, bytes_per_token, unfinished_folder
from eagle_mlx.target_options import options_of

from . import inspect_command, make_command, regenerate_command
from .capturing import ShardCapture
from .options import add_data, aux_layers_of, conversations, positive, tokenizer_of
from .rendering import render_all
from .sources.reading import ReadReport
from .sources.rows import SHAPES
from .sources.spec import SPECS

_HELP = f"""\
Prepare data for training a draft head.

  eagle-data inspect     look at conversations as the target sees them and at their lengths, or check shards
  eagle-data presets     list the field's usual sets, which --data preset:NAME reads
  eagle-data make        have the target make up conversations: from no data at all
  eagle-data regenerate  have the target answer the prompts itself: what it says is what a head has to predict
  eagle-data collect     run the target over conversations and keep its hidden states in shards

Where data comes from (--data):
{SPECS}

Rows of files and of the hub's data sets:
{SHAPES}

examples:
  eagle-data make --target Qwen3-4B --rows 2000 --output own.jsonl
  eagle-data inspect builtin:python --target checkpoints/target
  eagle-data inspect preset:gsm8k --target checkpoints/target --keep-tokens :512 --dedupe prompt
  eagle-data regenerate --target checkpoints/target --data chats.jsonl --output answers.jsonl --max-tokens 256
  eagle-data regenerate --target Qwen3-4B --data a.jsonl=0.7 b.parquet=0.3 --limit 9000 --output answers.jsonl
  eagle-data collect --target checkpoints/target --data answers.jsonl --limit 1000 --output out/shards
  eagle-data inspect out/shards
  eagle-data collect --repair out/shards

A capture or a regeneration that was interrupted continues when the same command is given again.
"""


class Terminated(KeyboardInterrupt):
    """The process was asked to end."""


@contextmanager
def terminated_by_sigterm() -> Iterator[None]:
    """While the block runs, a SIGTERM raises Terminated in it; only the main thread can have that."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def stop(number: int, frame: FrameType | None) -> None:
        raise Terminated

    before = signal.signal(signal.SIGTERM, stop)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command and return its exit code: 0, 2 after an error that the user can fix, 130 after Ctrl-C, 143
    after a SIGTERM.
    """
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
        with terminated_by_sigterm():
            command(args)
    except EagleError as e:
        print(f"error: {e}", file=sys.stderr)
        return 2
    except KeyboardInterrupt as e:
        print(f"interrupted; {e or 'nothing was written'}", file=sys.stderr)
        return 143 if isinstance(e, Terminated) else 130
    return 0


def collect(args: argparse.Namespace) -> None:
    """Render all conversations first, so that bad data shows at once, then capture what is not there yet."""
    if not args.resume:
        check_free(args.output, args.overwrite)
    for place in filter(Path.exists, (args.output, unfinished_folder(args.output))):
        with locked(place):  # before the target is loaded
            pass
    tune_process()
    options = options_of(args)
    target = options.load(args.target)
    options.wire_active()
    aux_layers = aux_layers_of(args.aux_layers, target)
    if args.max_length > target.context_length:
        raise ConfigError(f"--max-length {args.max_length}: the target's context is {target.context_length} tokens")
    tokenizer, read = tokenizer_of(target), ReadReport()
    samples, report = render_all(tokenizer, conversations(args, tokenizer, read), args.max_length, args.skip_bad)
    if read.left_out or report.unusable:
        print(f"{read}; {report.unusable:,} more refused by the chat template" if report.unusable else read)
    print(
        f"{counted(report.conversations, 'conversation')}, {counted(report.tokens, 'token')}, "
        f"{report.loss_tokens:,} to learn; "
        f"{report.cut:,} cut at {args.max_length} tokens, {report.dropped:,} dropped since no answer was left"
    )
    for note in report.template.notes(target.name):
        print(note)
    if not samples:
        raise DataError(f"nothing to capture from {', '.join(args.data)}; try --split all or a larger --max-length")
    plan = ShardCapture(target, aux_layers, samples, args.bits, args.batch_tokens)
    with plan.open(args.output, args.overwrite, args.resume, args.given) as shards:
        missing = plan.missing(shards)
        for fault in shards.faults:
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
        except KeyboardInterrupt as e:
            if not shards.files:
                raise
            kept = f"{len(shards.files):,} of {len(plan):,} shards are kept, and the same command continues with them"
            raise type(e)(kept) from None


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
        raise ShardError(
            f"{found.repair} names no `eagle-data collect` that made it: give that command again with --resume, or "
            "capture its conversations anew"
        )
    return [*recorded, "--output", str(found.repair), "--resume", *rest[1:]]


def _check_space(folder: Path, need: int) -> None:
    place = next(p for p in folder.absolute().parents if p.exists())
    free = shutil.disk_usage(place).free
    if need > free:
        raise OutputError(
            f"{folder} needs {need / 1e6:,.1f} MB and {place} has {free / 1e6:,.1f} MB free; give --bits 8 or a "
            "smaller --limit, or train online, which keeps no hidden states on disk"
        )


def _parser() -> argparse.ArgumentParser:
    raw = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser("eagle-data", description=_HELP, formatter_class=raw, usage="%(prog)s COMMAND …")
    commands = parser.add_subparsers(required=True, metavar="COMMAND", help=argparse.SUPPRESS)

    part = commands.add_parser("collect", description="Run the target over conversations; keep its hidden states.")
    part.set_defaults(command=collect)
    add_data(part, "train")
    part.add_argument("--output", type=Path, required=True, metavar="DIR", help="folder of shards to make")
    part.add_argument("--max-length", type=positive, default=2048, metavar="N", help="tokens kept (%(default)s)")
    part.add_argument("--aux-layers", metavar="A,B,C", help="layers whose output the head reads (1, N/2-1, N-4 of N)")
    part.add_argument("--batch-tokens", type=positive, default=2048, metavar="N", help="per forward (%(default)s)")
    part.add_argument("--bits", type=int, choices=BITS, default=16, help="of a value on the disk (%(default)s)")
    part.add_argument("--resume", action="store_true", help="where DIR exists, capture its damaged shards again")
    part.add_argument("--repair", metavar="DIR", help="--resume with the command that made DIR")

    make_command.add(commands)
    regenerate_command.add(commands)
    inspect_command.add(commands)
    return parser


if __name__ == "__main__":
    sys.exit(main())
