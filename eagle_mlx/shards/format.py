"""What a shard holds: samples side by side in one safetensors file, states in 16 or 8 bits."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import safetensors.numpy
from numpy.typing import NDArray
from safetensors import safe_open

from eagle_mlx.errors import ConfigError

BITS = (16, 8)
SUFFIX = ".safetensors"


@dataclass(frozen=True)
class Sample:
    """One conversation with the target's hidden states. T tokens, n aux layers, hidden size H."""

    tokens: NDArray[np.int32]
    """[T]"""
    loss_mask: NDArray[np.uint8]
    """[T], 1 on the tokens to learn."""
    aux: NDArray[np.float16]
    """[T, n * H]: the outputs of the aux layers, side by side in the order of `ShardMeta.aux_layers`."""
    last: NDArray[np.float16]
    """[T, H]: the last layer's output, before the final norm."""


@dataclass(frozen=True)
class ShardMeta:
    """What the hidden states are of. An aux layer id k means the output of layer k, counted from 0."""

    target: str
    hidden_size: int
    vocab_size: int
    aux_layers: tuple[int, ...]
    bits: int = 16
    """Of a value on the disk: 16 is float16, 8 is what `quantize` makes of it. Readers give float16 either way."""
    adapter: str = ""
    """Digest of the LoRA adapters that the target had (`eagle_mlx.target.Adapter`); empty for none."""

    def __post_init__(self) -> None:
        if self.bits not in BITS:
            raise ConfigError(f"hidden states are kept in 16 or in 8 bits, not in {self.bits}")


@dataclass(frozen=True)
class ShardFile:
    """One line of the manifest."""

    name: str
    sha256: str
    size: int
    """Bytes."""
    samples: int
    tokens: int
    loss_tokens: int
    """Tokens with loss mask 1."""


def bytes_per_token(meta: ShardMeta) -> int:
    """Bytes on disk for one token, headers aside: its id, its mask, and the states of the aux layers and the last."""
    layer = 2 * meta.hidden_size if meta.bits == 16 else meta.hidden_size + 2 * blocks(meta.hidden_size)
    return 4 + 1 + layer * (len(meta.aux_layers) + 1)


def shard_name(index: int) -> str:
    return f"shard-{index:05d}{SUFFIX}"


def check_sample(sample: Sample, meta: ShardMeta) -> None:
    """Raises ValueError for arrays that do not fit each other or the layers."""
    t, h, n = len(sample.tokens), meta.hidden_size, len(meta.aux_layers)
    found = sample.loss_mask.shape, sample.aux.shape, sample.last.shape
    if t == 0 or found != ((t,), (t, n * h), (t, h)):
        raise ValueError(f"a sample of {t} tokens, {n} aux layers and hidden size {h} has arrays of shape {found}")


def encode(samples: Sequence[Sample], meta: ShardMeta) -> bytes:
    """A shard as the bytes of its file; the same samples give the same bytes."""
    tensors: dict[str, NDArray[Any]] = {
        "tokens": np.concatenate([s.tokens for s in samples]).astype(np.int32),
        "loss_mask": np.concatenate([s.loss_mask for s in samples]).astype(np.uint8),
        "lengths": np.array([len(s.tokens) for s in samples], np.int32),
    }
    for name, states in (("aux", [s.aux for s in samples]), ("last", [s.last for s in samples])):
        if meta.bits == 16:
            tensors[name] = np.concatenate(states).astype(np.float16)
        else:
            pairs = [quantize(one, meta.hidden_size) for one in states]
            tensors[name] = np.concatenate([integers for integers, _ in pairs])
            tensors[f"{name}_scales"] = np.concatenate([scales for _, scales in pairs])
    return safetensors.numpy.save(tensors)


def decode(path: str, rows: slice, meta: ShardMeta) -> Sample:
    """The sample that takes these rows of a shard."""
    with safe_open(path, "numpy") as file:

        def states(name: str) -> NDArray[np.float16]:
            values: NDArray[Any] = file.get_slice(name)[rows]
            if meta.bits == 16:
                return values
            return dequantize(values, file.get_slice(f"{name}_scales")[rows], meta.hidden_size)

        tokens, loss_mask = file.get_slice("tokens")[rows], file.get_slice("loss_mask")[rows]
        return Sample(tokens, loss_mask, states("aux"), states("last"))


BLOCK = 64
"""Values that share a scale: the size of a group in `mx.quantize`, if nothing else is asked for."""

_LIMIT = float(np.finfo(np.float16).max)


def blocks(hidden_size: int) -> int:
    """Scales for one layer of one token."""
    return -(-hidden_size // BLOCK)


def quantize(states: NDArray[np.floating[Any]], hidden_size: int) -> tuple[NDArray[np.int8], NDArray[np.float16]]:
    """States [T, n * H], finite and within float16's range -> integers [T, n * H] and scales [T, n * blocks(H)]."""
    parts = _split(states.astype(np.float32), hidden_size)
    exact = np.abs(parts).max(-1) / np.float32(127)
    scales = exact.astype(np.float16)
    scales = np.where(scales < exact, np.nextafter(scales, np.float16(np.inf)), scales)
    divisors = np.where(scales == 0, np.float16(1), scales).astype(np.float32)
    integers = np.rint(parts / divisors[..., None]).astype(np.int8)
    return _join(integers, states.shape, hidden_size), scales.reshape(len(scales), scales.shape[1] * scales.shape[2])


def dequantize(integers: NDArray[np.int8], scales: NDArray[np.float16], hidden_size: int) -> NDArray[np.float16]:
    """The way back: float16 [T, n * H]."""
    parts = _split(integers.astype(np.float32), hidden_size)
    parts *= scales.astype(np.float32).reshape(parts.shape[:-1])[..., None]
    np.clip(parts, -_LIMIT, _LIMIT, out=parts)
    return _join(parts.astype(np.float16), integers.shape, hidden_size)


def _split(states: NDArray[np.float32], hidden_size: int) -> NDArray[np.float32]:
    """[T, n * H] -> [T, n, blocks, BLOCK], the last block of a layer filled with zeros."""
    rows, layers, count = len(states), states.shape[1] // hidden_size, blocks(hidden_size)
    parts = states.reshape(rows, layers, hidden_size)
    if hidden_size % BLOCK:
        parts = np.pad(parts, ((0, 0), (0, 0), (0, count * BLOCK - hidden_size)))
    return parts.reshape(rows, layers, count, BLOCK)


def _join(parts: NDArray[Any], shape: tuple[int, ...], hidden_size: int) -> NDArray[Any]:
    """[T, n, blocks, BLOCK] -> [T, n * H]."""
    rows, layers = parts.shape[:2]
    return parts.reshape(rows, layers, blocks(hidden_size) * BLOCK)[..., :hidden_size].reshape(shape)
