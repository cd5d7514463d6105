"""The command `eagle-heads`: lists known heads, and finds, downloads, compares and certifies heads."""

from __future__ import annotations

from collections.abc import Sequence

from eagle_mlx.command import Parser, Subcommands, arguments, exit_code
from eagle_mlx.late import late

from .head_options import Certify, Compare, Find, Learned, List, Pull, Show

EPILOG = """\
examples:
  eagle-heads list                       heads that were trained or downloaded here, and published heads
  eagle-heads find Qwen3-8B-4bit         heads for a target, in the order in which --head auto tries them
  eagle-heads pull Qwen3-8B-4bit         download the published head for a target
  eagle-heads pull you/qwen3-8b-eagle3 --target Qwen3-8B-4bit
  eagle-heads compare out/old/best out/new/best --target Qwen3-8B-4bit --prompts mine.jsonl
  eagle-heads certify out/new/best --target Qwen3-8B-4bit --prompts mine.jsonl    a certificate in the head's folder
  eagle-heads show out/new/best          the certificate of a head
  eagle-heads log FOLDER                 what a head has learned with eagle-serve --learn FOLDER
  eagle-heads forget FOLDER              delete the texts that it learned from

Without --head, eagle-serve and eagle-generate choose from these heads."""

COMPARE = """\
Tell whether head B drafts better than head A.

The target answers each prompt once. Then both heads draft along the same answers, as in decoding, so the difference is
measured prompt by prompt, which needs far fewer prompts than two runs of eagle-bench. Tokens per forward (tau) come
from the drafts, and expected tokens/s from tau, the time of a draft, and the target's cost curve on this machine. The
verdict is about tokens/s (tau, if no cost curve could be measured): better or worse if the 95 % interval excludes 0,
otherwise not told apart."""

CERTIFY = """\
Measure a head for its target, and write what was measured on what: certificate.json in the head's folder.

Text: some prompts are decoded greedily with the head, and compared with plain decoding. A first difference between
tokens whose logits are equal up to rounding is a tie. If a text differs otherwise, the exit status is 1.
Tau, tokens per forward: the head drafts along the target's answers at temperatures 0 and 1, in all and by category of
the prompts (`category`, in rows with `turns`), with 95 % intervals over prompts. Answers that loop are left out.
Also: the target's cost curve, machine, versions, and hashes of the head's weights, the target and the prompts.

If the file exists, the command prints what changed, and replaces it. eagle-publish publishes it with the head."""


def main(argv: Sequence[str] | None = None) -> int:
    """Run eagle-heads. Returns the exit status: 0, 1 if nothing is found or a text differs, or 2 for an error."""
    about = "List heads on this machine and published heads, and find, download, compare or certify heads."
    usage = "%(prog)s list | find | pull | show | compare | certify | log | forget"
    commands = Subcommands(Parser(prog="eagle-heads", usage=usage, description=about, epilog=EPILOG))
    commands.add("list", List, lambda _: late(f"{__package__}.head_choice:list_all")(), "List all known heads.")
    about = "List heads for a target, the best first; exit status 1 if there is none."
    commands.add("find", Find, lambda given: late(f"{__package__}.head_choice:list_for")(given.target), about)
    about = "Download a head from the hub."
    commands.add("pull", Pull, lambda given: late(f"{__package__}.head_choice:pull")(given.name, given.target), about)
    commands.add("compare", Compare, late(f"{__package__}.comparison:compare"), COMPARE)
    commands.add("certify", Certify, late(f"{__package__}.certificate:certify"), CERTIFY)
    about = "Print a head's certificate; exit status 1 if there is none, or if it is of other weights."
    commands.add("show", Show, late(f"{__package__}.certificate:show"), about)
    about = "Print what became of the versions of a head that learns; exit status 1 if there are none."
    commands.add("log", Learned, lambda given: late(f"{__package__}.learning.versions:show_log")(given.folder), about)
    about = "Delete the texts that a server has collected to learn from."
    commands.add("forget", Learned, lambda given: late(f"{__package__}.learning.versions:forget")(given.folder), about)
    return exit_code(lambda: commands.parse(arguments(argv))())
