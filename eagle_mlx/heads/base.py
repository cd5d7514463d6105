"""What every head has in common: the protocol between a head and whoever drafts with it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Generic, Protocol, TypeVar, runtime_checkable

import mlx.core as mx
import mlx.nn as nn
from mlx_lm.models.base import create_causal_mask

from eagle_mlx.errors import HeadError
from eagle_mlx.formats.fields import Quantization
from eagle_mlx.target import Target

Mask = mx.array | str | None


@runtime_checkable
class DraftHead(Protocol):
    """A head reads, at each position, the token after it and a feature; it gives the next feature and logits.

    The first feature comes from the target's hidden states, every later one is the head's own output.
    """

    @property
    def hidden_size(self) -> int:
        """Width of a feature."""
        ...

    @property
    def vocab_size(self) -> int:
        """Entries of the target's vocabulary."""
        ...

    @property
    def target_hidden_size(self) -> int: ...

    @property
    def embedding_size(self) -> int | None:
        """Width that the target's embedding must have; None for a head with an embedding of its own."""
        ...

    @property
    def aux_layers(self) -> tuple[int, ...]:
        """Target layers, counted from 0, whose outputs `features` reads; known once a target is attached."""
        ...

    @property
    def token_ids(self) -> mx.array | None:
        """[draft vocabulary] int32, the target's id of each draft id; None where they are the same."""
        ...

    @property
    def cache_layers(self) -> int:
        """Layers that keep keys and values."""
        ...

    def attach(self, target: Target) -> None:
        """Use this target's embedding, final norm and output projection where the head has none of its own."""
        ...

    def embed(self, tokens: mx.array) -> mx.array:
        """Token ids [B, L] -> embeddings [B, L, E]."""
        ...

    def features(self, aux: Sequence[mx.array]) -> mx.array:
        """The target's aux hidden states, each [B, L, Ht] -> features [B, L, H]."""
        ...

    def __call__(self, embeddings: mx.array, g: mx.array, cache: Any | None = None, mask: Mask = None) -> mx.array:
        """One draft step: embeddings [B, L, E] of tokens t+1, features [B, L, H] of positions t -> h [B, L, H].

        h is the next step's feature and what `logits` reads. `cache` holds the layers' caches in order; a single one
        will do for a head of one layer. `mask` serves a call without a cache: "causal", or None for one position.
        """
        ...

    def logits(self, h: mx.array) -> mx.array:
        """h [..., H] -> logits over the draft vocabulary."""
        ...


class HeadConfig(Protocol):
    """What every head's config says."""

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
    """What a head says of itself by its config and its target.

    Unless it says otherwise, it is as wide as its target, reads its last layer and drafts its whole vocabulary.
    """

    _config: Config
    _target: Target | None = None
    embed_tokens: nn.Embedding
    """Where the head has an embedding of its own."""

    @property
    def config(self) -> Config:
        return self._config

    @config.setter
    def config(self, config: Config) -> None:
        """Change what the head does with the weights that it has, such as which output it feeds back."""
        self._config = config

    def attach(self, target: Target) -> None:
        self._target = target

    @property
    def target(self) -> Target:
        """Raises HeadError where none is attached."""
        if self._target is None:
            raise HeadError("this head needs its target; call head.attach(target), or build an Engine with it")
        return self._target

    @property
    def hidden_size(self) -> int:
        return self._config.hidden_size

    @property
    def vocab_size(self) -> int:
        return self._config.vocab_size

    @property
    def target_hidden_size(self) -> int:
        return self.hidden_size

    @property
    def embedding_size(self) -> int | None:
        return None if self._config.own_embedding else self.hidden_size

    @property
    def aux_layers(self) -> tuple[int, ...]:
        return (self.target.num_layers - 1,)

    @property
    def token_ids(self) -> mx.array | None:
        return None

    def embed(self, tokens: mx.array) -> mx.array:
        """Token ids [...] -> embeddings [..., H]."""
        out: mx.array = self.embed_tokens(tokens) if self._config.own_embedding else self.target.embed(tokens)
        return out


def caches_of(cache: Any | None, layers: int) -> list[Any]:
    """The caches of a head's layers, from whatever its caller passed."""
    if cache is None:
        return [None] * layers
    return list(cache) if isinstance(cache, Sequence) else [cache]


def layer_mask(cache: Any | None, length: int, mask: Mask, window: int | None = None, as_array: bool = False) -> Mask:
    """The mask of one layer over `length` new positions, at most `window` of them and of those before them.

    A given mask is taken as it is where neither the window nor the layer asks for another.
    """
    if cache is not None and hasattr(cache, "make_mask") and (mask is None or window is not None or as_array):
        made: Mask = cache.make_mask(length, return_array=as_array, window_size=window)
        return made
    if mask == "causal" and (as_array or (window is not None and length > window)):
        causal: mx.array = create_causal_mask(length, window_size=window)
        return causal
    return mask
