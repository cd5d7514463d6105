"""Per-row positions: each input is rotated as its module would rotate it alone, for any kind of module."""

from contextlib import AbstractContextManager

import mlx.core as mx
import mlx.nn as nn
import numpy as np
import pytest
from mlx_lm.models.rope_utils import initialize_rope

from eagle_mlx.cache import RaggedCache
from eagle_mlx.cpu import SharedAngles
from eagle_mlx.hooks import Hooks, PlacesOneByOne, Recording, add_to_rope
from tests.fakes import tiny_target

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


class CountingRope(nn.RoPE):
    calls = 0

    def __init__(self) -> None:
        super().__init__(16)

    def __call__(self, x: mx.array, offset: int | mx.array = 0) -> mx.array:
        CountingRope.calls += 1
        return super().__call__(x, offset)


def layers(*modules: nn.Module) -> Hooks:
    """Hook RoPE modules for as long as the result lives."""
    model = nn.Module()
    model.modules_in_use = list(modules)
    hooks = Hooks.of(model)
    add_to_rope(model, hooks, PlacesOneByOne)
    return hooks


def sharing(hooks: Hooks) -> AbstractContextManager[None]:
    """Share angles within the block, as a target's forward does."""
    return Recording(angles=SharedAngles(hooks.angles)).running()


@pytest.mark.parametrize("kind", [*KINDS, "own"])
@pytest.mark.parametrize("dtype", [mx.float32, mx.bfloat16])
@pytest.mark.parametrize("heads", [(3,), (), (2, 3)])
def test_each_position_is_rotated_as_if_alone(kind: str, dtype: mx.Dtype, heads: tuple[int, ...]) -> None:
    plain, placed = (OwnRope() if kind == "own" else KINDS[kind]() for _ in range(2))
    _hooks = layers(placed)
    x = mx.random.normal((2, *heads, 4, 16), key=mx.random.key(3)).astype(dtype)
    at = mx.array([[5, 6, 6, 7], [200, 0, 3, 1]], mx.int32)
    turned = placed(x, offset=at)
    assert (turned.shape, turned.dtype) == (x.shape, dtype)
    for row in range(2):
        for place in range(4):
            vector = x[row : row + 1, ..., place : place + 1, :]
            alone = plain(vector, offset=int(at[row, place].item()))
            got = turned[row : row + 1, ..., place : place + 1, :]
            close = 1e-3 if kind == "own" else 2e-5  # the former makes numbers of several hundred, the others do not
            np.testing.assert_allclose(
                np.array(got.astype(mx.float32)), np.array(alone.astype(mx.float32)), rtol=1e-5, atol=close
            )


def test_one_offset_for_all_rows_works_as_before() -> None:
    plain, placed = nn.RoPE(16), nn.RoPE(16)
    _hooks = layers(placed)
    x = mx.random.normal((2, 3, 4, 16), key=mx.random.key(1))
    for offset in (7, mx.array([3, 9])):
        assert mx.array_equal(placed(x, offset=offset), plain(x, offset=offset))


@pytest.mark.usefixtures("with_shortcuts")
@pytest.mark.parametrize("kind", [*KINDS, "own"])
@pytest.mark.parametrize("count", [1, 4])
def test_shared_angles_equal_the_module_to_the_last_bit(kind: str, count: int) -> None:
    plain, placed = (OwnRope() if kind == "own" else KINDS[kind]() for _ in range(2))
    hooks = layers(placed)
    x = mx.random.normal((2, 3, count, 16), key=mx.random.key(5))
    for offset in (0, 7, 1000, 510, 5000, mx.array([3, 9]), mx.array([700, 2])):
        with sharing(hooks):
            turned = placed(x, offset=offset)
        assert mx.array_equal(turned, plain(x, offset=offset)), offset


@pytest.mark.usefixtures("with_shortcuts")
def test_shared_angles_depend_on_offset_and_count() -> None:
    plain, placed = nn.RoPE(16), nn.RoPE(16)
    hooks = layers(placed)
    x = mx.random.normal((2, 3, 5, 16), key=mx.random.key(5))
    with sharing(hooks):
        for offset, count in ((7, 2), (7, 5), (8, 5), (mx.array([3, 9]), 5), (mx.array([4, 4]), 2), (8, 2)):
            assert mx.array_equal(placed(x[:, :, :count], offset=offset), plain(x[:, :, :count], offset=offset))


@pytest.mark.usefixtures("with_shortcuts")
def test_angles_are_computed_once_for_all_layers_and_later_positions() -> None:
    modules = [CountingRope() for _ in range(3)]
    hooks = layers(*modules)
    x = mx.ones((1, 2, 4, 16))
    CountingRope.calls = 0
    for offset, calls in ((1, 1), (2, 1), (2000, 2), (600, 2), (mx.array([4]), 3)):
        with sharing(hooks):
            for module in modules:
                module(x, offset=offset)
        assert CountingRope.calls == calls
    for module in modules:
        module(x, offset=3)
    assert CountingRope.calls == 6


@pytest.mark.usefixtures("with_shortcuts")
def test_a_forward_of_a_target_computes_its_angles_once(monkeypatch: pytest.MonkeyPatch) -> None:
    target, calls, rope = tiny_target(), list[int](), nn.RoPE.__call__
    monkeypatch.setattr(nn.RoPE, "__call__", lambda *args, **more: (calls.append(1), rope(*args, **more))[1])
    target.forward(mx.array([[1, 2]]), RaggedCache.of(target.model, 1))
    assert len(calls) == 1


def test_different_modules_use_their_own_angles() -> None:
    first, like, other = nn.RoPE(16), nn.RoPE(16), nn.RoPE(16, base=77.0)
    _hooks = layers(first, like, other)
    x, at = mx.random.normal((1, 2, 3, 16), key=mx.random.key(2)), mx.array([[40, 41, 41]])
    a, b, c = (module(x, offset=at) for module in (first, like, other))
    assert mx.array_equal(a, b)
    np.testing.assert_allclose(
        np.array(c[:, :, :1]), np.array(nn.RoPE(16, base=77.0)(x[:, :, :1], offset=40)), atol=1e-5
    )
    assert not np.allclose(np.array(a), np.array(c), atol=1e-2)
    again = first(x, offset=mx.array([[1, 2, 2]]))
    np.testing.assert_allclose(np.array(again[:, :, :1]), np.array(nn.RoPE(16)(x[:, :, :1], offset=1)), atol=1e-5)
