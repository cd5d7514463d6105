"""Memory for time: what a draft step computes is forgotten and computed again when its gradient is due."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Collection, Iterator, Sequence
from typing import Any, cast

import mlx.core as mx
import mlx.nn as nn
from mlx.utils import tree_flatten, tree_unflatten

Step = Callable[..., list[mx.array]]
"""Arrays in, arrays out."""


def recomputed(module: nn.Module, step: Step, without: Collection[str] = ()) -> Step:
    """`step` with the same outputs and gradients, of which only inputs and outputs are kept for the backward pass.

    Gradients reach the arguments and the module's trainable weights, but for those of the parts named in `without`;
    whatever else the step uses counts as constant. It is computed again only once the gradient of its outputs is
    there: `mx.checkpoint` leaves that open, and MLX then computes several steps again at once.
    """

    def call(*arrays: mx.array) -> list[mx.array]:
        names, weights = weights_but(module, without)
        count = len(names)

        def pure(*given: mx.array) -> list[mx.array]:
            with holding(module, names, given[:count]):
                return step(*given[count:])

        forward: Any = mx.custom_function(pure)

        @forward.vjp  # type: ignore[untyped-decorator]
        def backward(primals: Sequence[mx.array], cotangents: Sequence[mx.array], _: Any) -> list[mx.array]:
            return mx.vjp(pure, mx.depends(list(primals), list(cotangents)), list(cotangents))[1]

        return list(forward(*weights, *arrays))

    return call


def weights_but(module: nn.Module, without: Collection[str] = ()) -> tuple[list[str], list[mx.array]]:
    """Names and values of the module's trainable weights outside its parts `without`."""
    parts = {name: part for name, part in module.trainable_parameters().items() if name not in without}
    leaves = cast(list[tuple[str, mx.array]], tree_flatten(parts))
    return [name for name, _ in leaves], [value for _, value in leaves]


@contextlib.contextmanager
def holding(module: nn.Module, names: Sequence[str], values: Sequence[mx.array]) -> Iterator[None]:
    """The module with other values for the weights of these names, within the block."""
    before = dict(cast(list[tuple[str, mx.array]], tree_flatten(module.trainable_parameters())))
    module.update(tree_unflatten(list(zip(names, values, strict=True))))
    try:
        yield
    finally:
        module.update(tree_unflatten([(name, before[name]) for name in names]))


class Relay:
    """A module's weights on their way from draft step to draft step."""

    def __init__(self, module: nn.Module, without: Collection[str] = ()):
        """The trainable weights, but for those of the parts named in `without`."""
        self._module = module
        self._names, self._weights = weights_but(module, without)

    def hand_on(self, *arrays: mx.array) -> list[mx.array]:
        """What the next draft step reads of the steps before it, floating numbers, as it is to read it."""
        count = len(self._names)
        handed = _handed_on(count, [*self._weights, *arrays])
        self._weights = handed[:count]
        return handed[count:]

    def holding(self) -> contextlib.AbstractContextManager[None]:
        """The module with the weights as they were handed on last, within the block."""
        return holding(self._module, self._names, self._weights)


def _handed_on(count: int, arrays: list[mx.array]) -> list[mx.array]:
    """The same arrays. In the backward pass none of their gradients is read before all of them are there.

    Gradients of the first `count` go on in float32, so that the sum over the steps is exact whatever the weights are.
    """
    forward: Any = mx.custom_function(lambda *given: list(given))

    @forward.vjp  # type: ignore[untyped-decorator]
    def backward(_: Any, cotangents: Sequence[mx.array], __: Any) -> list[mx.array]:
        found = [c.astype(mx.float32) if at < count else c for at, c in enumerate(cotangents)]
        return list(mx.depends(found, found))

    return list(forward(*arrays))
