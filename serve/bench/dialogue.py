"""What modes are asked: a prompt, or turns one after the other; with `--filler`, behind a long text."""

from __future__ import annotations

import ast
import sysconfig
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from eagle_mlx.errors import ConfigError
from eagle_mlx.target import Target

from ..prompts import Prompt, Question

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


_LEAST_CHARS = 200
"""Of a text: shorter docstrings are labels."""


def behind_filler(questions: Sequence[Question], target: Target, tokens: int) -> list[Question]:
    """The questions behind so many tokens of text each, another piece for every question.

    The text is what the running Python's standard library says of itself, its longer docstrings. Raises ConfigError
    for a target without a tokenizer, and where there is too little text.
    """
    if target.tokenizer is None:
        raise ConfigError("--filler puts text before prompts, and the target has no tokenizer")
    pieces = _pieces(target, tokens)
    return [replace(each, prompt=_behind(each.prompt, piece)) for each, piece in zip(questions, pieces, strict=False)]


def _behind(prompt: Prompt, text: str) -> Prompt:
    if isinstance(prompt.content, str):
        return replace(prompt, content=f"{text}\n\n{prompt.content}")
    first, *others = prompt.content
    message: Mapping[str, str] = {**first, "content": f"{text}\n\n{first['content']}"}
    return replace(prompt, content=(message, *others))


def _pieces(target: Target, tokens: int) -> Iterator[str]:
    """Texts of so many tokens, one behind the other."""
    assert target.tokenizer is not None
    ids: list[int] = []
    for text in _texts():
        ids += target.tokenizer.encode(f"{text}\n\n", add_special_tokens=False)
        while len(ids) >= tokens:
            yield target.tokenizer.decode(ids[:tokens])
            del ids[:tokens]
    raise ConfigError(f"--filler {tokens}: the standard library has too little text for so many prompts; take fewer")


def _texts() -> Iterator[str]:
    """The longer docstrings of all files, in the order of their paths."""
    library = Path(sysconfig.get_paths()["stdlib"])
    for file in sorted(path for path in library.rglob("*.py") if "site-packages" not in path.parts):
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                tree = ast.parse(file.read_text(encoding="utf-8"))
        except (SyntaxError, ValueError, RecursionError, OSError):
            continue
        kinds = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
        said = (ast.get_docstring(node) or "" for node in ast.walk(tree) if isinstance(node, kinds))
        yield from (text for text in said if len(text) >= _LEAST_CHARS)
