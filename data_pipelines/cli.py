"""The command `eagle-data`: make conversations, regenerate answers, collect hidden states, inspect data."""

from __future__ import annotations

import sys
import textwrap
from collections.abc import Sequence

from eagle_mlx import blas
from eagle_mlx.command import Parser, Stop, Subcommands, arguments, exit_code
from eagle_mlx.late import late

from .options import CollectOptions, InspectOptions, MakeOptions, PresetsOptions, RegenerateOptions
from .sources import PRESETS_FILE, SPECS
from .sources.rows import SHAPES
from .synthesis import DOMAINS, FILE

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
  eagle-data inspect preset:gsm8k --target checkpoints/target --keep-tokens :512 --dedupe prompt
  eagle-data regenerate --target Qwen3-4B --data a.jsonl=0.7 b.parquet=0.3 --limit 9000 --output answers.jsonl
  eagle-data collect --target checkpoints/target --data answers.jsonl --limit 1000 --output out/shards

A capture or a regeneration that was interrupted continues when the same command is given again.
"""
_SHARES = textwrap.indent(textwrap.fill(", ".join(f"{domain.name}={domain.weight:g}" for domain in DOMAINS), 110), "  ")
_CONTINUES = """Finished rows are in
FILE.jsonl.partial, with which the same command continues after an interruption. To start over, delete it."""
_MAKE = f"""\
Have the target make up conversations. You need no data set, no license and no network.

The target continues its own chat template at the place of a user turn: it writes the user's turn (Magpie, Xu et al.
2024, arXiv 2406.08464), answers it, and may ask again. For most user turns, a system prompt, which the answers do not
see, sets the topic. --domains FILE.yaml defines your own ({FILE.name} is an example). The default domains are:
{_SHARES}

Unusable tries are dropped and counted. The same seed gives the same file. {_CONTINUES}
--rows, --tokens, --batch and --head may change. To stop early, add --finish.

examples:
  eagle-data make --target Qwen3-4B --tokens 3000000 --output own.jsonl --domain any=2 --domain code --seed 1
  eagle-train --target Qwen3-4B --data own.jsonl --output out/head
"""
_REGENERATE = f"""\
Replace every assistant answer by the target's own, which a draft head must predict. {_CONTINUES}
--batch, --head and --num-speculative-tokens may change.

example:
  eagle-data regenerate --target Qwen3-4B --head out/head --data preset:ultrachat --limit 20000 --dedupe prompt \\
      --system 'You are a helpful assistant.' --system '' --output answers.jsonl
"""
_INSPECT = "Look at conversations and lengths, with the learned parts between ⟦ and ⟧, or check a folder of shards."
_COLLECT = "Run the target over conversations; keep its hidden states."
_PRESETS = "List the sets that --data preset:NAME reads."


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command; return 0, 2 for an error that the user can fix, 130 after Ctrl-C or 143 after SIGTERM."""
    return exit_code(lambda: _main(arguments(argv)), "nothing was written")


def _main(given: list[str]) -> int | None:
    commands = Subcommands(Parser(prog="eagle-data", usage="%(prog)s COMMAND …", description=_HELP))
    commands.add("collect", CollectOptions, late(f"{__package__}.commands:collect"), _COLLECT)
    commands.add("make", MakeOptions, late(f"{__package__}.commands:make"), _MAKE)
    commands.add("regenerate", RegenerateOptions, late(f"{__package__}.commands:regenerate"), _REGENERATE)
    commands.add("inspect", InspectOptions, late(f"{__package__}.commands:inspect"), _INSPECT)
    commands.add("presets", PresetsOptions, lambda _: print(PRESETS_FILE.read_text(encoding="utf-8"), end=""), _PRESETS)
    work = commands.parse(given)
    print(f"blas: {blas.activate()}", file=sys.stderr)
    with Stop().listening():
        return work()


if __name__ == "__main__":
    sys.exit(main())
