"""Questions of several turns and of several categories, as Spec-Bench and MT-bench have them."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import chain, zip_longest
from pathlib import Path
from typing import Any

from eagle_mlx.errors import PromptError
from eagle_mlx.target import Target

from .prompts import Prompt, encode, read_lines, read_prompts


@dataclass(frozen=True)
class Question:
    """A prompt, and what is asked behind its answer."""

    prompt: Prompt
    later: tuple[str, ...] = ()
    """The turns behind the first one."""
    category: str | None = None

    def encode(self, target: Target, answers: Sequence[str], max_tokens: int) -> list[int]:
        """The token ids of the turn behind so many answers, through the target's chat template.

        Raises PromptError where prompt and answer do not fit the target's context.
        """
        if not answers:
            return encode(self.prompt, target, max_tokens)
        messages = list[Mapping[str, str]](self.prompt.content)  # type: ignore[arg-type]
        for answer, turn in zip(answers, self.later, strict=False):
            messages += [{"role": "assistant", "content": answer}, {"role": "user", "content": turn}]
        return encode(Prompt(tuple(messages), self.prompt.origin), target, max_tokens)

    def check(self, target: Target, max_tokens: int) -> None:
        """Raise PromptError where the last turn may not fit the context, with answers of `max_tokens` before it."""
        if self.later:
            self.encode(target, [""] * len(self.later), max_tokens * (1 + len(self.later)))


def read_questions(path: Path, limit: int | None = None) -> list[Question]:
    """Read `{"question_id", "category", "turns"}` rows, or the rows that `read_prompts` reads.

    `limit`: of rows with categories so many are taken in all, as many of each as there are. Raises PromptError with
    file and line for a row that cannot be used, and for a file without rows.
    """
    lines = read_lines(path)
    if not lines or not _has_turns(lines[0]):
        return [Question(prompt) for prompt in read_prompts(path, limit)]
    return _spread([_question(line, f"{path}:{number}") for number, line in enumerate(lines, start=1)], limit)


def _spread(questions: Sequence[Question], limit: int | None) -> list[Question]:
    """The first of each category, then the second of each, until there are enough; in the order of the file."""
    places: dict[str | None, list[int]] = {}
    for place, question in enumerate(questions):
        places.setdefault(question.category, []).append(place)
    in_turn = (place for place in chain.from_iterable(zip_longest(*places.values())) if place is not None)
    return [questions[place] for place in sorted(list(in_turn)[:limit])]


def _has_turns(line: str) -> bool:
    try:
        row = json.loads(line)
    except json.JSONDecodeError:
        return False
    return isinstance(row, dict) and "turns" in row


def _question(line: str, origin: str) -> Question:
    try:
        row: Any = json.loads(line)
    except json.JSONDecodeError as e:
        raise PromptError(f"{origin}: not valid JSON ({e.msg} at column {e.colno})") from e
    if not isinstance(row, dict) or "turns" not in row:
        raise PromptError(f"{origin}: the row needs `turns` (a list of texts), as the first one has")
    turns, category = row["turns"], row.get("category")
    if not isinstance(turns, list) or not turns:
        raise PromptError(f"{origin}: `turns` must be a list of one text or more")
    for number, turn in enumerate(turns, start=1):
        if not isinstance(turn, str) or not turn.strip():
            raise PromptError(f"{origin}: turn {number} must be a text that is not empty")
    if not isinstance(category, str) or not category:
        raise PromptError(f"{origin}: `category` must be a text that is not empty")
    first = {"role": "user", "content": turns[0]}
    return Question(Prompt((first,), origin), tuple(turns[1:]), category)
