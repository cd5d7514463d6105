"""What the layers of a model return during one forward, and its final norm cut to the positions that are wanted.

Modules get a subclass of their own class. What they do then is said by the forward that is under way, so that any
number of targets can share a model, and one that is gone leaves nothing behind.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any

import mlx.core as mx
import mlx.nn as nn


@dataclass
class Recording:
    """One forward of a model."""

    ends: mx.array | None = None
    """[B, 1, 1] int32, where only these positions' logits are wanted."""
    last: nn.Module | None = None
    """The last layer."""
    norm: object = None
    """The final norm."""
    cut: bool = False
    """Whether the final norm goes on with `ends` alone."""
    outputs: dict[int, mx.array] = field(default_factory=dict)
    """What layers have returned, by the id of the layer."""
    normed: list[bool] = field(default_factory=list)
    """Calls of the final norm: whether the last layer was behind it."""

    @contextmanager
    def running(self) -> Iterator[None]:
        """Let watched modules tell this recording of their calls."""
        token = _RUNNING.set(self)
        try:
            yield
        finally:
            _RUNNING.reset(token)


_RUNNING: ContextVar[Recording | None] = ContextVar("recording", default=None)


class WatchedLayer:
    """Records what a layer returns."""

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        out = super().__call__(*args, **kwargs)  # type: ignore[misc]
        recording = _RUNNING.get()
        if recording is not None:
            recording.outputs[id(self)] = out[0] if isinstance(out, tuple) else out
        return out


class WatchedNorm:
    """Lets a final norm go on with the wanted positions alone, in models that call it once, behind all layers."""

    def __call__(self, x: mx.array, *args: Any, **kwargs: Any) -> Any:
        recording = _RUNNING.get()
        if recording is not None and recording.ends is not None and recording.norm is self:
            recording.normed.append(id(recording.last) in recording.outputs)
            x = mx.take_along_axis(x, recording.ends, axis=1) if recording.cut else x
        return super().__call__(x, *args, **kwargs)  # type: ignore[misc]


def watch(module: nn.Module, how: type) -> None:
    """Give a module a subclass of its own class and of `how`."""
    if not isinstance(module, how):
        base = type(module)
        module.__class__ = type(base.__name__, (how, base), {"__module__": base.__module__})
