"""Train the head that ships: the target answers the training prompts itself, then eagle-train learns from that.

    python checkpoints/scripts/make_head.py --work out/make_head --minutes 40

A head has to predict what the target says, so most of its data are the target's own answers, greedy, those that loop
left out. The rest is the source as it stands. Checkpoints are chosen on held-out prompts that no published
figure uses: the figures are taken on the first 100 of prompts.jsonl, the choice on the others. Finished steps are kept
in the work folder, so that a run cut short goes on where it stopped.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
from pathlib import Path

CHECKPOINTS = Path(__file__).resolve().parents[1]
MEASURED = 100
"""Prompts at the start of prompts.jsonl that are kept for the figures."""
ANSWERED = ("builtin:python-docstrings", "builtin:python-chat")


def command(module: str, *args: str | Path) -> None:
    """Run one of the project's commands; exits with its status where it fails."""
    status = subprocess.run([sys.executable, "-m", f"eagle_mlx.{module}", *map(str, args)], check=False).returncode
    if status:
        sys.exit(status)


def regenerate(target: Path, source: str, limit: int, seed: int, work: Path) -> Path:
    """The target's greedy answers to the training prompts of a source."""
    output = work / f"{source.removeprefix('builtin:')}.jsonl"
    if not output.exists():
        choice = ("--target", target, "--data", source, "--split", "train", "--limit", str(limit), "--seed", str(seed))
        how = ("--temperature", "0", "--max-tokens", "128", "--batch", "32", "--least-distinct", "0.6")
        command("data_pipelines.cli", "regenerate", *choice, *how, "--output", output)
    return output


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--target", type=Path, default=CHECKPOINTS / "target")
    parser.add_argument("--prompts", type=Path, default=CHECKPOINTS / "prompts.jsonl")
    parser.add_argument("--config", type=Path, default=CHECKPOINTS / "head.yaml", help="recipe of the training")
    parser.add_argument(
        "--work", type=Path, required=True, help="folder for answers and the run; best head in run/best"
    )
    parser.add_argument("--answers", type=int, default=6000, help="prompts to answer of each source (%(default)s)")
    parser.add_argument("--minutes", type=float, help="of training, in place of the recipe's")
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()

    args.work.mkdir(parents=True, exist_ok=True)
    choosing = args.work / "choosing.jsonl"
    rows = args.prompts.read_text(encoding="utf-8").splitlines(keepends=True)
    choosing.write_text("".join(rows[MEASURED:]), encoding="utf-8")
    answers = [regenerate(args.target, source, args.answers, args.seed, args.work) for source in ANSWERED]
    data = [flag for source in (*answers, "builtin:python") for flag in ("--data", f"{source}=1")]  # as many of each
    minutes = ("--minutes", str(args.minutes)) if args.minutes is not None else ()
    judged = ("--eval-data", choosing, "--seed", str(args.seed), "--output", args.work / "run")
    command("train.cli", "--target", args.target, "-c", args.config, *data, *judged, *minutes)


if __name__ == "__main__":
    main()
