"""The registry of kinds of heads and their file layouts."""

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
    """A file layout for a kind of head."""

    name: str
    """Name for `eagle-convert --to`."""
    about: str
    """How the head is written, for a model card."""
    read_by: str
    """The projects that use the layout, as a phrase within a sentence."""
    holds: Callable[[Config, Tensors], bool]
    """Checks whether config.json and tensors of a folder are in this layout."""
    load: Callable[[Path, int | None], Any]
    """Loads the head from a folder, given the target's number of layers if known."""
    save: Callable[..., None]
    """Write a head: `save(head, folder, target_name=..., extra=..., dtype=..., overwrite=...)`."""
    servers: Callable[[Any], tuple[str, ...]] = lambda head: ()
    """Other servers that load this layout unchanged."""
    has_embedding: bool = False
    """Whether the files hold an embedding, copied from the target if the head has none."""


@dataclass(frozen=True)
class HeadKind:
    """A kind of head. Its folder in `eagle_mlx/heads` contains everything about it."""

    name: str
    """Name for `eagle-train --head`."""
    title: str
    head_class: type[HeadBase[Any]]
    formats: tuple[Format, ...]
    """File layouts. Training writes the first one."""
    mode: Literal["eagle", "mtp"] = "eagle"
    """Name of this way to draft in `--spec-decode`."""
    unusual: Callable[[Any], list[str]] = lambda head: []
    """Returns the fields of a head's config that some loaders may not know."""
    trainable: bool = True
    """Whether `eagle-train` has a recipe for it."""
    hint: Callable[[Path, Tensors], str | None] = lambda folder, tensors: None
    """Returns advice for a folder that has no head, but something that can be converted to one."""


KINDS: dict[str, HeadKind] = {}


def register(kind: HeadKind) -> None:
    """Register a kind. If several layouts match a folder, the first one registered is used."""
    KINDS[kind.name] = kind


def kind_of(head: DraftHead) -> HeadKind:
    """Return the kind of a head. Raises ConfigError if it is unknown."""
    for kind in KINDS.values():
        if isinstance(head, kind.head_class):
            return kind
    raise ConfigError(f"a {type(head).__name__} is of no known kind; known are {', '.join(KINDS)}")


def format_of(config: Config, tensors: Tensors) -> tuple[HeadKind, Format] | None:
    """Return the kind and layout of a folder with these contents, or None if unknown."""
    found = ((kind, layout) for kind in KINDS.values() for layout in kind.formats if layout.holds(config, tensors))
    return next(found, None)
