"""The command `eagle-heads`: lists known heads, finds heads for a target, downloads heads, and compares two."""

from __future__ import annotations

import sys
from collections.abc import Sequence

from eagle_mlx.command import Parser, Subcommands, arguments, exit_code
from eagle_mlx.late import late

from .head_options import Compare, Find, List, Pull

EPILOG = """\
examples:
  eagle-heads list                       heads that were trained or downloaded here, and published heads
  eagle-heads find Qwen3-8B-4bit         heads for a target, in the order in which --head auto tries them
  eagle-heads pull Qwen3-8B-4bit         download the published head for a target
  eagle-heads pull you/qwen3-8b-eagle3 --target Qwen3-8B-4bit
  eagle-heads compare out/old/best out/new/best --target Qwen3-8B-4bit --prompts mine.jsonl

Without --head, eagle-serve and eagle-generate choose from these heads."""

COMPARE = """\
Tell whether head B drafts better than head A.

The target answers each prompt once. Then both heads draft along the same answers, as in decoding, so the difference is
measured prompt by prompt, which needs far fewer prompts than two runs of eagle-bench. Tokens per forward (tau) come
from the drafts, and expected tokens/s from tau, the time of a draft, and the target's cost curve on this machine. The
verdict is about tokens/s (tau, if no cost curve could be measured): better or worse if the 95 % interval excludes 0,
otherwise not told apart."""


def main(argv: Sequence[str] | None = None) -> int:
    """Run eagle-heads. Returns the exit status: 0, 1 if no head is found, or 2 for an error."""
    about = "List heads on this machine and published heads, find heads for a target, download heads, and compare two."
    usage = "%(prog)s list | find TARGET | pull NAME | compare A B --target MODEL"
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
    commands.add("compare", Compare, lambda options: late(f"{__package__}.comparison:compare")(options), COMPARE)
    return exit_code(lambda: commands.parse(arguments(argv))())


if __name__ == "__main__":
    sys.exit(main())
