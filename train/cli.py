"""The command `eagle-train`, which trains a head for a target on conversations."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from eagle_mlx.command import Parser, add_flags, arguments, default_text, exit_code, shown
from eagle_mlx.extras import require
from eagle_mlx.late import late
from eagle_mlx.setting import Group, Setting, find, setting, settings_of

from .config import TrainConfig
from .kind_settings import KIND_SETTINGS
from .recipes import OWN_RECIPE, recipe_names
from .report import main as report

_HELP = """\
Train a new head for a target, or continue training an existing one.

kinds of heads:
  eagle3  reads three of the target's layers; has its own output projection over the most frequent tokens
  eagle   EAGLE-1 and 2: reads the target's last hidden state and predicts the next one
  mtp     one layer of the target's architecture; reads the last hidden state, and is reused for every draft token
  dspark, dflash2, dflash, peagle   draft a whole block in one forward

examples:
  eagle-train --target checkpoints/target --minutes 6 --rows 4 --length 256 --unroll 3 --lr 2e-3 --output out/head
  eagle-train --target Qwen3-4B-4bit --output out/qwen3-4b-eagle3      (without --data, the target writes it)
  eagle-train --target Qwen3-4B-4bit --hours 8 --output out/night   (the same, portion by portion, in 8 hours)
  eagle-train --target Qwen3-4B-4bit --hours 8 --data mine.jsonl --output out/night   (half of it from your questions)
  eagle-train --target Qwen3-4B-4bit --data chats.jsonl --output out/qwen3-4b-eagle3 --dry-run
  eagle-train --target Qwen3-4B-4bit --head mtp --step-weights .51 .31 .18 --output out/qwen3-4b-mtp
  eagle-train --target Qwen3-4B-4bit --adapt user/qwen3-4b-eagle3 --prompts mine.jsonl --output out/mine
  eagle-train -c recipe.yaml --seed 1
  eagle-train --resume out/head

eagle-train report compares runs, finished or not: loss, τ, time, and the settings in which they differ.

Without --data or --shards, the target first writes --self-tokens tokens of conversations to OUTPUT.self.jsonl, like
eagle-data make; later runs reuse the file. With --hours, making data and training alternate, and the head drafts the
next data; with --data too, every second conversation begins with the next first user turn in the data.

With --adapt, the target answers --prompts (OUTPUT.self.jsonl) and makes up conversations on many subjects
(OUTPUT.replay.jsonl, unless --replay names older ones), and a copy of the head learns both. OUTPUT/best is that copy
only if the judge finds it better on held-out prompts; otherwise it is the head as it was.

Flags override the YAML file, which overrides the recipe, which overrides the defaults. A key in the file is the flag
without the leading dashes and with _ for - (draft_vocab: 32000). A bare model name such as Qwen3-4B-4bit means
mlx-community/Qwen3-4B-4bit.

Ctrl-C (or SIGTERM) saves the run's state and stops. --resume continues exactly from there, or after a crash from the
last saved state. A second Ctrl-C stops immediately.
"""
_RECIPE = (
    "settings for a known model, by recipe or model name; without NAME, the recipe for --target. Recipes: "
    f"{', '.join(recipe_names())}"
)


@dataclass(frozen=True)
class StartOptions(Group):
    """Options of a start, apart from the run's settings."""

    resume: Path | None = setting(None, "continue the run in this folder, with its settings", metavar="DIR")
    recipe: str | None = setting(None, _RECIPE, bare=OWN_RECIPE)
    dry_run: bool = setting(False, "print the plan, memory and time of the run, and stop")
    config_file: Path | None = setting(None, "YAML file with settings", name="config", also=("-c",))


def main(argv: Sequence[str] | None = None) -> int:
    """Train and return the exit code: 0, 2 for an error that the user can fix, 130 or 143 if interrupted."""
    given = arguments(argv)
    if given[:1] == ["report"]:
        return report(given[1:])
    return exit_code(lambda: _main(given))


def _main(given: Sequence[str]) -> None:
    flags = vars(flags_parser().parse_args(given))
    start = StartOptions.of(**{name: flags.pop(name) for name in settings_of(StartOptions) if name in flags})
    flags = {name: find(TrainConfig, name).convert(value) for name, value in flags.items()}
    require("eagle-train", "train")
    late(f"{__package__}.job:run_command")(start.resume, start.recipe, start.dry_run, start.config_file, flags)


def flags_parser() -> Parser:
    """Return a parser with a flag per setting. Flags that are not given are absent from its result."""
    parser = Parser(
        prog="eagle-train",
        description=_HELP,
        usage="%(prog)s --target MODEL [settings]\n       %(prog)s --resume DIR\n       %(prog)s report DIR [DIR ...]",
    )
    add_flags(parser, StartOptions)
    add_flags(parser, TrainConfig, _default)
    return parser


def _default(declared: Setting) -> str:
    """Return the default for a flag's help, for each kind of head if they differ."""
    if not any(declared.name in kind.defaults for kind in KIND_SETTINGS.values()):
        return default_text(declared)
    kinds: dict[Any, list[str]] = {}
    for title, kind in KIND_SETTINGS.items():
        if declared.name not in kind.foreign:
            value = kind.defaults.get(declared.name, declared.written(declared.default))
            kinds.setdefault(value, []).append(title)
    if len(kinds) == 1:
        return shown(next(iter(kinds)))
    return "; ".join(f"{shown(value) or 'none'} for {', '.join(names)}" for value, names in kinds.items())


if __name__ == "__main__":
    sys.exit(main())
