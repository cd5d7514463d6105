"""Settings declared once: a dataclass field with its default, help, limits and flag name.

A group is a frozen dataclass of settings and may contain other groups. Command lines (`command.py`), YAML files and
saved runs fill groups by setting name. Names are unique among all groups of a command.
"""

from __future__ import annotations

import dataclasses
import difflib
import functools
import json
import math
import operator
import types
import typing
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, Self

from eagle_mlx.errors import ConfigError


@dataclass(frozen=True)
class Limit:
    """A check of a number, and its error message with `{}` for the value."""

    holds: Callable[[Any], object]
    message: str


def between(least: float, most: float) -> Limit:
    """Return the limit of numbers from `least` to `most`, both included."""
    return Limit(lambda value: least <= value <= most, f"must be between {least:,} and {most:,}, not {{}}")


AT_LEAST_0 = Limit(lambda value: value >= 0, "must be at least 0, not {}")
AT_LEAST_1 = Limit(lambda value: value >= 1, "must be at least 1, not {}")
ABOVE_0 = Limit(lambda value: value > 0, "must be above 0, not {}")
SHARE = between(0, 1)
GIGABYTES = Limit(lambda value: value >= 1e-9, "must be above 0, not {}")
SEED = Limit(lambda value: 0 <= value < 2**63, "must be at least 0 and below 2^63, not {}")
DRAFT_TOKENS = between(0, 20)
"""Tokens of a draft. Longer ones are hardly ever accepted whole, and checking one at the start takes minutes."""
RANK_SECONDS = 60.0
"""Seconds after which a silent rank counts as lost: longer than any forward, including a prompt's longest chunk."""
_UNIONS = (types.UnionType, typing.Union)
REQUIRED = dataclasses.MISSING  # the default of a required setting


@dataclass(frozen=True)
class Setting:
    default: Any  # REQUIRED if there is none
    help: str
    limit: Limit | None = None
    name: str = ""
    """Unique name: the key in a file and, with dashes, the flag. By default, the field's name."""
    metavar: str | None = None  # the value's name in the help
    also: tuple[str, ...] = ()  # more names of the flag
    repeat: bool = False  # whether the flag takes one value and may be repeated
    positional: bool = False  # whether it is an argument without a flag
    bare: str | None = None  # the value if the flag is given without one
    shown: str | None = None  # replaces the default in the help; "" hides it
    unset: Any = None  # how None is written on the command line and in files, such as 0 or auto
    path: tuple[str, ...] = ()  # field names from the outermost group to this setting
    type: Any = None  # the type without None; see `optional`
    optional: bool = False

    @property
    def field(self) -> str:
        return self.path[-1]

    @property
    def title(self) -> str:
        """Its name on the command line, for messages."""
        return self.name if self.positional else flag(self.name)

    @property
    def choices(self) -> list[str]:
        """The words that the setting takes, on the command line; empty if others are possible."""
        kind = typing.get_args(self.type)[0] if typing.get_origin(self.type) is tuple else self.type
        words = typing.get_args(kind) if typing.get_origin(kind) is Literal else ()
        return list(map(str, (self.unset, *words) if words and self.unset is not None else words))

    def written(self, value: Any) -> Any:
        """Return a value as in files and on the command line."""
        return self.unset if value is None else value

    def convert(self, value: Any) -> Any:
        """Convert a value to the setting's type, if this is unambiguous; `unset` is None.

        Raises ConfigError, with the flag, if it cannot be converted or is outside the limit.
        """
        if self.optional and (value is None or (isinstance(value, str) and value == self.unset)):
            return None
        if self.metavar == "JSON" and isinstance(value, dict):
            value = json.dumps(value)
        try:
            converted = _convert(value, self.type)
        except (LookupError, TypeError, ValueError):
            described = _described(self.type, self.choices)
            raise ConfigError(f"{self.title} must be {described}, not {value!r}") from None
        if self.optional and converted == self.unset:
            return None
        for item in converted if isinstance(converted, tuple) else (converted,):
            if isinstance(item, float) and not math.isfinite(item):
                raise ConfigError(f"{self.title} must be a finite number, not {item}")
            if self.limit is not None and not self.limit.holds(item):
                raise ConfigError(f"{self.title} {self.limit.message.format(item)}")
        return converted


def setting(
    default: Any, help: str, limit: Limit | None = None, name: str = "", metavar: str | None = None, **more: Any
) -> Any:
    """Return the dataclass field of a setting; see Setting for all arguments."""
    return dataclasses.field(
        default=default, metadata={"setting": Setting(default, help, limit, name, metavar, **more)}
    )


class Group:
    """A group of settings, converted and validated on creation."""

    def __post_init__(self) -> None:
        for declared in settings_of(type(self)).values():
            if len(declared.path) == 1:
                object.__setattr__(self, declared.field, declared.convert(getattr(self, declared.field)))
        self._check()

    def _check(self) -> None:
        """Check combinations of values."""

    @classmethod
    def of(cls, **settings: Any) -> Self:
        """Return the defaults with these settings changed. Raises ConfigError as `changed` does."""
        own, inner = _by_field(cls, settings)
        return cls(**own, **{field: group.of(**inner.get(field, {})) for field, group in groups_of(cls).items()})

    def changed(self, **settings: Any) -> Self:
        """Return a copy with these settings changed.

        Raises ConfigError, with the nearest name, for an unknown name, or if a value is invalid.
        """
        own, inner = _by_field(type(self), settings)
        for field, values in inner.items():
            own[field] = getattr(self, field).changed(**values)
        return dataclasses.replace(self, **own)  # type: ignore[type-var]  # every group is a dataclass

    def value(self, name: str) -> Any:
        return functools.reduce(getattr, find(type(self), name).path, self)

    def flat(self) -> dict[str, Any]:
        """Return all settings by name, as in files and saved runs; `of` reads them back."""
        return {name: declared.written(self.value(name)) for name, declared in settings_of(type(self)).items()}


def groups_of(group: type[Group]) -> Mapping[str, type[Group]]:
    """Return the groups within a group by field name."""
    return _read(group)[1]  # type: ignore[arg-type]  # mypy takes no class for hashable


def settings_of(group: type[Group]) -> Mapping[str, Setting]:
    """Return all settings of a group and its inner groups by name, in field order."""
    return _read(group)[0]  # type: ignore[arg-type]  # as above


@functools.cache
def _read(group: type[Group]) -> tuple[Mapping[str, Setting], Mapping[str, type[Group]]]:
    hints = typing.get_type_hints(group)
    groups: dict[str, type[Group]] = {}
    settings: dict[str, Setting] = {}
    for field in dataclasses.fields(group):  # type: ignore[arg-type]  # every group is a dataclass
        if isinstance(hints[field.name], type) and issubclass(hints[field.name], Group):
            groups[field.name] = hints[field.name]
            for name, inner in settings_of(hints[field.name]).items():
                settings[name] = dataclasses.replace(inner, path=(field.name, *inner.path))
        elif "setting" in field.metadata:
            declared: Setting = field.metadata["setting"]
            name, (kind, optional) = declared.name or field.name, _without_none(hints[field.name])
            settings[name] = dataclasses.replace(declared, name=name, path=(field.name,), type=kind, optional=optional)
    return settings, groups


def find(group: type[Group], name: str) -> Setting:
    """Return the setting with this name. Raises ConfigError, with the nearest name, if there is none."""
    settings = settings_of(group)
    if name not in settings:
        near = difflib.get_close_matches(str(name).replace("-", "_"), settings, n=1, cutoff=0.0)
        raise ConfigError(f"unknown setting {name!r}; did you mean {near[0]!r}?")
    return settings[name]


def flag(name: str) -> str:
    """Return the flag of a setting: `--draft-vocab` for `draft_vocab`."""
    return f"--{name.replace('_', '-')}"


def _by_field(group: type[Group], settings: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, dict[str, Any]]]:
    """Return the values of a group's own fields, and the settings of each inner group."""
    own: dict[str, Any] = {}
    inner: dict[str, dict[str, Any]] = {}
    for name, value in settings.items():
        declared = find(group, name)
        if len(declared.path) == 1:
            own[declared.field] = value
        else:
            inner.setdefault(declared.path[0], {})[name] = value
    return own, inner


def _without_none(hint: Any) -> tuple[Any, bool]:
    if typing.get_origin(hint) not in _UNIONS:
        return hint, False
    kinds = [kind for kind in typing.get_args(hint) if kind is not type(None)]
    return functools.reduce(operator.or_, kinds), len(kinds) < len(typing.get_args(hint))


_CONVERTIBLE = {int: (str,), float: (int, str), str: (int, float), Path: (str,)}
"""The types of values that are converted; YAML reads 1e-4 as text."""


def _convert(value: Any, type_: Any) -> Any:
    """Return a value in this type. Raises LookupError, TypeError or ValueError."""
    kind, args = typing.get_origin(type_), typing.get_args(type_)
    if kind is tuple:
        return tuple(_convert(item, args[0]) for item in (value if isinstance(value, list | tuple) else [value]))
    if kind is Literal:
        return {str(word): word for word in args}[str(value)]
    if kind in _UNIONS:
        type_ = next((option for option in args if isinstance(value, option)), args[0])
    if type(value) is type_ or (type_ is Path and isinstance(value, Path)):
        return value
    if type(value) not in _CONVERTIBLE.get(type_, ()):
        raise TypeError
    return type_(value)


def _described(type_: Any, choices: list[str]) -> str:
    if typing.get_origin(type_) is tuple:
        return f"a list, each {_described(typing.get_args(type_)[0], choices)}"
    if choices:
        return f"one of {', '.join(choices)}"
    if typing.get_origin(type_) in _UNIONS:
        return _described(typing.get_args(type_)[0], choices)
    return {int: "a whole number", float: "a number", str: "text", bool: "true or false", Path: "a path"}[type_]
