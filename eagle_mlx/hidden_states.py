"""Hidden states of a target in 16 or 8 bits, and training examples with hidden states.

Everywhere, the outputs of the layers that a head reads come first, concatenated, and then the last layer's.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import mlx.core as mx
import numpy as np
from numpy.typing import NDArray

from eagle_mlx.target import Target

Bits = NDArray[np.uint16]
"""The bits of bfloat16 numbers, because NumPy has no such type. Unlike float16, it has float32's range: the residual
stream of Gemma 3 has channels beyond float16's 65,504, which decoding does not clip."""

BLOCK = 64  # values in 8 bits that share a scale: the default group size of `mx.quantize`


@dataclass(frozen=True)
class HiddenStates:
    """Outputs of a target's layers for T tokens: n layers of hidden size H, and the last layer."""

    layers: tuple[int, ...]  # the layers of `features` in order, counted from 0
    features: Bits  # [T, n * H]: the concatenated outputs of the layers that a head reads
    last: Bits  # [T, H]: the last layer's output, before the final norm

    @classmethod
    def split(cls, layers: Sequence[int], whole: Bits) -> HiddenStates:
        """Split [T, (n + 1) * H] into the features and the last layer; the arrays are copies."""
        size = whole.shape[1] // (len(layers) + 1)
        return cls(tuple(layers), whole[:, :-size].copy(), whole[:, -size:].copy())

    @property
    def whole(self) -> Bits:
        """[T, (n + 1) * H]: the features and the last layer, concatenated."""
        return np.concatenate((self.features, self.last), axis=1)

    def __getitem__(self, at: slice) -> HiddenStates:
        return replace(self, features=self.features[at], last=self.last[at])

    def of_layers(self, layers: Sequence[int], last_layer: int) -> HiddenStates:
        """Return the states with other layers as features, each from `self.layers` or the `last_layer`."""
        if tuple(layers) == self.layers:
            return self
        whole, size, held = self.whole, self.last.shape[1], (*self.layers, last_layer)
        starts = [held.index(layer) * size for layer in layers]
        parts = [whole[:, start : start + size] for start in starts]
        return replace(self, layers=tuple(layers), features=np.concatenate([whole[:, :0], *parts], axis=1))


@dataclass(frozen=True)
class Example:
    """A training example: a conversation of T tokens."""

    tokens: NDArray[np.int32]  # [T]
    loss_mask: NDArray[np.uint8]  # [T], 1 on tokens to be learned
    states: HiddenStates | None = None  # None until the target has read the example
    key: int = 0  # a 64-bit hash of its prompt, `data_pipelines.Conversation.prompt_key`; 0 if it is unknown

    @classmethod
    def of(cls, tokens: Sequence[int], loss_mask: Sequence[int], key: int = 0) -> Example:
        return cls(np.array(tokens, np.int32), np.array(loss_mask, np.uint8), key=key)

    def __len__(self) -> int:
        return len(self.tokens)

    def __getitem__(self, at: slice) -> Example:
        return Example(self.tokens[at], self.loss_mask[at], None if self.states is None else self.states[at], self.key)


def read_states(target: Target, tokens: mx.array, layers: Sequence[int]) -> mx.array:
    """Have the target read tokens [B, L], right-padded, without a cache.

    Returns the features and the last layer, concatenated, [B, L, (n + 1) * H] in the target's dtype, lazily.
    """
    return mx.concatenate(list(target.forward(tokens, aux_layers=(*layers, target.num_layers - 1)).aux), axis=-1)


def in_16_bits(states: mx.array) -> mx.array:
    """Return the states as the bits of bfloat16, uint16."""
    return states.astype(mx.bfloat16).view(mx.uint16)


def from_16_bits(bits: Bits) -> mx.array:
    """Return states [...] as bfloat16 on the device."""
    return mx.array(bits).view(mx.bfloat16)


def rounded(states: NDArray[np.float32]) -> Bits:
    """Return finite states as bfloat16, on the host; ties go to even numbers, as on the device."""
    bits = states.view(np.uint32)
    return ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).astype(np.uint16)


def widened(bits: Bits) -> NDArray[np.float32]:
    """Return the numbers as float32, on the host."""
    return (bits.astype(np.uint32) << 16).view(np.float32)


def block_size(hidden_size: int) -> int:
    """Return how many values share a scale: `BLOCK`, or all of a layer's if its size is not a multiple of that."""
    return BLOCK if hidden_size % BLOCK == 0 else hidden_size


def quantize(states: Bits, hidden_size: int) -> tuple[NDArray[np.int8], Bits]:
    """Quantize finite states [T, n * H] to integers [T, n * H] and scales [T, n * H / block_size(H)]."""
    size = block_size(hidden_size)
    parts = widened(states).reshape(len(states), states.shape[1] // size, size)
    exact = np.abs(parts).max(-1) / np.float32(127)
    scales = (exact.view(np.uint32) >> 16).astype(np.uint16)
    scales += widened(scales) < exact  # the next larger number, so that no integer exceeds 127
    divisors = np.where(scales == 0, np.float32(1), widened(scales))
    return np.rint(parts / divisors[..., None]).astype(np.int8).reshape(states.shape), scales


def dequantize(integers: NDArray[np.int8], scales: Bits, hidden_size: int) -> Bits:
    """Return the states [T, n * H]."""
    parts = integers.astype(np.float32).reshape(*scales.shape, block_size(hidden_size))
    parts *= widened(scales)[..., None]
    return rounded(parts).reshape(integers.shape)


def features_of(states: mx.array, hidden_size: int) -> mx.array:
    """Return the features [..., n * H] of concatenated states [..., (n + 1) * H]."""
    return states[..., :-hidden_size]


def last_of(states: mx.array, hidden_size: int) -> mx.array:
    """Return the last layer's output [..., H] of concatenated states [..., (n + 1) * H]."""
    return states[..., -hidden_size:]
