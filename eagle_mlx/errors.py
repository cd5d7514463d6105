"""Exceptions for users' errors; every message gives the problem, the place and a remedy.

EagleError
├── ConfigError      an option, a field or a key that cannot be used
├── TargetError      a model that cannot be a target
├── HeadError        a head that does not fit its target
├── CheckpointError  a head checkpoint that cannot be read
├── DataError        a conversation or a data file, with file and line
├── ShardError       a hidden-state shard that is damaged or missing
├── PromptError      a prompt that the target cannot process
├── ProposerError    a draft that cannot be verified
├── RanksError       another process of a run that has ended or does not answer
└── OutputError      a place that cannot be written to

HeadWarning, a UserWarning: a head that fits, but whose drafts are rarely accepted or whose config has unknown fields.
"""

import difflib
import math
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any, Self


class EagleError(Exception):
    """The base class of all errors that a user can cause and fix."""

    def __init__(self, message: str, field: str | None = None) -> None:
        """field: the field of a request at fault, such as `messages[2].content`."""
        super().__init__(message)
        self.field = field

    @classmethod
    def at(cls, field: str, problem: str) -> Self:
        """Return an error with the message `field: problem`."""
        return cls(f"{field}: {problem}", field)


class ConfigError(EagleError): ...


class TargetError(EagleError): ...


class HeadError(EagleError): ...


class CheckpointError(EagleError): ...


class DataError(EagleError): ...


class ShardError(EagleError): ...


class PromptError(EagleError): ...


class ProposerError(EagleError): ...


class RanksError(EagleError): ...


class OutputError(EagleError): ...


class HeadWarning(UserWarning): ...


def check(holds: object, message: str) -> None:
    """Raise ConfigError unless something holds."""
    if not holds:
        raise ConfigError(message)


def did_you_mean(name: str, names: Iterable[str]) -> str:
    """Return a hint for an error message, `did you mean X? `, or "" if no name is similar."""
    near = difflib.get_close_matches(name, names, 1)
    return f"did you mean {near[0]}? " if near else ""


def require(name: str, value: Any, kind: Any, meaning: str, least: float = -math.inf, most: float = math.inf) -> None:
    """Raise ConfigError, with the name as its field, if an argument has another type or is out of range.

    `kind`: as in `isinstance`, but float takes whole numbers, and neither it nor int takes bools.
    """
    kinds, is_number = int | float if kind is float else kind, kind in (int, float)
    if not isinstance(value, kinds) or (is_number and (isinstance(value, bool) or not least <= value <= most)):
        raise ConfigError(f"{name} must be {meaning}; got {' '.join(repr(value).split())[:80]}", name)


@contextmanager
def loading(name: object, kind: type[EagleError] = TargetError) -> Iterator[None]:
    """Turn every error of a block that loads a model, except EagleErrors, into one of this kind with one line.

    The code of models, tokenizers and templates is other people's, so it can raise anything.
    """
    try:
        yield
    except EagleError:
        raise
    except Exception as e:
        raise kind(f"{name} cannot be loaded: {in_one_line(e)}") from e


def in_one_line(error: Exception) -> str:
    """Return an error's message in one line, with the error's type if the message alone says too little."""
    text = " ".join(str(error).removeprefix(f"[Errno {getattr(error, 'errno', None)}] ").split())
    return text if isinstance(error, EagleError | OSError | ValueError) and text else f"{type(error).__name__}: {text}"
