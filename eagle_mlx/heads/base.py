"""The base class of draft heads."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from typing import Any, Generic, Protocol, TypeVar

import mlx.core as mx
import mlx.nn as nn
from mlx_lm.models.base import create_causal_mask

from eagle_mlx.errors import HeadError
from eagle_mlx.formats.fields import Quantization
from eagle_mlx.target import Target

Mask = mx.array | str | None


class HeadConfig(Protocol):
    """Fields of every head's config."""

    @property
    def hidden_size(self) -> int: ...
    @property
    def vocab_size(self) -> int: ...
    @property
    def own_embedding(self) -> bool: ...
    @property
    def quantization(self) -> Quantization | None: ...


Config = TypeVar("Config", bound=HeadConfig)


class HeadBase(nn.Module, Generic[Config]):
    """A draft head. At each position, it takes the next token and a feature, and returns the next feature and logits.

    The first feature comes from the target's hidden states, later ones from the head itself. By default, a head is as
    wide as its target, reads its last layer and drafts its whole vocabulary.
    """

    _config: Config
    _target: Target | None = None
    embed_tokens: nn.Embedding
    """Only if the head has its own embedding."""

    @property
    def config(self) -> Config:
        return self._config

    @config.setter
    def config(self, config: Config) -> None:
        """Change the behavior of the head without changing its weights, such as which output it feeds back."""
        self._config = config

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
        return self._config.hidden_size

    @property
    def vocab_size(self) -> int:
        """Size of the target's vocabulary."""
        return self._config.vocab_size

    @property
    def target_hidden_size(self) -> int:
        return self.hidden_size

    @property
    def embedding_size(self) -> int | None:
        """Required width of the target's embedding; None for a head with its own embedding."""
        return None if self._config.own_embedding else self.hidden_size

    @property
    def aux_layers(self) -> tuple[int, ...]:
        """Target layers, counted from 0, whose outputs `features` reads. Available once a target is attached."""
        return (self.target.num_layers - 1,)

    @property
    def token_ids(self) -> mx.array | None:
        """[draft vocabulary] int32, the target id of each draft id; None if they are the same."""
        return None

    @property
    @abstractmethod
    def cache_layers(self) -> int:
        """Number of layers with a KV cache."""

    def embed(self, tokens: mx.array) -> mx.array:
        """Token ids [...] -> embeddings [..., E]."""
        out: mx.array = self.embed_tokens(tokens) if self._config.own_embedding else self.target.embed(tokens)
        return out

    @abstractmethod
    def features(self, aux: Sequence[mx.array]) -> mx.array:
        """Target's aux hidden states, each [B, L, Ht] -> features [B, L, H]."""

    @abstractmethod
    def __call__(self, embeddings: mx.array, g: mx.array, cache: Any | None = None, mask: Mask = None) -> mx.array:
        """Draft step: embeddings [B, L, E] of tokens t+1, features [B, L, H] of positions t -> h [B, L, H].

        h is the next step's feature and the input of `logits`. `cache` holds the layers' caches in order, or a single
        cache if there is one layer. `mask` is for calls without a cache: "causal", or None for one position.
        """

    @abstractmethod
    def logits(self, h: mx.array) -> mx.array:
        """h [..., H] -> logits over the draft vocabulary."""


DraftHead = HeadBase[Any]


def caches_of(cache: Any | None, layers: int) -> list[Any]:
    """Return a list of caches, one for each layer."""
    if cache is None:
        return [None] * layers
    return list(cache) if isinstance(cache, Sequence) else [cache]


def layer_mask(cache: Any | None, length: int, mask: Mask, window: int | None = None, as_array: bool = False) -> Mask:
    """Return the mask of a layer for `length` new positions, with an attention window if given.

    A given mask is used unless the window or the layer needs another.
    """
    if cache is not None and hasattr(cache, "make_mask") and (mask is None or window is not None or as_array):
        made: Mask = cache.make_mask(length, return_array=as_array, window_size=window)
        return made
    if mask == "causal" and (as_array or (window is not None and length > window)):
        causal: mx.array = create_causal_mask(length, window_size=window)
        return causal
    return mask
