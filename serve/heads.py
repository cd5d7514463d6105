"""The command `eagle-heads`: lists known heads, finds heads for a target, and downloads heads."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass

from eagle_mlx.command import Parser, Subcommands, arguments, exit_code
from eagle_mlx.late import late
from eagle_mlx.setting import REQUIRED, Group, setting

EPILOG = """\
examples:
  eagle-heads list                       heads that were trained or downloaded here, and published heads
  eagle-heads find Qwen3-8B-4bit         heads for a target, in the order in which --head auto tries them
  eagle-heads pull Qwen3-8B-4bit         download the published head for a target
  eagle-heads pull you/qwen3-8b-eagle3 --target Qwen3-8B-4bit

Without --head, eagle-serve and eagle-generate choose from these heads."""


@dataclass(frozen=True)
class List(Group):
    """No settings."""


@dataclass(frozen=True)
class Find(Group):
    """The target to find heads for."""

    target: str = setting(REQUIRED, "folder or hub id of the model", name="TARGET", positional=True)


@dataclass(frozen=True)
class Pull(Group):
    """The head to download."""

    name: str = setting(REQUIRED, "hub id of the head or of its target", name="NAME", positional=True)
    target: str | None = setting(None, "target of the head, if it is not known", metavar="MODEL")


def main(argv: Sequence[str] | None = None) -> int:
    """Run eagle-heads. Returns the exit status: 0, 1 if no head is found, or 2 for an error."""
    about = "List heads on this machine and published heads, find heads for a target, and download heads."
    usage = "%(prog)s list | find TARGET | pull NAME"
    commands = Subcommands(Parser(prog="eagle-heads", usage=usage, description=about, epilog=EPILOG))
    commands.add("list", List, lambda _: late(f"{__package__}.head_choice:list_all")(), "List all known heads.")
    about = "List heads for a target, the best first; exit status 1 if there is none."
    commands.add("find", Find, lambda options: late(f"{__package__}.head_choice:list_for")(options.target), about)
    commands.add(
        "pull",
        Pull,
        lambda options: late(f"{__package__}.head_choice:pull")(options.name, options.target),
        "Download a head from the hub.",
    )
    return exit_code(lambda: commands.parse(arguments(argv))())


if __name__ == "__main__":
    sys.exit(main())
