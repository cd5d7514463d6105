"""The command `eagle-convert`: heads into other layouts, and MTP heads out of published models."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from typing import get_args

from eagle_mlx.cpu import blas
from eagle_mlx.errors import ConfigError

from ..command import exit_code
from .extract import DTYPES, Extraction, Hidden, extract
from .layouts import Conversion, Layout, convert

_HELP = """\
Write a head in another layout, number for number the same; or take the MTP head out of a published model
(`eagle-convert mtp --help`).

layouts:
  eagle3       EAGLE-3 as SGLang, vLLM and SpecForge load it, layer ids in both conventions
  speculators  EAGLE-3 and Qwen's MTP as speculators and vLLM load them
  eagle        EAGLE-1 and 2, for SafeAILab and SGLang: PyTorch's .bin becomes safetensors, names become plain
  mtp          MTP as EAGLE-MLX keeps it
"""
_EXAMPLES = """\
examples:
  eagle-convert out/head/best --to speculators --target Qwen3-4B-4bit --output out/speculators
  eagle-convert out/head/best --to speculators --target models/mine-4bit --base-model you/mine --output out/speculators
  eagle-convert someone/llama-3.1-8b-speculator.eagle3 --to eagle3 --output out/portable
  eagle-convert yuhuili/EAGLE-Vicuna-7B-v1.3 --to eagle --target lmsys/vicuna-7b-v1.3 --output out/eagle
  eagle-convert mtp --source Qwen/Qwen3-Next-80B-A3B-Instruct --bits 4 --output out/mtp

Which kind of head SOURCE is, its files say. A layout that holds an embedding needs the --target of a head that has
none of its own. A folder that is called mtp is written ./mtp.
"""
_MTP_HELP = """\
Take the MTP layer out of a model as it was published (DeepSeek-V3, GLM-4.5, MiMo, Qwen3-Next, Qwen3.5 and models
with their config) and write a head that drafts for it. Conversions made with mlx-lm have lost this layer: name the
original repository. Of a hub id only the files that hold the layer are fetched; of a folder only they need be there.
What is decided about its norms is printed.
"""
_MTP_EXAMPLES = """\
examples:
  eagle-convert mtp --source Qwen/Qwen3-Next-80B-A3B-Instruct --bits 4 --output out/mtp
  eagle-convert mtp --source models/MiMo-7B-RL --hidden before
  eagle-serve --target Qwen3-Next-80B-A3B-Instruct-4bit --head out/mtp

People disagree whether the target's hidden state goes in after its final norm or before it: convert both ways and let
eagle-bench decide.
"""


def main(argv: Sequence[str] | None = None) -> int:
    """Convert and return the exit code: 0, 2 after an error that the user can fix, 130 when interrupted."""
    given = list(sys.argv[1:] if argv is None else argv)
    return exit_code(lambda: run(given))


def run(given: Sequence[str]) -> None:
    """From the arguments to the line that says what there is now."""
    if given[:1] == ["mtp"]:
        print(extract(_extraction(given[1:]), _say))
    else:
        print(convert(_conversion(given), _say))


def _say(text: str) -> None:
    print(text, file=sys.stderr)


def _extraction(given: Sequence[str]) -> Extraction:
    parser = _parser("eagle-convert mtp", _MTP_HELP, _MTP_EXAMPLES)
    default = Extraction("-")
    parser.add_argument("--source", required=True, metavar="MODEL", help="folder or hub id of the published model")
    parser.add_argument("--output", metavar="DIR", help="where the head goes (default: the model's name and -mtp)")
    parser.add_argument("--index", type=int, default=default.index, metavar="N", help="which MTP layer (default 0)")
    parser.add_argument("--bits", type=int, choices=(4, 8), help="quantise the large matrices")
    parser.add_argument("--group-size", type=int, choices=(32, 64, 128), default=default.group_size, help="default 64")
    parser.add_argument(
        "--hidden", choices=get_args(Hidden), default=default.hidden, help="the target's final norm (default after)"
    )
    parser.add_argument("--dtype", choices=DTYPES, help="type of what is not quantised (default: the model's)")
    _add_overwrite(parser)
    args = vars(parser.parse_args(given))
    print(f"blas: {blas.activate()}", file=sys.stderr)
    return Extraction(**args)


def _conversion(given: Sequence[str]) -> Conversion:
    parser = _parser("eagle-convert", _HELP, _EXAMPLES)
    parser.add_argument("source", nargs="?", metavar="SOURCE", help="folder or hub id of the head")
    parser.add_argument("--source", dest="named", metavar="SOURCE", help="the same")
    parser.add_argument("--to", required=True, choices=get_args(Layout), help="layout to write")
    parser.add_argument("--output", required=True, metavar="DIR", help="where it goes")
    parser.add_argument("--target", metavar="MODEL", help="folder or hub id of the model that the head is for")
    parser.add_argument(
        "--base-model",
        metavar="MODEL",
        help="folder or hub id of the model that speculators and vLLM load in the target's place (default: what the "
        "card of a quantized target names, else the target itself if MLX has not quantized it)",
    )
    parser.add_argument("--dtype", choices=DTYPES, help="type of the numbers (default: the source's, nothing is lost)")
    parser.add_argument("--depth", type=int, metavar="N", help="speculators: how many tokens to draft (default 3)")
    parser.add_argument(
        "--no-check", dest="check", action="store_false", help="do not try the head on the target, which takes a while"
    )
    _add_overwrite(parser)
    args = vars(parser.parse_args(given))
    print(f"blas: {blas.activate()}", file=sys.stderr)
    sources = [source for source in (args.pop("source"), args.pop("named")) if source]
    if len(sources) != 1:
        raise ConfigError("name one head, its folder or hub id, as SOURCE or with --source")
    return Conversion(source=sources[0], **args)


def _parser(prog: str, about: str, examples: str) -> argparse.ArgumentParser:
    return argparse.ArgumentParser(
        prog=prog, description=about, epilog=examples, formatter_class=argparse.RawDescriptionHelpFormatter
    )


def _add_overwrite(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--overwrite", action="store_true", help="write in place of a folder that exists")


if __name__ == "__main__":
    sys.exit(main())
