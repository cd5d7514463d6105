"""Train the included head: the target answers the training prompts, then eagle-train learns from the answers.

    python checkpoints/scripts/make_head.py --work out/make_head --minutes 60

A head must predict the target's text, so most of its data are the target's own answers, greedy and sampled, without
those that loop. The rest is the source itself. Published figures use the first 100 prompts of prompts.jsonl;
checkpoints are chosen on the others. Finished steps are kept in the work folder, so an interrupted run can continue.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

CHECKPOINTS = Path(__file__).resolve().parents[1]
MEASURED = 100
"""The first prompts of prompts.jsonl, which are reserved for published figures."""
SOURCE = 3000
"""Conversations and files from the source."""


@dataclass(frozen=True)
class Asked:
    """Training prompts for the target to answer."""

    source: str
    limit: int
    temperature: float

    def name(self) -> str:
        return f"{self.source.removeprefix('builtin:')}-{self.temperature:g}.jsonl"


ANSWERED = (
    Asked("builtin:python-docstrings", 6000, 0),
    Asked("builtin:python-chat", 6000, 0),
    Asked("builtin:python-docstrings", 12000, 0.8),
    Asked("builtin:python-chat", 12000, 0.8),
)


def command(module: str, *args: str | Path) -> None:
    """Run one of the project's commands; exit with its status if it fails."""
    status = subprocess.run([sys.executable, "-m", f"eagle_mlx.{module}", *map(str, args)], check=False).returncode
    if status:
        sys.exit(status)


def regenerate(target: Path, wanted: Asked, seed: int, work: Path) -> Path:
    """Return the target's answers. Sampled answers use other prompts, in another order."""
    output = work / wanted.name()
    if not output.exists():
        seed += wanted.temperature > 0
        choice = ("--target", target, "--data", wanted.source, "--split", "train", "--limit", str(wanted.limit))
        sampling = (
            "--temperature",
            str(wanted.temperature),
            "--seed",
            str(seed),
            "--max-tokens",
            "128",
            "--batch",
            "64",
        )
        command("data_pipelines.cli", "regenerate", *choice, *sampling, "--least-distinct", "0.6", "--output", output)
    return output


def lines(path: Path) -> list[str]:
    return path.read_text(encoding="utf-8").splitlines(keepends=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--target", type=Path, default=CHECKPOINTS / "target")
    parser.add_argument("--prompts", type=Path, default=CHECKPOINTS / "prompts.jsonl")
    parser.add_argument("--config", type=Path, default=CHECKPOINTS / "head.yaml", help="recipe of the training")
    parser.add_argument(
        "--work", type=Path, required=True, help="folder for answers and the run; best head in run/best"
    )
    parser.add_argument("--minutes", type=float, help="of training, in place of the recipe's")
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()

    args.work.mkdir(parents=True, exist_ok=True)
    choosing = args.work / "choosing.jsonl"
    choosing.write_text("".join(lines(args.prompts)[MEASURED:]), encoding="utf-8")
    answers = [regenerate(args.target, wanted, args.seed, args.work) for wanted in ANSWERED]
    shares = {str(path): len(lines(path)) for path in answers} | {"builtin:python": SOURCE}  # include all of each
    mix = [flag for source, share in shares.items() for flag in ("--data", f"{source}={share}")]
    data = [*mix, "--limit", str(sum(shares.values()))]
    minutes = ("--minutes", str(args.minutes)) if args.minutes is not None else ()
    judged = ("--eval-data", choosing, "--seed", str(args.seed), "--output", args.work / "run")
    command("train.cli", "--target", args.target, "-c", args.config, *data, *judged, *minutes)


if __name__ == "__main__":
    main()
