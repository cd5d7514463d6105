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
SERVERS = ("vLLM", "SGLang")
"""The readers of layouts that are servers, and that model cards name."""
Holds = Callable[[Config, Tensors], bool]


@dataclass(frozen=True)
class Format:
    """A file layout for a kind of head."""

    name: str
    """Name for `eagle-convert --to`."""
    about: str
    """How the head is written, for a model card."""
    readers: tuple[str, ...]
    """The other projects that read the layout."""
    holds: Holds
    """Checks whether config.json and tensors of a folder are in this layout."""
    load: Callable[[Path, int | None], Any]
    """Reads a head from a folder, given the target's number of layers if known: it determines the aux layers if the
    config does not name them. Raises CheckpointError if the folder is not in this layout, if a file is damaged, if any
    tensor is missing, unknown or of the wrong shape, or if a field or its value is not supported."""
    save: Callable[..., None]
    """Writes a head to a folder, which appears only once complete: `save(head, folder, **SaveOptions)`. Quantized
    weights stay quantized. Raises ConfigError if the layout cannot express the head, OutputError if the folder cannot
    be written."""
    has_embedding: bool = False
    """Whether the files hold an embedding, copied from the target if the head has none."""
    one_layer_in: tuple[str, ...] = ()
    """The readers that refuse heads with several layers."""

    @property
    def read_by(self) -> str:
        """The projects that use the layout, as a phrase within a sentence."""
        *others, last = self.readers or ("this project",)
        return f"that of {', '.join(others)} and {last}" if others else f"that of {last}"

    def servers(self, head: DraftHead) -> tuple[str, ...]:
        """Return the tags of other servers that load a head in this layout unchanged."""
        refusing = self.one_layer_in if head.cache_layers > 1 else ()
        return tuple(name.lower() for name in self.readers if name in SERVERS and name not in refusing)


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

    @property
    def one_head(self) -> str:
        """The name of a head with its article, within a sentence."""
        return f"{'an' if self.title[0] in 'EM' else 'a'} {self.title} head"


KINDS: dict[str, HeadKind] = {}
"""The kinds by name. If several layouts match a folder, the first one is used."""


def of_class(*classes: str) -> Holds:
    """Return a check for heads of these classes. speculators writes some of these names too, with other fields."""

    def holds(config: Config, tensors: Tensors) -> bool:
        named = config.get("architectures")
        known = isinstance(named, list) and any(name in named for name in classes)
        return known and config.get("speculators_model_type") is None

    return holds


def of_speculators(kind: str) -> Holds:
    """Return a check for speculators' heads of this type."""
    return lambda config, _: config.get("speculators_model_type") == kind


def kind_of(head: DraftHead) -> HeadKind:
    """Return the kind of a head. Raises ConfigError if it is unknown."""
    for kind in KINDS.values():
        if isinstance(head, kind.head_class):
            return kind
    raise ConfigError(f"a {type(head).__name__} is of no known kind; the kinds are {', '.join(KINDS)}")


def check_expressible(config: Any, layout: str, instead: str, **wanted: Any) -> None:
    """Raise ConfigError, with what to do instead, unless the fields in `wanted` have the values a layout implies."""
    for name, value in wanted.items():
        if (own := getattr(config, name)) != value:
            raise ConfigError(f"{layout} layout cannot express {name}={own}; {instead}")
