"""The base classes of draft heads, of their kinds and of their file layouts; `build` makes a head of its tensors."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Generic, Literal, TypeVar

import mlx.core as mx
import mlx.nn as nn
import numpy as np
from mlx_lm.models.base import create_causal_mask

from eagle_mlx.errors import CheckpointError, ConfigError, HeadError
from eagle_mlx.formats.fields import reading
from eagle_mlx.formats.tensors import HeadFolder, SaveOptions, Tensors, fill
from eagle_mlx.target import Target

Mask = mx.array | str | None
Config = TypeVar("Config", bound=Any)
"""A dataclass with at least `hidden_size`, `vocab_size`, `own_embedding` and `quantization`."""
DRAFT_WINDOW = "draft_window"
"""Key of `HeadBase.draft_window` under `eagle_mlx` in a config."""
_SPECULATORS_VERSION = "0.9.0"  # the release of speculators whose fields are written
SERVERS = ("vLLM", "SGLang")  # the readers of layouts that are servers, and that model cards name


class HeadBase(nn.Module, Generic[Config]):
    """A draft head. At each position, it takes the next token and a feature, and returns the next feature and logits.

    The first feature comes from the target's hidden states, later ones from the head itself. By default, a head is as
    wide as its target, drafts all tokens and reads the last layer; `draft_vocab_size` and `aux_layers` change that.
    """

    config: Config  # replacing it changes what the head does, such as which output it feeds back, but not its weights
    _target: Target | None = None
    embed_tokens: nn.Embedding  # only if the head has its own embedding
    draft_window: int | None = None  # positions of the text that its drafts saw in training, if not all

    def __init__(self, config: Config, token_ids: mx.array | None = None):
        """`token_ids` [draft_vocab_size] int32: the target id of each draft id; None if the vocabularies are equal."""
        super().__init__()
        if (token_ids is None) != (getattr(config, "draft_vocab_size", config.vocab_size) == config.vocab_size):
            raise ConfigError("a head needs token_ids exactly when its draft vocabulary is smaller than the target's")
        self.config = config
        self._token_ids = token_ids
        if config.own_embedding:
            self.embed_tokens = nn.Embedding(config.vocab_size, config.hidden_size)

    def attach(self, target: Target) -> None:
        """Use this target's embedding, final norm and output projection unless the head has its own."""
        self._target = target

    @property
    def target(self) -> Target:
        """The attached target. Raises HeadError if there is none."""
        if self._target is None:
            raise HeadError("this head needs its target; call head.attach(target), or build an Engine with it")
        return self._target

    @property
    def hidden_size(self) -> int:
        """Width of a feature."""
        return int(self.config.hidden_size)

    @property
    def vocab_size(self) -> int:
        """Size of the target's vocabulary."""
        return int(self.config.vocab_size)

    @property
    def target_hidden_size(self) -> int:
        return self.hidden_size

    @property
    def named_layers(self) -> tuple[int, ...]:
        """Target layers that the config names, counted from 0; empty for a head that reads the last layer."""
        return getattr(self.config, "aux_layers", ())

    @property
    def aux_layers(self) -> tuple[int, ...]:
        """Target layers, counted from 0, whose outputs `features` reads. Available once a target is attached."""
        return self.named_layers or (self.target.num_layers - 1,)

    @property
    def token_ids(self) -> mx.array | None:
        """[draft vocabulary] int32, the target id of each draft id; None if they are the same."""
        return self._token_ids

    def use_vocabulary(self, token_ids: mx.array | None) -> None:
        """Draft other tokens of the target, as many as before."""
        self._token_ids = token_ids

    @property
    def reads_images(self) -> bool:
        """Whether it reads the target's embeddings of images, not of their placeholders, as EAGLE-3 heads do in vLLM
        and SpecForge. No config has a field for it."""
        return False

    @property
    def cache_layers(self) -> int:
        """Number of layers with a KV cache."""
        return getattr(self.config, "num_hidden_layers", 1)

    def embed(self, tokens: mx.array) -> mx.array:
        """Token ids [...] -> embeddings [..., E]."""
        return self.embed_tokens(tokens) if self.config.own_embedding else self.target.embed(tokens)

    @abstractmethod
    def features(self, aux: Sequence[mx.array]) -> mx.array:
        """Target's aux hidden states, each [B, L, Ht] -> features [B, L, H]."""

    @abstractmethod
    def __call__(self, embeddings: mx.array, g: mx.array, cache: Any | None = None, mask: Mask = None) -> mx.array:
        """Draft step: embeddings [B, L, E] of tokens t+1, features [B, L, H] of positions t -> h [B, L, H].

        h is the next step's feature and the input of `logits`. `cache` holds the layers' caches in order. `mask` is for
        calls without a cache: "causal", or None for one position.
        """

    @abstractmethod
    def logits(self, h: mx.array) -> mx.array:
        """h [..., H] -> logits over the draft vocabulary."""


DraftHead = HeadBase[Any]
H = TypeVar("H", bound=DraftHead)


@dataclass(frozen=True)
class Format:
    """A file layout for a kind of head."""

    name: str  # name for `eagle-convert --to`
    about: str  # how the head is written, for a model card
    readers: tuple[str, ...]  # the other projects that read the layout
    holds: Callable[[Mapping[str, Any], Tensors], bool]
    """Checks whether config.json and tensors of a folder are in this layout."""
    load: Callable[[HeadFolder], Any]
    """Makes a head of its files. Raises CheckpointError if a tensor is missing, unknown or of the wrong shape, or if a
    field or its value is not supported."""
    save: Callable[..., None]
    """Writes a head to a folder, which appears only once complete: `save(head, folder, **SaveOptions)`. Quantized
    weights stay quantized. Raises ConfigError if the layout cannot express the head, OutputError if the folder cannot
    be written."""
    has_embedding: bool = False  # whether the files hold an embedding, copied from the target if the head has none
    refused_by: Callable[[Any], tuple[str, ...]] = lambda head: ()
    """Returns the readers that do not load a head, because they lack a part of it."""

    @property
    def read_by(self) -> str:
        """The projects that use the layout, as a phrase within a sentence."""
        *others, last = self.readers or ("this project",)
        return f"that of {', '.join(others)} and {last}" if others else f"that of {last}"

    def servers(self, head: DraftHead) -> tuple[str, ...]:
        """Return the tags of other servers that load a head in this layout unchanged."""
        refusing = self.refused_by(head)
        return tuple(name.lower() for name in self.readers if name in SERVERS and name not in refusing)


@dataclass(frozen=True)
class HeadKind:
    """A kind of head. Its folder in `eagle_mlx/heads` contains everything about it."""

    name: str  # name for `eagle-train --head`
    title: str
    head_class: type[DraftHead]
    formats: tuple[Format, ...]
    """File layouts. Training writes the first one."""
    mode: Literal["eagle", "mtp"] = "eagle"  # name of this way to draft in `--spec-decode`
    unusual: Callable[[Any], list[str]] = lambda head: []
    """Returns the fields of a head's config that some loaders may not know."""

    @property
    def one_head(self) -> str:
        """The name of a head with its article, within a sentence."""
        return f"{'an' if self.title[0] in 'EM' else 'a'} {self.title} head"


def build(
    folder: Path,
    head_class: type[H],
    config: Any,
    tensors: Tensors,
    in_file: Callable[[str], str] = lambda name: name,
) -> H:
    """Return the head for a config and its tensors, with layers quantized that have scales.

    `in_file` maps a parameter's name to the one in the file. Raises CheckpointError if config and tensors do not fit.
    """
    size = config.vocab_size
    token_ids = take_draft_vocabulary(folder, tensors, size, getattr(config, "draft_vocab_size", size))
    with reading(folder / "config.json"):
        head: H = head_class(config, token_ids)
        if config.quantization is not None:
            nn.quantize(head, **config.quantization, class_predicate=lambda path, _: f"{path}.scales" in tensors)
    fill(folder, head, tensors, in_file)
    return head


def take_draft_vocabulary(where: Path, tensors: Tensors, vocab_size: int, draft_vocab_size: int) -> mx.array | None:
    """Remove d2t and t2d from the tensors; return token ids, int32 [Vd], or None if the vocabularies are equal.

    Raises CheckpointError if the maps are missing, damaged or inconsistent.
    """
    d2t, t2d = tensors.pop("d2t", None), tensors.pop("t2d", None)
    for name, value, size in (("d2t", d2t, draft_vocab_size), ("t2d", t2d, vocab_size)):
        if value is not None and value.shape != (size,):
            raise CheckpointError(f"{name} in {where} has shape {value.shape}, expected ({size},)")
        if value is not None and not (value.dtype == mx.bool_ or mx.issubdtype(value.dtype, mx.integer)):
            raise CheckpointError(f"{name} in {where} has numbers of type {value.dtype}, expected integers")
    if d2t is None and draft_vocab_size != vocab_size:
        raise CheckpointError(
            f"{where} lacks d2t, but its draft vocabulary ({draft_vocab_size}) is smaller than the "
            f"target's ({vocab_size})"
        )
    if d2t is None and t2d is None:
        return None
    kept = np.arange(draft_vocab_size) + (0 if d2t is None else np.array(d2t, np.int64))
    if kept.min() < 0 or kept.max() >= vocab_size or np.any(np.diff(kept) <= 0):
        raise CheckpointError(f"d2t in {where} does not give ascending ids of a vocabulary of {vocab_size}")
    if t2d is not None and not np.array_equal(np.flatnonzero(np.array(t2d)), kept):
        raise CheckpointError(f"t2d and d2t in {where} name different draft vocabularies; one of them is damaged")
    return None if d2t is None or draft_vocab_size == vocab_size else mx.array(kept, mx.int32)


def vocabulary_tensors(head: DraftHead) -> Tensors:
    """Return d2t, int64 [Vd], and t2d, bool [V]; empty if the head drafts the whole vocabulary."""
    if head.token_ids is None:
        return {}
    kept = np.array(head.token_ids, np.int64)
    t2d = np.isin(np.arange(head.vocab_size), kept)
    return {"d2t": mx.array(kept - np.arange(len(kept))), "t2d": mx.array(t2d)}


def layer_mask(cache: Any | None, length: int, mask: Mask, window: int | None = None, as_array: bool = False) -> Mask:
    """Return the mask of a layer for `length` new positions: the given one unless window or layer need another."""
    if cache is not None and (mask is None or window is not None or as_array):
        out: Mask = cache.make_mask(length, return_array=as_array, window_size=window)
        return out
    if mask == "causal" and (as_array or (window is not None and length > window)):
        causal: mx.array = create_causal_mask(length, window_size=window)
        return causal
    return mask


def of_speculators(kind: str) -> Callable[[Mapping[str, Any], object], bool]:
    """Return a check for speculators' heads of this type."""
    return lambda config, _: config.get("speculators_model_type") == kind


def speculators_json(kind: str, options: SaveOptions) -> dict[str, Any]:
    """Return the part of a speculators config about its kind, target and draft depth."""
    tokens, architectures = options.get("depth", 3), list(options.get("target_architectures", ()))
    method = {"proposal_type": "greedy", "speculative_tokens": tokens, "accept_tolerance": 0.0, "verifier_accept_k": 1}
    return {
        "speculators_model_type": kind,
        "speculators_version": _SPECULATORS_VERSION,
        "tie_word_embeddings": False,
        "speculators_config": {
            "algorithm": kind,
            "default_proposal_method": "greedy",
            "proposal_methods": [method],
            "verifier": {"name_or_path": options.get("base_model"), "architectures": architectures},
        },
    }


def check_expressible(config: Any, layout: str, instead: str, **wanted: Any) -> None:
    """Raise ConfigError, with what to do instead, unless the fields in `wanted` have the values a layout implies."""
    for name, value in wanted.items():
        if (own := getattr(config, name)) != value:
            raise ConfigError(f"{layout} layout cannot express {name}={own}; {instead}")
