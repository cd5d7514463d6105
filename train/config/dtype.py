"""The type of a run's numbers, in its passes and in the files of its head."""

from __future__ import annotations

import mlx.core as mx

from .groups import TrainConfig

_NAMED = {"float32": mx.float32, "bfloat16": mx.bfloat16}


def pass_type(config: TrainConfig, device: mx.Device | None = None) -> mx.Dtype:
    """The type of the forward and backward pass on a device, the default one unless another is given.

    What is left open is bfloat16 on a GPU, as in the field's trainers: it halves what is kept for the gradient, and the
    result is the same (karpathy/nanochat#793, on MPS: 26 % less memory, 0.04 % of the loss). MLX's float32 products on
    an M5 keep 11 bits anyway (ml-explore/mlx#4411). On a CPU only float32 goes through BLAS, which is ten times faster.
    """
    asked = config.optimization.dtype
    if asked != "auto":
        return _NAMED[asked]
    on_gpu = (device or mx.default_device()).type == mx.DeviceType.gpu
    return mx.bfloat16 if on_gpu else mx.float32


def file_type(config: TrainConfig) -> mx.Dtype:
    """The type in which the head is written: as asked, else bfloat16, which is what the field publishes."""
    return _NAMED.get(config.optimization.dtype, mx.bfloat16)
