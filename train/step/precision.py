"""Passes in 16 bits, over weights and moments in float32.

Source: Micikevicius et al. 2018, Mixed Precision Training, section 3.1 (a master copy of the weights in float32). Its
section 3.2, scaling the loss, is for float16; bfloat16 has the range of float32. Sums are in float32: those of norms,
of the softmax, of the losses, and of a weight's gradients over draft steps and rows.
"""

from __future__ import annotations

import contextlib
from typing import Any

import mlx.core as mx
import mlx.nn as nn

from eagle_mlx.heads.precision import EXACT

from ..unroll import holding, weights_but


def in_pass_type(head: nn.Module, dtype: mx.Dtype) -> contextlib.AbstractContextManager[None]:
    """The head with its trainable weights in a type within the block; gradients reach those that it has outside."""
    names, weights = weights_but(head)
    cast = [w if name.endswith(EXACT) else _cast(w, dtype) for name, w in zip(names, weights, strict=True)]
    return holding(head, names, cast)


def _cast(weight: mx.array, dtype: mx.Dtype) -> mx.array:
    """A weight in a type. Its gradient may come in either: MLX's own cast takes none but of its result's type."""
    forward: Any = mx.custom_function(lambda given: given.astype(dtype))

    @forward.vjp  # type: ignore[untyped-decorator]
    def backward(_: mx.array, cotangent: mx.array, __: mx.array) -> mx.array:
        return cotangent.astype(weight.dtype)

    made: mx.array = forward(weight)
    return made
