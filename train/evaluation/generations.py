"""What the target says with a head's help: a few texts of the evaluation, for people to read."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TypedDict

from eagle_mlx.files import write_whole
from eagle_mlx.request import Output, Prompt
from eagle_mlx.target import Target

from ..report import Row

FILE = "generations.md"
COUNT = 3
"""Texts that are kept of an evaluation."""
_PROMPT_CHARACTERS = 600


class Generation(TypedDict):
    """A prompt's end, and the text that was decoded after it."""

    prompt: str
    text: str
    tokens: int
    rounds: int


def generations_of(target: Target, prompts: Sequence[Prompt], outputs: Sequence[Output]) -> list[Generation]:
    """The first few prompts with their texts; none for a target without a tokenizer."""
    if target.tokenizer is None:
        return []
    found: list[Generation] = []
    for prompt, output in list(zip(prompts, outputs, strict=True))[:COUNT]:
        ids = not isinstance(prompt, str) and all(isinstance(token, int) for token in prompt)
        shown = str(target.tokenizer.decode(list(prompt)) if ids else prompt)[-_PROMPT_CHARACTERS:]
        found.append(Generation(prompt=shown, text=output.text, tokens=len(output.tokens), rounds=output.rounds))
    return found


def write_generations(rows: Sequence[Row], folder: Path) -> Path | None:
    """Write the texts of the newest evaluation, each with the tokens per round of all that decoded it, as Markdown.

    Greedy text is the target's own whatever the head, so what training changes is in how many rounds it comes.
    """
    evals = [row for row in rows if row["kind"] == "eval" and row.get("generations")]
    if not evals:
        return None
    lines = ["# Texts of the target, decoded with the head"]
    for number, newest in enumerate(evals[-1]["generations"], 1):
        lines += ["", f"## {number}", "", *_fenced(newest["prompt"]), "", *_fenced(newest["text"]), ""]
        lines += ["| step | tokens seen | tokens per round |", "|---|---|---|"]
        for row in evals:
            match = [g for g in row["generations"] if (g["prompt"], g["text"]) == (newest["prompt"], newest["text"])]
            if match:
                lines.append(f"| {row['step']} | {row.get('tokens', 0):,} | {per_round(match[0]):.2f} |")
    file = folder / FILE
    write_whole(file, ("\n".join(lines) + "\n").encode())
    return file


def per_round(generation: Generation) -> float:
    """Tokens per target forward, the bonus token included."""
    return generation["tokens"] / max(generation["rounds"], 1)


def _fenced(text: str) -> list[str]:
    """The text as a block that nothing in it ends."""
    fence = "```"
    while fence in text:
        fence += "`"
    return [f"{fence}text", text, fence]
