"""Hooks on modules of mlx-lm's models, the only changes that this library makes to them.

A hooked module's class becomes a subclass of its own class and the hooks'. It passes the same type checks and keeps its
parameters. The running forward decides what a hook does, so any number of targets can share a model. mlx-lm's modules
and classes do not change: other models, even of the same type, run without hooks.
"""

from __future__ import annotations

import copy
import inspect
import threading
import weakref
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from functools import cache
from types import FunctionType
from typing import TYPE_CHECKING, Any, cast

import mlx.core as mx
import mlx.nn as nn

from eagle_mlx.attention import tiled
from eagle_mlx.cpu import SharedAngles

if TYPE_CHECKING:

    class _Hooked(nn.Module):
        """The class of a hooked module, which comes after the hooks."""

        def __call__(self, *args: Any, **kwargs: Any) -> Any: ...

else:
    _Hooked = object


class Hook(_Hooked):
    """The base class of all hooks. A copied or pickled module has none."""

    _original: type

    def __reduce_ex__(self, protocol: Any) -> Any:
        reduced: Any = super().__reduce_ex__(max(protocol, 2))
        return dict.__new__, (self._original,), *reduced[2:]  # a module is a dict

    @classmethod
    def methods(cls, kind: type) -> dict[str, Any]:
        """Return the methods of a class that the hook replaces, besides its own."""
        return {}


class Hooks:
    """The hooks on one model. They are removed when the last of their owners, such as a target, is gone."""

    def __init__(self, model: nn.Module):
        """Hook nothing yet. Call `of` instead: all owners share the hooks on a model."""
        self.angles: dict[Any, list[mx.array]] = {}  # tables of RoPE (`SharedAngles`)
        self._modules = [model]
        weakref.finalize(self, _restore, self._modules).atexit = False

    @staticmethod
    def of(model: nn.Module) -> Hooks:
        """Return the hooks on a model. They stay on it for as long as somebody holds the result."""
        with _LOCK:
            hooks = _OWNERS.get(id(model))
            if hooks is None:
                hooks = _OWNERS[id(model)] = Hooks(model)
            return hooks

    def add(self, module: nn.Module, hook: type[Hook]) -> None:
        """Change a module's class to a subclass of it and the hook, unless that is done already."""
        with _LOCK:
            if _OWNERS.get(id(module)) is not self:
                _OWNERS[id(module)] = self
                self._modules.append(module)
            if not isinstance(module, hook):
                kind: Any = type(module)
                original, hooks = (kind._original, kind._hooks) if issubclass(kind, Hook) else (kind, frozenset())
                module.__class__ = _hooked(original, hooks | {hook})


_LOCK = threading.RLock()  # reentrant: Python may collect hooks, and so remove them, within any statement
_OWNERS: weakref.WeakValueDictionary[int, Hooks] = weakref.WeakValueDictionary()
"""The hooks on each model and on each of its hooked modules, by their ids."""


@cache
def _hooked(original: type, hooks: frozenset[type[Hook]]) -> type:
    """Return the subclass of a model's class with these hooks; methods are replaced before others are wrapped."""
    kind = original
    for hook in sorted(hooks, key=lambda hook: (hook is not AttendsInTiles, hook.__name__)):
        names = {"__module__": original.__module__, "__qualname__": original.__qualname__}
        kind = type(original.__name__, (hook, kind), {**names, **hook.methods(kind)})
    kind._original, kind._hooks = original, hooks  # type: ignore[attr-defined]  # mypy does not know made classes
    return kind


def _restore(modules: list[nn.Module]) -> None:
    """Remove the hooks from modules, except from those that newer hooks own by now."""
    with _LOCK:
        for module in modules:
            if isinstance(module, Hook) and id(module) not in _OWNERS:
                module.__class__ = module._original


def without_hooks(node: Any) -> Any:
    """Return a copy of a module, or of a list or tuple of modules, without hooks. Both share all arrays."""
    if isinstance(node, list | tuple):
        return type(node)(map(without_hooks, node))
    if not isinstance(node, dict):
        return node
    copied = copy.copy(node)
    for name, value in node.items():
        copied[name] = without_hooks(value)
    return copied


# Record layers' outputs, which heads read, and compute logits of given hidden states.


@dataclass
class Recording:
    """A record that hooked modules make in one forward of a model."""

    hidden: mx.array | None = None  # the input of the last call of the final norm
    norms: int = 0  # calls of the final norm
    outputs: dict[int, mx.array] = field(default_factory=dict)  # the layers' outputs, by the id of the layer
    starts: Collection[int] = ()
    """The ids of the layers at whose output the device starts, while Python builds the next layers."""
    given: tuple[object, Any] = None, None
    """A module, and what it returns without computing its output: the model runs without what comes before it."""
    added: dict[int, mx.array] = field(default_factory=dict)
    """Additions to the outputs of layers, by the id of the layer."""
    axes: Sequence[mx.array] = ()
    """Positions [B, L] of each axis of M-RoPE, in place of what the cache says; empty for one axis."""
    axis_of: mx.array | None = None  # [D / 2] int32: the axis of each rotated pair of numbers
    angles: SharedAngles | None = None  # those of RoPE, if the layers share them

    def running(self) -> AbstractContextManager[None]:
        """Make this the recording of all hooked modules within the block."""
        return _within(_RUNNING, self)


@contextmanager
def _within(variable: ContextVar[Any], value: object) -> Iterator[None]:
    token = variable.set(value)
    try:
        yield
    finally:
        variable.reset(token)


_RUNNING: ContextVar[Recording | None] = ContextVar("recording", default=None)


class RecordsOutput(Hook):
    """A layer that records its output: mlx-lm's models return only logits."""

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        recording = _RUNNING.get()
        if recording is None:
            return super().__call__(*args, **kwargs)
        module, value = recording.given
        out = value if module is self else super().__call__(*args, **kwargs)
        recording.outputs[id(self)] = hidden = out[0] if isinstance(out, tuple) else out
        if id(self) in recording.starts:
            mx.async_eval(hidden)
        return out


class AddsFeatures(Hook):
    """A layer to whose output an image's features are added. `RecordsOutput` records the sum."""

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        out, recording = super().__call__(*args, **kwargs), _RUNNING.get()
        return out + recording.added[id(self)] if recording is not None and id(self) in recording.added else out


class RecordsInput(Hook):
    """A final norm that records its input."""

    def __call__(self, x: mx.array, *args: Any, **kwargs: Any) -> Any:
        recording = _RUNNING.get()
        if recording is not None:
            recording.hidden = x
            recording.norms += 1
        return super().__call__(x, *args, **kwargs)


# RoPE with a position per input: a tree's nodes are at their depths, not at consecutive positions.


def add_to_rope(model: nn.Module, hooks: Hooks, hook: type[Hook]) -> None:
    for module in model.modules():
        if _takes_offset(type(module)):
            hooks.add(module, hook)


def _takes_offset(kind: Any) -> bool:
    """Return whether modules of a class are RoPE: their arguments are an array and its offset."""
    kind = getattr(kind, "_original", kind)
    return list(inspect.signature(kind.__call__).parameters)[2:3] == ["offset"]


class PlacesOneByOne(Hook):
    """A RoPE module that treats [B, ..., L, D] with offsets [B, L] as B * L inputs of one position each.

    Other offsets work as before; if the running forward shares angles, all layers compute them once.
    """

    def __call__(self, x: mx.array, offset: Any = 0, *args: Any, **kwargs: Any) -> mx.array:
        plain: Any = super().__call__
        if not isinstance(offset, mx.array) or offset.ndim < 2:
            recording = _RUNNING.get()
            shared = recording.angles if recording is not None and not (args or kwargs) else None
            cached = shared.rotated(self, plain, x, offset) if shared is not None else None
            out: mx.array = plain(x, offset, *args, **kwargs) if cached is None else cached
            return out
        rows, count = offset.shape
        moved = mx.moveaxis(x, -2, 1)
        shape = moved.shape
        inputs = moved.reshape(rows * count, *shape[2:-1], 1, shape[-1])
        turned: mx.array = plain(inputs, offset.reshape(-1), *args, **kwargs)
        return mx.moveaxis(turned.reshape(*shape[:-1], turned.shape[-1]), 1, -2)


class RotatesByAxes(Hook):
    """A RoPE module whose pairs of numbers may be at positions of their own axes (M-RoPE)."""

    def __call__(self, x: mx.array, offset: Any = 0, *args: Any, **kwargs: Any) -> mx.array:
        plain: Any = super().__call__
        recording = _RUNNING.get()
        if recording is None or recording.axis_of is None:
            return cast(mx.array, plain(x, offset, *args, **kwargs))
        out, *others = (plain(x, positions, *args, **kwargs) for positions in recording.axes)
        both = mx.concatenate([recording.axis_of, recording.axis_of])
        axis_of = mx.pad(both, (0, x.shape[-1] - both.size))  # numbers without rotation are the same for all axes
        for axis, turned in enumerate(others, 1):
            out = mx.where(axis_of == axis, turned, out)
        return cast(mx.array, out)


# Learned positions: an index past the end of the table would read other memory.


def bound_positions(backbone: nn.Module, hooks: Hooks) -> int | None:
    """Let the table of learned positions clamp its indices. Return its size, None if there is no table.

    Rows near the end of their context share forwards with rows that draft more. What is read past a context is never
    kept, but must not be NaN, because masked attention multiplies by 0.
    """
    table = getattr(backbone, "wpe", None)  # its name in mlx-lm's gpt2 and gpt_bigcode
    if not isinstance(table, nn.Embedding | nn.QuantizedEmbedding):
        return None
    hooks.add(table, BoundedTable)
    return int(table.weight.shape[0])


class BoundedTable(Hook):
    """An embedding that clamps its indices to its size."""

    def __call__(self, positions: mx.array) -> Any:
        return super().__call__(mx.minimum(positions, self.weight.shape[0] - 1))


# Attention over tiles of a prompt's queries, on a CPU.

_ATTENTION = "scaled_dot_product_attention"  # the name under which each of mlx-lm's model files imports attention


class AttendsInTiles(Hook):
    """A module that calls `tiled` attention instead of mlx-lm's. Copies of its methods have another global."""

    @classmethod
    def methods(cls, kind: type) -> dict[str, Any]:
        methods = {}
        for name, method in _attending(kind).items():
            names = {**method.__globals__, _ATTENTION: tiled(method.__globals__[_ATTENTION])}
            methods[name] = FunctionType(method.__code__, names, name, method.__defaults__, method.__closure__)
            methods[name].__kwdefaults__ = method.__kwdefaults__
        return methods


def _attending(kind: type) -> dict[str, FunctionType]:
    attributes = {name: value for base in reversed(kind.__mro__) for name, value in vars(base).items()}
    methods = {name: value for name, value in attributes.items() if isinstance(value, FunctionType)}
    return {name: x for name, x in methods.items() if _ATTENTION in x.__code__.co_names and _ATTENTION in x.__globals__}


def tile_attention(model: nn.Module, hooks: Hooks) -> None:
    """Let a model's attention read prompts in tiles, if it computes on a CPU."""
    if mx.default_device() == mx.cpu:
        for module in model.modules():
            if _attending(type(module)):
                hooks.add(module, AttendsInTiles)


# Calls of layers, which a recurrent state repeats for accepted tokens only.

Project = Callable[[nn.Module, Callable[[], mx.array]], mx.array]
"""Returns a linear projection's output, computed or recorded."""


class CallListener(ABC):
    """A cache that is notified of each call of a layer it is passed to."""

    @abstractmethod
    def note(self, layer: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Projections | None:
        """Record a layer's coming call; calling `layer` itself does not notify again.

        Returns an object to record the layer's projections; None if they will not be needed.
        """


class Projections:
    """The outputs of a layer's linear projections in one call, so that a second call need not read their weights."""

    def __init__(self) -> None:
        self._outputs: dict[int, list[mx.array]] = {}  # by the id of the projection, in the order of its calls

    def recording(self) -> AbstractContextManager[None]:
        """Record the projections' outputs within the block."""
        return _within(_PROJECT, self._record)

    def replaying(self, choose: Callable[[Sequence[mx.array], int], mx.array | None]) -> AbstractContextManager[None]:
        """In the block, let projections return what `choose` takes from their recorded outputs; if None, they compute.

        `choose` takes a projection's recorded outputs and the index of its current call in this block.
        """
        calls: dict[int, int] = {}

        def replay(projection: nn.Module, compute: Callable[[], mx.array]) -> mx.array:
            outputs, number = self._outputs.get(id(projection)), calls.get(id(projection), 0)
            calls[id(projection)] = number + 1
            chosen = choose(outputs, number) if outputs else None
            return compute() if chosen is None else chosen

        return _within(_PROJECT, replay)

    def _record(self, projection: nn.Module, compute: Callable[[], mx.array]) -> mx.array:
        output = compute()
        self._outputs.setdefault(id(projection), []).append(output)
        return output


_PROJECT: ContextVar[Project | None] = ContextVar("project", default=None)


class KeepsProjection(Hook):
    """A linear projection in a layer whose call may be repeated."""

    def __call__(self, x: mx.array) -> mx.array:
        plain: Any = super().__call__
        project = _PROJECT.get()
        return plain(x) if project is None else project(self, lambda: plain(x))


class NotesCalls(Hook):
    """A layer that notifies the cache in its arguments of each call, which may be repeated."""

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        plain: Any = super().__call__
        listener = next((x for x in (*args, *kwargs.values()) if isinstance(x, CallListener)), None)
        projections = listener.note(plain, args, kwargs) if listener is not None else None
        if projections is None:
            return plain(*args, **kwargs)
        for module in self.modules():
            if isinstance(module, nn.Linear | nn.QuantizedLinear) and not isinstance(module, KeepsProjection):
                Hooks.of(self).add(module, KeepsProjection)
        with projections.recording():
            return plain(*args, **kwargs)
