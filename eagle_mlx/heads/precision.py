"""The precision of a head: the target's dtype, and quantization of large matrices."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import mlx.core as mx
import mlx.nn as nn

from eagle_mlx.errors import ConfigError
from eagle_mlx.formats.fields import Quantization
from eagle_mlx.formats.tensors import in_file_type, weights_of
from eagle_mlx.heads.base import DraftHead
from eagle_mlx.hooks import without_hooks
from eagle_mlx.target import Target

BITS = (4, 8)  # for quantization on loading; 16 means none
GROUP_SIZES = (64, 32)  # in the order in which they are tried; mlx-lm uses 64
_ROUTERS = ("mlp.gate", "shared_expert_gate", "confidence_head.proj")
"""Suffixes of layers that route to experts or predict one number."""


def in_dtype(head: DraftHead, dtype: mx.Dtype) -> DraftHead:
    """Return the head with floating-point weights in `dtype`: the same object if nothing changes, else a copy.

    MLX computes float16 with bfloat16 in float32, so a head in another dtype than the target's would run in float32.
    The original is not changed, since it may be trained or saved. The copy shares its integers.
    """
    weights = weights_of(head)
    cast = in_file_type(weights, dtype)
    if all(cast[name] is weights[name] for name in weights):
        return head
    copied: DraftHead = without_hooks(head)
    copied.load_weights(list(cast.items()))
    mx.eval(copied.parameters())
    return copied


def check_bits(bits: int | None) -> None:
    """Raise ConfigError if a head cannot be quantized to this number of bits."""
    if bits not in (None, 16, *BITS):
        raise ConfigError(f"a head can have {', '.join(map(str, BITS))} or 16 bits (16: not quantized), not {bits!r}")


def quantize_for(head: DraftHead, target: Target | None, bits: int | None = None) -> None:
    """Quantize a head in place if asked, or by default to the bits of most of the target.

    `bits` is 4, 8, or 16 for none. Heads that are already quantized stay as they are, as do, by default, heads without
    a suitable layer. Raises ConfigError for other `bits`, or if `bits` is given and no layer is suitable.
    """
    check_bits(bits)
    wanted = bits or (target.bits if target is not None else None)
    if wanted not in BITS or quantization_of(head) is not None:
        return
    size = next((size for size in GROUP_SIZES if head.hidden_size % size == 0), GROUP_SIZES[-1])
    if any(_may_quantize(path, part, size) for path, part in head.named_modules()):
        quantize(head, wanted, size)
        mx.eval(head.parameters())
    elif bits is not None:
        raise ConfigError(f"this head cannot be quantized: the input width of no layer is a multiple of {size}")


def quantization_of(head: DraftHead) -> Quantization | None:
    quantization: Quantization | None = head.config.quantization
    return quantization


def quantize(head: Any, bits: int, group_size: int) -> None:
    """Quantize a head's matrices in place, lazily, except expert routers and those that do not fit the groups."""
    nn.quantize(head, group_size, bits, class_predicate=lambda path, part: _may_quantize(path, part, group_size))
    head.config = replace(head.config, quantization={"group_size": group_size, "bits": bits})


def _may_quantize(path: str, part: nn.Module, group_size: int) -> bool:
    is_linear = hasattr(part, "to_quantized") and not path.endswith(_ROUTERS)
    return is_linear and bool(part.weight.shape[-1] % group_size == 0)


def described(head: DraftHead) -> str:
    if (quantization := quantization_of(head)) is not None:
        return f"{quantization['bits']}-bit weights in groups of {quantization['group_size']}"
    weights = weights_of(head).values()
    types = sorted({str(x.dtype).rpartition(".")[2] for x in weights if mx.issubdtype(x.dtype, mx.floating)})
    return f"weights in {', '.join(types)}"
