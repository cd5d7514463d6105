"""The kinds of heads that are known, and the layouts of files that hold each."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import mlx.core as mx

from eagle_mlx.errors import ConfigError
from eagle_mlx.heads.base import DraftHead, HeadBase

Config = Mapping[str, Any]
Tensors = Mapping[str, mx.array]


@dataclass(frozen=True)
class Format:
    """A layout of files that holds heads of a kind."""

    name: str
    """As `eagle-convert --to` has it."""
    about: str
    """As a card says that the head is written."""
    read_by: str
    """Whose layout it is, in a sentence's middle."""
    holds: Callable[[Config, Tensors], bool]
    """Whether a folder with this config.json and these tensors is in this layout."""
    load: Callable[[Path, int | None], Any]
    """The head in a folder, given the target's number of layers if it is known."""
    save: Callable[..., None]
    """Write a head: `save(head, folder, target_name=..., extra=..., dtype=..., overwrite=...)`."""
    servers: Callable[[Any], tuple[str, ...]] = lambda head: ()
    """Other servers that load a head in this layout as it is."""
    has_embedding: bool = False
    """Whether it holds an embedding, the target's if the head has none."""


@dataclass(frozen=True)
class HeadKind:
    """A kind of head. Its folder in `eagle_mlx/heads` holds all that the library knows of it."""

    name: str
    """As `eagle-train --head` has it."""
    title: str
    head_class: type[HeadBase[Any]]
    formats: tuple[Format, ...]
    """The first is the one that training writes."""
    mode: Literal["eagle", "mtp"] = "eagle"
    """As `--spec-decode` calls drafting with it."""
    unusual: Callable[[Any], list[str]] = lambda head: []
    """Fields of a head's config that not every loader can be expected to know."""
    hint: Callable[[Path, Tensors], str | None] = lambda folder, tensors: None
    """What to do with a folder that holds no head, but something that one can be made of."""


KINDS: dict[str, HeadKind] = {}


def register(kind: HeadKind) -> None:
    """Make a kind known. A folder is in the first layout that says so, in the order of registration."""
    KINDS[kind.name] = kind


def kind_of(head: DraftHead) -> HeadKind:
    """Return the kind of a head. Raises ConfigError for one of no known kind."""
    for kind in KINDS.values():
        if isinstance(head, kind.head_class):
            return kind
    raise ConfigError(f"a {type(head).__name__} is of no known kind; known are {', '.join(KINDS)}")


def format_of(config: Config, tensors: Tensors) -> tuple[HeadKind, Format] | None:
    """Return the kind of head that a folder with these contents holds, and the layout; None for none that is known."""
    found = ((kind, layout) for kind in KINDS.values() for layout in kind.formats if layout.holds(config, tensors))
    return next(found, None)
