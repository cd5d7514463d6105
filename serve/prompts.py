"""Prompts and questions of several turns from a jsonl file, and the dialogues that eagle-bench decodes."""

from __future__ import annotations

import ast
import json
import sysconfig
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import chain, zip_longest
from pathlib import Path
from typing import Any

from eagle_mlx.errors import ConfigError, PromptError
from eagle_mlx.request import encode as encode_prompt
from eagle_mlx.target import Target

ROLES = ("system", "user", "assistant", "tool")


@dataclass(frozen=True)
class Prompt:
    content: str | tuple[Mapping[str, str], ...]
    """Raw text, or messages that end with a turn to be answered."""
    origin: str
    """`file:line`, for messages about it."""


def read_prompts(path: Path, limit: int | None = None) -> list[Prompt]:
    """Read `{"messages": [...]}` and `{"prompt": "..."}` rows, at most `limit` of them.

    Assistant turns at the end of `messages` are left out: they are what is to be generated. Raises PromptError with
    file and line for a row that cannot be used, and for a file without rows.
    """
    prompts = [_prompt(line, f"{path}:{number}") for number, line in enumerate(read_lines(path)[:limit], start=1)]
    if not prompts:
        raise PromptError(f"{path}: the file has no rows; give one JSON object a line, with `messages` or `prompt`")
    return prompts


def read_lines(path: Path) -> list[str]:
    """The lines of a text file. Raises PromptError where it cannot be read."""
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as e:
        raise PromptError(f"{path}: the prompts cannot be read ({e}); give a jsonl file in UTF-8") from e
    return text.removesuffix("\n").split("\n") if text else []  # texts may hold other line ends


def encode(prompt: Prompt, target: Target, max_tokens: int) -> list[int]:
    """The prompt's token ids: messages through the chat template, text as it is.

    Raises PromptError where prompt and answer do not fit the target's context.
    """
    if target.tokenizer is None:
        raise PromptError(f"{prompt.origin}: the target has no tokenizer, so text cannot be encoded")
    content = prompt.content
    tokens = encode_prompt(target, content if isinstance(content, str) else [dict(message) for message in content])
    if not tokens:
        raise PromptError(f"{prompt.origin}: the prompt is empty; give at least one token")
    if len(tokens) + max_tokens > target.context_length:
        raise PromptError(
            f"{prompt.origin}: {len(tokens)} prompt tokens and {max_tokens} new ones do not fit the target's context "
            f"of {target.context_length}; shorten the prompt or lower --max-tokens"
        )
    return tokens


def _prompt(line: str, origin: str) -> Prompt:
    if not line.strip():
        raise PromptError(f"{origin}: the line is empty; remove it")
    try:
        row = json.loads(line)
    except json.JSONDecodeError as e:
        raise PromptError(f"{origin}: not valid JSON ({e.msg} at column {e.colno})") from e
    if not isinstance(row, dict) or not ("messages" in row or "prompt" in row):
        raise PromptError(f"{origin}: the row needs `messages` (a list of turns) or `prompt` (text)")
    if "messages" in row:
        return Prompt(_messages(row["messages"], origin), origin)
    if not isinstance(row["prompt"], str) or not row["prompt"]:
        raise PromptError(f"{origin}: `prompt` must be text that is not empty")
    return Prompt(row["prompt"], origin)


def _messages(value: Any, origin: str) -> tuple[Mapping[str, str], ...]:
    if not isinstance(value, list):
        raise PromptError(f"{origin}: `messages` must be a list of turns")
    turns: Sequence[Any] = value
    for number, turn in enumerate(turns, start=1):
        if not isinstance(turn, dict) or not isinstance(turn.get("content"), str) or turn.get("role") not in ROLES:
            raise PromptError(
                f"{origin}: turn {number} must be an object with a `role` ({', '.join(ROLES)}) and `content`, a text"
            )
    end = len(turns)
    while end and turns[end - 1]["role"] == "assistant":
        end -= 1
    if not end:
        raise PromptError(f"{origin}: `messages` holds no turn to answer")
    return tuple(turns[:end])


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
