"""What is measured: a prompt, or turns that are asked one after the other."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from eagle_mlx.target import Target

from ..questions import Question

Next = Callable[[Target, Sequence[str]], list[int]]
"""The token ids of the turn behind these answers."""


@dataclass(frozen=True)
class Dialogue:
    """The token ids of the first turn, and how those of later ones are made of the answers before them."""

    first: list[int]
    turns: int = 1
    later: Next | None = None
    category: str | None = None

    def prompt(self, target: Target, answers: Sequence[str]) -> list[int]:
        """The token ids of the turn behind so many answers."""
        if not answers:
            return self.first
        assert self.later is not None, "a dialogue of several turns says how they are asked"
        return self.later(target, answers)


def dialogues(questions: Sequence[Question], target: Target, max_tokens: int) -> list[Dialogue]:
    """The questions as they are asked of a target.

    Raises PromptError where the last turn of one may not fit the context behind answers of `max_tokens`.
    """
    for question in questions:
        question.check(target, max_tokens)
    return [_dialogue(question, target, max_tokens) for question in questions]


def _dialogue(question: Question, target: Target, max_tokens: int) -> Dialogue:
    return Dialogue(
        question.encode(target, (), max_tokens),
        turns=1 + len(question.later),
        later=lambda target, answers: question.encode(target, answers, max_tokens),
        category=question.category,
    )
