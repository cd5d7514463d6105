"""The numbers that a head computes in: its target's type, and fewer bits for its large matrices."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from dataclasses import replace
from typing import Any, cast

import mlx.core as mx
import mlx.nn as nn
from mlx.utils import tree_flatten, tree_map_with_path

from eagle_mlx.errors import ConfigError
from eagle_mlx.formats.fields import Quantization
from eagle_mlx.formats.tensors import EXACT
from eagle_mlx.heads.base import DraftHead
from eagle_mlx.target import Target

BITS = (4, 8)
"""What a head is quantised to where it is loaded; 16 leaves it as it is."""
GROUP_SIZES = (64, 32)
"""In the order in which they are tried; mlx-lm quantises in groups of 64."""
_ROUTERS = ("mlp.gate", "shared_expert_gate")
"""Ends of names of layers that choose experts."""


def in_dtype(head: DraftHead, dtype: mx.Dtype) -> DraftHead:
    """A head whose weights are of one floating type: the same head where they are, else a copy with weights cast.

    MLX computes float16 with bfloat16 in float32, so a head of another type than its target's would run in float32.
    The head itself stays as it is, since it may be trained on, or saved. Its integers are shared by the copy.
    """
    if not isinstance(head, nn.Module) or all(_cast(name, x, dtype) is x for name, x in _weights_of(head)):
        return head
    copied: Any = _copied(head)
    copied.update(tree_map_with_path(lambda name, x: _cast(name, x, dtype), head.parameters()))
    mx.eval(copied.parameters())
    return cast(DraftHead, copied)


def _cast(name: str, weight: mx.array, dtype: mx.Dtype) -> mx.array:
    keeps = weight.dtype == dtype or not mx.issubdtype(weight.dtype, mx.floating) or name.endswith(EXACT)
    return weight if keeps else weight.astype(dtype)


def _weights_of(head: nn.Module) -> list[tuple[str, mx.array]]:
    return cast("list[tuple[str, mx.array]]", tree_flatten(head.parameters()))


def _copied(node: Any) -> Any:
    """Modules of their own that hold the same arrays, so that to change them leaves the others alone."""
    if isinstance(node, list | tuple):
        return type(node)(map(_copied, node))
    if not isinstance(node, dict):
        return node
    made = copy.copy(node)
    for name, value in node.items():
        made[name] = _copied(value)
    return made


def check_bits(bits: int | None) -> None:
    """Raise ConfigError for a number of bits to which no head is quantised."""
    if bits not in (None, 16, *BITS):
        raise ConfigError(f"a head is quantised to {' or '.join(map(str, BITS))} bits, or not, with 16; got {bits!r}")


def quantize_for(head: DraftHead, target: Target | None, bits: int | None = None) -> None:
    """Quantise a head in place where that is asked for; by default where most of the target is, in as few bits.

    `bits` is 4, 8, or 16 for none. A head that is quantised already stays as it is, and so does one of which no layer
    fits by default. Raises ConfigError for other `bits`, and for a head in which none of its layers fits.
    """
    check_bits(bits)
    wanted = bits or (target.bits if target is not None else None)
    if wanted not in BITS or not isinstance(head, nn.Module) or quantization_of(head) is not None:
        return
    size = next((size for size in GROUP_SIZES if head.hidden_size % size == 0), GROUP_SIZES[-1])
    if any(_may_quantize(path, part, size) for path, part in head.named_modules()):
        quantize(head, wanted, size)
        mx.eval(head.parameters())
    elif bits is not None:
        raise ConfigError(f"this head cannot be quantised: none of its layers reads a multiple of {size} numbers")


def quantization_of(head: DraftHead) -> Quantization | None:
    """How a head is quantised, None where it is not."""
    found: Quantization | None = getattr(getattr(head, "config", None), "quantization", None)
    return found


def quantize(head: Any, bits: int, group_size: int) -> None:
    """Quantise a head's matrices in place; those that choose experts, or do not fit the groups, stay as they are.

    Nothing is computed yet.
    """
    nn.quantize(head, group_size, bits, class_predicate=lambda path, part: _may_quantize(path, part, group_size))
    head.config = replace(head.config, quantization={"group_size": group_size, "bits": bits})


def make_quantized(head: nn.Module, how: Quantization | None, tensors: Mapping[str, mx.array]) -> None:
    """Give a new head a quantised layer wherever the tensors that it is to be filled with have scales."""
    if how is not None:
        nn.quantize(head, how["group_size"], how["bits"], class_predicate=lambda path, _: f"{path}.scales" in tensors)


def _may_quantize(path: str, part: nn.Module, group_size: int) -> bool:
    return (
        hasattr(part, "to_quantized") and not path.endswith(_ROUTERS) and bool(part.weight.shape[-1] % group_size == 0)
    )


def described(head: DraftHead) -> str:
    """The numbers that a head's weights are, in a few words."""
    how = quantization_of(head)
    if how is not None:
        return f"{how['bits']}-bit weights in groups of {how['group_size']}"
    weights = _weights_of(head) if isinstance(head, nn.Module) else []
    types = sorted({str(x.dtype).rpartition(".")[2] for _, x in weights if mx.issubdtype(x.dtype, mx.floating)})
    return f"weights in {', '.join(types)}" if types else "weights of its own kind"
