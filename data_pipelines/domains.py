"""What conversations that a target makes up are about: words that steer its user turns, with their shares."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from eagle_mlx.errors import ConfigError
from eagle_mlx.yaml_files import read_yaml

from .conversation import Message

FILE = Path(__file__).parent / "domains.yaml"
"""The project's own domains."""


@dataclass(frozen=True)
class Domain:
    """A kind of conversation. Raises ConfigError, when it is made, for a weight that cannot be."""

    name: str
    weight: float
    """Its share of the conversations, relative to the other weights."""
    system: str = ""
    """The system prompt that a user turn is written under; empty for the chat template's own. No answer sees it."""
    openings: tuple[str, ...] = ("",)
    """What the first user turn begins with: each conversation gets one of them."""

    @property
    def messages(self) -> list[Message]:
        """What stands in front of the user's first turn."""
        return [Message("system", self.system)] if self.system else []

    def __post_init__(self) -> None:
        weight = self.weight
        if isinstance(weight, bool) or not isinstance(weight, (int, float)) or not 0 < weight < math.inf:
            raise ConfigError(f"{self.name}: a weight must be a number above 0, such as 2, not {weight!r}")


def read_domains(file: Path) -> tuple[Domain, ...]:
    """The domains of a YAML file: under each name a weight, and if need be a system prompt and openings.

    Raises ConfigError, naming the file and the domain, for what cannot be used.
    """
    found = read_yaml(file, "file of domains")
    if not isinstance(found, dict) or not found:
        raise ConfigError(f"{file} must hold domains, each with a weight under its name; see {FILE}")
    try:
        return tuple(_domain(str(name), entry) for name, entry in found.items())
    except ConfigError as e:
        raise ConfigError(f"{file}: {e}") from e


def choose_domains(wishes: Sequence[str], file: Path = FILE) -> tuple[Domain, ...]:
    """The domains of a file that are named by `NAME` or `NAME=WEIGHT`; all where none is.

    Raises ConfigError for a name, a weight or a file that cannot be used.
    """
    domains = read_domains(file)
    if not wishes:
        return domains
    chosen: dict[str, Domain] = {}
    for wish in wishes:
        name, given, weight = wish.partition("=")
        found = next((domain for domain in domains if domain.name == name), None)
        if found is None:
            raise ConfigError(f"--domain {wish}: the domains are {', '.join(domain.name for domain in domains)}")
        chosen[name] = _weighed(found, wish, weight) if given else found
    return tuple(chosen.values())


def _domain(name: str, entry: Any) -> Domain:
    if not isinstance(entry, dict):
        raise ConfigError(f"{name}: must have `weight: 2` or the like under it, not {entry!r}")
    if unknown := [key for key in entry if key not in ("weight", "system", "openings")]:
        raise ConfigError(f"{name}: {unknown[0]!r} is neither weight nor system nor openings")
    system, openings = entry.get("system", ""), entry.get("openings", [""])
    if not isinstance(system, str):
        raise ConfigError(f"{name}: system must be a text, not {system!r}")
    if not (isinstance(openings, list) and openings and all(isinstance(opening, str) for opening in openings)):
        raise ConfigError(f"{name}: openings must be a list of texts, not {openings!r}")
    return Domain(name, entry.get("weight", 1.0), system, tuple(openings))


def _weighed(domain: Domain, wish: str, weight: str) -> Domain:
    try:
        return replace(domain, weight=float(weight))
    except (ValueError, ConfigError) as e:
        raise ConfigError(f"--domain {wish}: a weight must be a number above 0, such as code=2") from e


DOMAINS = read_domains(FILE)
