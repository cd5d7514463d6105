"""The command `eagle-data`: make conversations, regenerate answers, collect hidden states, inspect data."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from eagle_mlx.command import Parser, Stop, Subcommands, arguments, exit_code
from eagle_mlx.cpu import blas, tune_process
from eagle_mlx.errors import ConfigError, DataError, OutputError
from eagle_mlx.files import check_free, check_idle, free_disk
from eagle_mlx.progress import counted
from eagle_mlx.setting import AT_LEAST_1, REQUIRED, setting
from eagle_mlx.shards import bytes_per_token, unfinished_folder

from . import inspect_command, make_command
from .capturing import ShardCapture
from .options import AUX_LAYERS, LAYER_NUMBERS, SPLIT_HELP, ReadOptions, aux_layers_of, tokenizer_of
from .rendering import render_all
from .sources.reading import ReadReport, Split, check_conversations, read_conversations
from .sources.rows import SHAPES
from .sources.spec import SPECS
from .synthesis import regeneration

_HELP = f"""\
Prepare data for training a draft head.

  eagle-data inspect     look at conversations as the target sees them and at their lengths, or check shards
  eagle-data presets     list well-known data sets for --data preset:NAME
  eagle-data make        have the target make up conversations; no data is needed
  eagle-data regenerate  have the target answer prompts; a head must predict the target's own answers
  eagle-data collect     run the target over conversations and keep its hidden states in shards

Sources of data (--data):
{SPECS}

Rows of files and of data sets on the hub:
{SHAPES}

examples:
  eagle-data make --target Qwen3-4B --rows 2000 --output own.jsonl
  eagle-data inspect builtin:python --target checkpoints/target
  eagle-data inspect preset:gsm8k --target checkpoints/target --keep-tokens :512 --dedupe prompt
  eagle-data regenerate --target Qwen3-4B --data a.jsonl=0.7 b.parquet=0.3 --limit 9000 --output answers.jsonl
  eagle-data collect --target checkpoints/target --data answers.jsonl --limit 1000 --output out/shards

A capture or a regeneration that was interrupted continues when the same command is given again.
"""


@dataclass(frozen=True, kw_only=True)
class CollectOptions(ReadOptions):
    """What to capture, and where to write it."""

    split: Split | None = setting("train", SPLIT_HELP)
    output: Path = setting(REQUIRED, "folder for the shards", metavar="DIR")
    max_length: int = setting(2048, "maximum tokens of a conversation; the rest is cut off", AT_LEAST_1)
    aux_layers: str | None = setting(None, AUX_LAYERS, LAYER_NUMBERS, metavar="A,B,C")
    batch_tokens: int = setting(2048, "tokens per forward", AT_LEAST_1)
    bits: Literal[16, 8] = setting(16, "bits per value in the shards")
    resume: bool = setting(False, "capture the damaged shards of a complete DIR again")


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command; return 0, 2 for an error that the user can fix, 130 after Ctrl-C or 143 after SIGTERM."""
    return exit_code(lambda: _main(arguments(argv)), "nothing was written")


def _main(given: list[str]) -> int | None:
    commands = Subcommands(Parser(prog="eagle-data", usage="%(prog)s COMMAND …", description=_HELP))
    about = "Run the target over conversations; keep its hidden states."
    commands.add("collect", CollectOptions, collect, about)
    commands.add("make", make_command.MakeOptions, make_command.run, make_command.HELP)
    commands.add("regenerate", regeneration.RegenerateOptions, regeneration.run, regeneration.HELP)
    commands.add("inspect", inspect_command.InspectOptions, inspect_command.inspect, inspect_command.HELP)
    presets = "List the sets that --data preset:NAME reads."
    commands.add("presets", inspect_command.PresetsOptions, inspect_command.list_presets, presets)
    work = commands.parse(given)
    print(f"blas: {blas.activate()}", file=sys.stderr)
    with Stop().listening():
        return work()


def collect(options: CollectOptions) -> None:
    """Check all data first, so that errors show at once, then capture the missing shards."""
    if not options.resume:
        check_free(options.output, options.overwrite)
    check_idle(options.output, unfinished_folder(options.output))  # before the target is loaded
    config = options.data_config()
    check_conversations(config, options.split, answers=True)
    tune_process()
    target = options.loading.load(options.target)
    options.loading.wire_active()
    aux_layers = aux_layers_of(options.aux_layers, target)
    if options.max_length > target.context_length:
        raise ConfigError(f"--max-length {options.max_length}: the target's context is {target.context_length} tokens")
    tokenizer, read = tokenizer_of(target), ReadReport()
    found = read_conversations(config, options.split, tokenizer, read)
    samples, report = render_all(tokenizer, found, options.max_length, options.choice.filters.skip_bad)
    if read.left_out or report.unusable:
        print(f"{read}; {report.unusable:,} more refused by the chat template" if report.unusable else read)
    print(
        f"{counted(report.conversations, 'conversation')}, {counted(report.tokens, 'token')}, "
        f"{report.loss_tokens:,} to learn; "
        f"{report.cut:,} cut at {options.max_length} tokens, {report.dropped:,} dropped because no answer was left"
    )
    for note in report.notes(target.name):
        print(note)
    if not samples:
        raise DataError(f"nothing to capture from {', '.join(options.data)}; try --split all or a larger --max-length")
    plan = ShardCapture(target, aux_layers, samples, options.bits, options.batch_tokens)
    with plan.open(options.output, options.overwrite, options.resume) as shards:
        missing = plan.missing(shards)
        if shards.files:
            print(f"{len(shards.files):,} of {len(plan):,} shards are complete and are kept")
        need = plan.tokens(missing) * bytes_per_token(plan.meta)
        if need > (free := free_disk(options.output)):
            raise OutputError(
                f"{options.output} needs {need / 1e6:,.1f} MB and its disk has {free / 1e6:,.1f} MB free; use --bits 8 "
                "or a smaller --limit, or train online, which stores no hidden states"
            )
        print(
            f"layers {aux_layers} and the last of {target.num_layers} in {options.bits} bits; "
            f"{plan.tokens(missing):,} tokens, {need / 1e6:,.1f} MB to {options.output}"
        )
        try:
            plan.run(shards, progress=True)
        except KeyboardInterrupt as e:
            if shards.files:
                kept = f"{len(shards.files):,} of {len(plan):,} shards are kept"
                e.args = (f"{kept}, and the same command continues from there",)
            raise


if __name__ == "__main__":
    sys.exit(main())
