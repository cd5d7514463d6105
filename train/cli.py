"""The command `eagle-train`: a target and conversations in, a trained EAGLE-3 head out."""

from __future__ import annotations

import argparse
import dataclasses
import sys
import typing
from collections.abc import Sequence
from typing import Any

from eagle_mlx import blas
from eagle_mlx.errors import ConfigError, EagleError
from eagle_mlx.folders import check_free
from eagle_mlx.lanes import tune_process
from eagle_mlx.target import load_target

from .config import TrainConfig, field_help, load_config
from .data import heldout_prompts, training_data
from .initial import check_shape
from .loop import BEST, train

_HELP = """\
Train an EAGLE-3 head for a target.

examples:
  eagle-train --target checkpoints/target --minutes 6 --rows 4 --length 256 --unroll 3 --lr 2e-3 --output out/head
  eagle-train --target Qwen3-4B-4bit --data chats.jsonl --output out/qwen3-4b-eagle3
  eagle-train -c recipe.yaml --seed 1

Settings come from their defaults, then the YAML file, then the flags. A bare model name such as Qwen3-4B-4bit means
mlx-community/Qwen3-4B-4bit.
"""


def main(argv: Sequence[str] | None = None) -> int:
    """Train and return the exit code: 0, 2 after an error that the user can mend, 130 when interrupted."""
    args = vars(_parser().parse_args(argv))
    print(f"blas: {blas.activate()}", file=sys.stderr)
    try:
        run(load_config(args.pop("config_file", None), args))
    except EagleError as e:
        print(f"error: {e}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        return 130
    return 0


def run(config: TrainConfig) -> None:
    """One run, from the target's name to the line that says where the head is."""
    if not config.target:
        raise ConfigError("no target: name the model that the head is for with --target")
    check_free(config.output, config.overwrite)
    tune_process()
    target = load_target(config.target)
    check_shape(target, config)
    prompts = heldout_prompts(target, config)
    data = training_data(target, config, progress=True)
    print("data: " + ", ".join(f"{key} {_show(value)}" for key, value in data.report.items()), file=sys.stderr)
    report = train(target, data, prompts, config)
    print(
        f"τ {report['acceptance_length']:.2f} at depth {config.eval_depth}, untrained "
        f"{report['untrained_acceptance_length']:.2f}, after {report['tokens']:,} tokens in "
        f"{report['train_seconds']:.0f} s; the head is in {config.output}/{BEST}"
    )


def _parser() -> argparse.ArgumentParser:
    """Every field of TrainConfig as a flag; only flags that are given are passed on."""
    parser = argparse.ArgumentParser(
        prog="eagle-train",
        description=_HELP,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        argument_default=argparse.SUPPRESS,
    )
    parser.add_argument("-c", "--config", dest="config_file", metavar="FILE", help="YAML file with settings")
    helps, hints = field_help(), typing.get_type_hints(TrainConfig)
    for field in dataclasses.fields(TrainConfig):
        text = helps[field.name].replace("%", "%%")
        shown = _show(field.default)
        parser.add_argument(
            f"--{field.name.replace('_', '-')}",
            dest=field.name,
            help=f"{text} (default: {shown})" if shown else text,
            **_argument(hints[field.name]),
        )
    return parser


def _argument(type_: Any) -> dict[str, Any]:
    """What argparse needs to read a field of this type."""
    if type_ is bool:
        return {"action": argparse.BooleanOptionalAction}
    if typing.get_origin(type_) is typing.Literal:
        return {"choices": typing.get_args(type_)}
    if type_ == tuple[str, ...]:
        return {"action": "append", "metavar": "SOURCE"}
    if type_ == tuple[int, ...]:
        return {"nargs": "+", "type": int, "metavar": "N"}
    return {"type": type_, "metavar": {int: "N", float: "X"}.get(type_, "NAME")}


def _show(value: Any) -> str:
    if isinstance(value, tuple):
        return " ".join(map(str, value))
    if isinstance(value, float):
        return f"{value:g}"
    return f"{value:,}" if type(value) is int and value > 9999 else str(value)


if __name__ == "__main__":
    sys.exit(main())
