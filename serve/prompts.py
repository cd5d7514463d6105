"""Texts of the user: questions of one or several turns, filler before them, and what a memory begins with."""

from __future__ import annotations

import ast
import io
import json
import sysconfig
import warnings
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import count
from pathlib import Path
from typing import Any

import eagle_mlx as em
from eagle_mlx.errors import ConfigError, EagleError, PromptError, in_one_line
from eagle_mlx.request import Prompt
from eagle_mlx.request import encode as encode_prompt

ROLES = ("system", "user", "assistant", "tool")


@dataclass(frozen=True)
class Question:
    """A prompt and the user's later turns."""

    content: Prompt  # text, token ids, or messages that end with a turn to answer
    later: tuple[str, ...] = ()  # later turns, if `content` is messages
    category: str | None = None
    origin: str = "the prompt"  # `file:line`, for errors

    def encode(self, target: em.Target, answers: Sequence[str] = (), max_tokens: int = 0) -> list[int]:
        """Return the tokens of the turn that follows `answers`. Raises PromptError if they and an answer do not fit."""
        content = self.content
        for answer, turn in zip(answers, self.later, strict=False):
            content = [*content, {"role": "assistant", "content": answer}, {"role": "user", "content": turn}]
        tokens = encode_prompt(target, content)
        if not tokens:
            raise PromptError(f"{self.origin}: the prompt is empty; give at least one token")
        if len(tokens) + max_tokens > target.context_length:
            raise PromptError(
                f"{self.origin}: {len(tokens)} prompt tokens and {max_tokens} new ones do not fit the target's context "
                f"of {target.context_length}; shorten the prompt or lower --max-tokens"
            )
        return tokens

    def check(self, target: em.Target, max_tokens: int) -> None:
        """Raise PromptError if the last turn may not fit the context after answers of `max_tokens` each."""
        self.encode(target, [""] * len(self.later), max_tokens * (1 + len(self.later)))


def read_questions(path: Path, limit: int | None = None) -> list[Question]:
    """Read rows with `messages`, with `prompt` (text), or with `turns` (the user's texts), maybe with a `category`.

    Drops assistant turns at the end of `messages`. limit: number of questions, spread evenly over categories. Raises
    PromptError, with file and line, for an invalid row or a file without rows.
    """
    try:
        text = path.read_text(encoding="utf-8-sig")
    except (OSError, UnicodeDecodeError) as e:
        raise PromptError(f"{path}: the prompts cannot be read ({in_one_line(e)}); give a jsonl file in UTF-8") from e
    if not text.strip():
        raise PromptError(f"{path}: the file has no rows; give one JSON object per line, with `messages` or `prompt`")
    lines = text.split("\n")  # texts may contain other line breaks
    questions = [_question(line, f"{path}:{number}") for number, line in enumerate(lines, start=1) if line.strip()]
    rank: defaultdict[str | None, Iterator[int]] = defaultdict(count)
    ranks = [next(rank[question.category]) for question in questions]  # within each category
    taken = sorted(range(len(questions)), key=ranks.__getitem__)[:limit]
    return [questions[index] for index in sorted(taken)]


def _question(line: str, origin: str) -> Question:
    def check(holds: object, need: str) -> None:
        if not holds:
            raise PromptError(f"{origin}: {need}")

    try:
        row: Any = json.loads(line)
    except json.JSONDecodeError as e:
        raise PromptError(f"{origin}: not valid JSON at column {e.colno}: {e.msg.removesuffix(' at')}") from e
    match row:
        case {"turns": turns}:
            check(isinstance(turns, list) and turns, "`turns` must be a list with at least one text")
            for number, turn in enumerate(turns, start=1):
                check(isinstance(turn, str) and turn.strip(), f"turn {number} must be non-empty text")
            category = row.get("category")
            check(category is None or (isinstance(category, str) and category), "`category` must be non-empty text")
            return Question([{"role": "user", "content": turns[0]}], tuple(turns[1:]), category, origin)
        case {"messages": turns}:
            check(isinstance(turns, list), "`messages` must be a list of turns")
            for number, turn in enumerate(turns, start=1):
                is_turn = isinstance(turn, dict) and turn.get("role") in ROLES and isinstance(turn.get("content"), str)
                need = f"an object with a `role` ({', '.join(ROLES)}) and `content`, a text"
                check(is_turn, f"turn {number} must be {need}")
            while turns and turns[-1]["role"] == "assistant":
                turns = turns[:-1]
            check(turns, "`messages` has no turn to answer")
            return Question(turns, origin=origin)
        case {"prompt": prompt}:
            check(isinstance(prompt, str) and prompt, "`prompt` must be non-empty text")
            return Question(prompt, origin=origin)
    raise PromptError(f"{origin}: the row needs `messages` (a list of turns), `prompt` (text) or `turns` (texts)")


_LEAST_CHARS = 200  # minimum length of a docstring; shorter ones are labels


def with_filler(questions: Sequence[Question], target: em.Target, tokens: int) -> list[Question]:
    """Put a different text of `tokens` tokens, from docstrings of Python's standard library, before each question.

    Raises ConfigError if the target has no tokenizer, or if there is too little text.
    """
    if target.tokenizer is None:
        raise ConfigError("--filler needs a target with a tokenizer")
    filled = []
    for question, text in zip(questions, _pieces(target.tokenizer, tokens), strict=False):
        content: Any = question.content
        if isinstance(content, str):
            filled.append(replace(question, content=f"{text}\n\n{content}"))
        else:
            first = {**content[0], "content": f"{text}\n\n{content[0]['content']}"}
            filled.append(replace(question, content=[first, *content[1:]]))
    return filled


def _pieces(tokenizer: Any, tokens: int) -> Iterator[str]:
    ids: list[int] = []
    for text in _docstrings():
        ids += tokenizer.encode(f"{text}\n\n", add_special_tokens=False)
        while len(ids) >= tokens:
            yield tokenizer.decode(ids[:tokens])
            del ids[:tokens]
    raise ConfigError(
        f"--filler {tokens}: the standard library has too little text; use fewer tokens, or fewer prompts (--limit)"
    )


def _docstrings() -> Iterator[str]:
    library = Path(sysconfig.get_paths()["stdlib"])
    for file in sorted(path for path in library.rglob("*.py") if "site-packages" not in path.parts):
        try:
            with warnings.catch_warnings(action="ignore"):
                tree = ast.parse(file.read_text(encoding="utf-8"))
        except (SyntaxError, ValueError, RecursionError, OSError):
            continue
        kinds = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
        texts = (ast.get_docstring(node) or "" for node in ast.walk(tree) if isinstance(node, kinds))
        yield from (text for text in texts if len(text) >= _LEAST_CHARS)


MOST_BYTES = 1 << 20  # larger files of a folder are left out: they are data rather than something that people write


def remember(paths: Sequence[str], engine: em.Engine, say: Callable[[str], None]) -> None:
    """Read files and folders into an engine's memory, for all namespaces; `say` reports each. Raises ConfigError."""
    target, memory = engine.target, engine.proposer.memory if engine.proposer is not None else None
    if paths and memory is None:
        raise ConfigError("--memory: n-grams draft with texts, and they are off; leave --memory out")
    for path in paths:
        assert memory is not None
        count, tokens = 0, 0
        for text in _texts(Path(path).expanduser(), target):
            memory.add(text, None)
            count, tokens = count + 1, tokens + len(text)
        say(f"memory: {count:,} texts, {tokens:,} tokens of {path}")


def _texts(path: Path, target: em.Target) -> Iterator[list[int]]:
    if path.suffix == ".jsonl":
        yield from _rows(path, target)
    elif path.is_dir():
        for file in sorted(path.rglob("*")):
            hidden = any(part.startswith(".") for part in file.relative_to(path).parts)
            if file.is_file() and not hidden and file.stat().st_size <= MOST_BYTES:
                text = file.read_bytes()
                if b"\0" not in text:  # not text
                    yield encode_prompt(target, text.decode("utf-8", "replace"))
    else:
        yield encode_prompt(target, _read(path))


def _rows(path: Path, target: em.Target) -> Iterator[list[int]]:
    for number, line in enumerate(io.StringIO(_read(path).rstrip()), 1):  # texts may contain other line breaks
        try:
            row: dict[str, Any] = json.loads(line)
            yield encode_prompt(target, row["messages"] if "messages" in row else row["text"])
        except (ValueError, TypeError, KeyError, EagleError) as e:
            forms = 'a line is an object with a list of "messages", or with a "text"'
            raise ConfigError(f"--memory {path}:{number}: {type(e).__name__}: {e}; {forms}") from e


def _read(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8-sig")
    except (OSError, UnicodeError) as e:
        raise ConfigError(f"--memory {path}: {in_one_line(e)}; give a file of text, a .jsonl file or a folder") from e
