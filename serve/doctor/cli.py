"""eagle-doctor: measure this machine without a download, and say what that means for speculative decoding."""

from __future__ import annotations

import shlex
from collections.abc import Sequence

from eagle_mlx.command import arguments, exit_code, read
from eagle_mlx.late import late

from .options import DoctorOptions

EPILOG = """\
examples:
  eagle-doctor                              the sizes of a model that fits, with random weights; some two minutes
  eagle-doctor --shape qwen3-30b-a3b        other sizes
  eagle-doctor --target Qwen3-4B-4bit       a real model
  eagle-doctor --json                       print JSON to paste into an issue

Random weights cost as much time and memory as trained ones. Near-ties of two tokens are more frequent with them."""


def main(argv: Sequence[str] | None = None) -> int:
    """Run eagle-doctor. Return the exit status: 0, 2 for an error, 130 if interrupted."""
    about = "Measure what a model of common sizes costs on this machine, without a download, and give advice."
    given = arguments(argv)
    command = shlex.join(["eagle-doctor", *given])
    return exit_code(
        lambda: late(f"{__package__}.report:doctor")(read(DoctorOptions, given, "eagle-doctor", about, EPILOG), command)
    )
