"""The command `eagle-convert`: convert heads to other layouts, and extract MTP heads from published models."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from functools import partial

from eagle_mlx import blas
from eagle_mlx.command import arguments, exit_code, read
from eagle_mlx.late import late

from ..kind_settings import LAYOUTS
from . import Conversion, Extraction

_HELP = """\
Write a head in another layout with the same weights, or extract the MTP head of a published model
(`eagle-convert mtp --help`).

layouts, with the kinds of heads and the projects that load them:
"""
_EXAMPLES = """\
examples:
  eagle-convert out/head/best --to speculators --target Qwen3-4B-4bit --output out/speculators
  eagle-convert out/head/best --to speculators --target models/mine-4bit --base-model you/mine --output out/speculators
  eagle-convert someone/llama-3.1-8b-speculator.eagle3 --to eagle3 --output out/portable

The kind of head is read from its files. If a layout includes an embedding and the head has none, give --target.
Write a folder named mtp as ./mtp.
"""
_MTP_HELP = """\
Extract the MTP layer of a published model (DeepSeek-V3, GLM-4.5, MiMo, Qwen3-Next, Qwen3.5 and models with their
config) and write it as a draft head. mlx-lm drops this layer when it converts a model, so give the original
repository. From the hub, only the files with the layer are downloaded; a folder needs only those files.
"""
_MTP_EXAMPLES = """\
examples:
  eagle-convert mtp --source Qwen/Qwen3-Next-80B-A3B-Instruct --bits 4 --output out/mtp
  eagle-convert mtp --source models/MiMo-7B-RL --hidden before
  eagle-serve --target Qwen3-Next-80B-A3B-Instruct-4bit --head out/mtp

Models differ in whether the head needs the target's hidden state before or after its final norm. If in doubt, convert
both ways and compare with eagle-bench.
"""


def main(argv: Sequence[str] | None = None) -> int:
    """Convert a head; return 0, 2 for an error that the user can fix, or 130 if interrupted."""
    return exit_code(lambda: _main(arguments(argv)))


def _main(given: Sequence[str]) -> None:
    say = partial(print, file=sys.stderr)
    options: Extraction | Conversion
    if given[:1] == ["mtp"]:
        options = read(Extraction, given[1:], "eagle-convert mtp", _MTP_HELP, _MTP_EXAMPLES)
        work = late(f"{__package__}.conversion:extract")
    else:
        options = read(Conversion, given, "eagle-convert", _HELP + LAYOUTS, _EXAMPLES)
        work = late(f"{__package__}.conversion:convert")
    say(f"blas: {blas.activate()}")
    print(work(options, say))
