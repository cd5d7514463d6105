"""Per-row positions: each input is rotated as its module would rotate it alone, for any kind of module."""

import mlx.core as mx
import mlx.nn as nn
import numpy as np
import pytest
from mlx_lm.models.rope_utils import initialize_rope

from eagle_mlx.hooks import place_one_by_one

LLAMA3 = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
KINDS = {
    "halves": lambda: nn.RoPE(16),
    "pairs": lambda: nn.RoPE(16, traditional=True),
    "some numbers": lambda: nn.RoPE(8, base=500.0),
    "some pairs": lambda: nn.RoPE(8, traditional=True, scale=0.25),
    "llama3": lambda: initialize_rope(16, 1e4, False, {**LLAMA3, "original_max_position_embeddings": 64}, 512),
    "yarn": lambda: initialize_rope(
        16, 1e4, False, {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64}, 256
    ),
}


class OwnRope(nn.Module):
    """Mixes all numbers depending on the position, unlike any rotary embedding."""

    def __call__(self, x: mx.array, offset: int | mx.array = 0) -> mx.array:
        at = mx.array(offset).reshape(-1, *(1,) * (x.ndim - 1)) + mx.arange(x.shape[-2])[:, None]
        return x + at * mx.cumsum(x, axis=-1)


def layers(*modules: nn.Module) -> None:
    model = nn.Module()
    model.modules_in_use = list(modules)
    place_one_by_one(model)


@pytest.mark.parametrize("kind", [*KINDS, "own"])
@pytest.mark.parametrize("dtype", [mx.float32, mx.bfloat16])
@pytest.mark.parametrize("heads", [(3,), (), (2, 3)])
def test_each_position_is_rotated_as_if_alone(kind: str, dtype: mx.Dtype, heads: tuple[int, ...]) -> None:
    plain, placed = (OwnRope() if kind == "own" else KINDS[kind]() for _ in range(2))
    layers(placed)
    x = mx.random.normal((2, *heads, 4, 16), key=mx.random.key(3)).astype(dtype)
    at = mx.array([[5, 6, 6, 7], [200, 0, 3, 1]], mx.int32)
    turned = placed(x, offset=at)
    assert (turned.shape, turned.dtype) == (x.shape, dtype)
    for row in range(2):
        for place in range(4):
            one = x[row : row + 1, ..., place : place + 1, :]
            alone = plain(one, offset=int(at[row, place].item()))
            got = turned[row : row + 1, ..., place : place + 1, :]
            close = 1e-3 if kind == "own" else 2e-5  # the former makes numbers of several hundred, the others do not
            np.testing.assert_allclose(
                np.array(got.astype(mx.float32)), np.array(alone.astype(mx.float32)), rtol=1e-5, atol=close
            )


def test_one_offset_for_all_rows_works_as_before() -> None:
    plain, placed = nn.RoPE(16), nn.RoPE(16)
    layers(placed)
    x = mx.random.normal((2, 3, 4, 16), key=mx.random.key(1))
    for offset in (7, mx.array([3, 9])):
        assert mx.array_equal(placed(x, offset=offset), plain(x, offset=offset))
