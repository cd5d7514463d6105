"""One setting: a field of a frozen dataclass that carries its help, its limits and the name of its flag."""

from __future__ import annotations

import argparse
import dataclasses
import typing
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Literal

from eagle_mlx.errors import ConfigError

_METAVARS = {int: "N", float: "X", str: "NAME"}


@dataclass(frozen=True)
class Limit:
    """What a number must keep to, and how an error says so."""

    holds: Callable[[float], bool]
    said: str
    """With `{}` for the value."""


AT_LEAST_1 = Limit(lambda value: value >= 1, "must be at least 1, not {}")
ABOVE_0 = Limit(lambda value: value > 0, "must be above 0, not {}")
NOT_NEGATIVE = Limit(lambda value: value >= 0, "must not be negative, but is {}")
SHARE = Limit(lambda value: 0 <= value <= 1, "must be between 0 and 1, not {}")


def setting(
    default: Any, help: str, limit: Limit | None = None, name: str | None = None, metavar: str | None = None
) -> Any:
    """A field with its default and its help.

    `name` is what flags and files call it where that is not the field's name, `metavar` what its help calls the value.
    """
    about = {"help": help, "limit": limit, "name": name, "metavar": metavar}
    return dataclasses.field(default=default, metadata=about)


@dataclass(frozen=True)
class Setting:
    """What is known of a setting, as flags, files and saved runs see it."""

    name: str
    """Unique over all groups: the key in a file, and with dashes the flag."""
    field: str
    """What its group calls it."""
    type: Any
    default: Any
    help: str
    limit: Limit | None
    metavar: str | None

    def check(self, value: Any) -> None:
        """Raise ConfigError, which names the flag, for a value of another type or outside the limit."""
        if not _fits(value, self.type):
            raise ConfigError(f"{flag(self.name)} must be {_described(self.type)}, not {value!r}")
        if self.limit is not None and not self.limit.holds(value):
            raise ConfigError(f"{flag(self.name)} {self.limit.said.format(value)}")


def settings_of(group: type[Any]) -> Mapping[str, Setting]:
    """The settings of a group by name, in the order of its fields."""
    hints = typing.get_type_hints(group)
    found = {}
    for field in dataclasses.fields(group):
        about = field.metadata
        name = about["name"] or field.name
        found[name] = Setting(
            name=name,
            field=field.name,
            type=hints[field.name],
            default=field.default,
            help=about["help"],
            limit=about["limit"],
            metavar=about["metavar"],
        )
    return found


class Group:
    """Settings that belong together. Every value is checked when the group is made."""

    def __post_init__(self) -> None:
        for known in settings_of(type(self)).values():
            known.check(getattr(self, known.field))
        self._check()

    def _check(self) -> None:
        """What the values must keep to between them."""


def flag(name: str) -> str:
    """The flag of a setting: `draft_vocab` is `--draft-vocab`."""
    return f"--{name.replace('_', '-')}"


def argument(known: Setting) -> dict[str, Any]:
    """What argparse's `add_argument` needs to read a setting's value, its help and default aside."""
    if known.type is bool:
        return {"action": argparse.BooleanOptionalAction}
    if typing.get_origin(known.type) is Literal:
        return {"choices": typing.get_args(known.type)}
    if known.type == tuple[str, ...]:
        return {"nargs": "+", "action": "extend", "metavar": known.metavar or "TEXT"}
    item, several = (known.type, {}) if known.type in _METAVARS else (typing.get_args(known.type)[0], {"nargs": "+"})
    return {"type": item, "metavar": known.metavar or _METAVARS[item], **several}


def _fits(value: Any, type_: Any) -> bool:
    if typing.get_origin(type_) is tuple:
        return isinstance(value, tuple) and all(_fits(item, typing.get_args(type_)[0]) for item in value)
    if typing.get_origin(type_) is Literal:
        return value in typing.get_args(type_)
    return type(value) is type_


def _described(type_: Any) -> str:
    if typing.get_origin(type_) is tuple:
        return f"a list, each {_described(typing.get_args(type_)[0])}"
    if typing.get_origin(type_) is Literal:
        return f"one of {', '.join(map(str, typing.get_args(type_)))}"
    names = {int: "a whole number", float: "a number", str: "text", bool: "true or false"}
    return names[type_]
