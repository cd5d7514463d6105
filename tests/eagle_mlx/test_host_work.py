"""What Python does in a round on a GPU: when the device starts, and how many operations are called."""

from __future__ import annotations

import io
import operator
from collections.abc import Callable
from typing import Any

import mlx.core as mx
import pytest
from mlx.utils import tree_flatten

import eagle_mlx as em
from eagle_mlx.proposers.base import Proposer
from eagle_mlx.target import Forward, Target
from tests.fakes import tiny_head, tiny_target

LAYERS = 12
TEXT = [3, 4, 5, 6] * 6


def operations_before_the_first_dispatch(proposer: Proposer | None) -> int:
    """Return the operations in the graph at the first dispatch of a round."""
    target = tiny_target(layers=LAYERS)
    engine = em.Engine(target, proposer, policy=em.FixedPolicy(3))
    engine.submit(engine.prepare(TEXT, em.SamplingParams(max_tokens=40, ignore_eos=True)))
    for _ in range(3):
        engine.step()
    counts: list[int] = []
    dispatch = mx.async_eval

    def counting(*args: object) -> None:
        if not counts:
            graph = io.StringIO()
            mx.export_to_dot(graph, *(leaf for _, leaf in tree_flatten(args)))
            counts.append(graph.getvalue().count("shape=rectangle"))
        dispatch(*args)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(mx, "async_eval", counting)
        engine.step()
    return counts[0]


@pytest.mark.parametrize("proposer", [None, em.NgramProposer()], ids=["plain", "n-grams"])
def test_the_device_starts_early(proposer: Proposer | None, request: pytest.FixtureRequest) -> None:
    """A head starts it even earlier, with its first draft token."""
    on_a_cpu = operations_before_the_first_dispatch(proposer)
    request.getfixturevalue("as_on_a_gpu")
    assert 0 < operations_before_the_first_dispatch(proposer) < on_a_cpu / 4


_METHODS = [name for name in vars(mx.array) if name[0] != "_" or name in dir(operator)]
_NO_OPERATIONS = ("compile", "eval", "async_eval", "default_device", "issubdtype", "tolist", "__doc__")


def operations_of_a_round(monkeypatch: pytest.MonkeyPatch, params: em.SamplingParams) -> int:
    """Return the calls of MLX's operations in a round with a chain of three, without those of the target's forward."""
    target = tiny_target()
    engine = em.Engine(target, em.HeadProposer(tiny_head(target)), policy=em.FixedPolicy(3))
    engine.submit(engine.prepare(TEXT, params))
    for _ in range(4):
        engine.step()
    count, counts = 0, True

    def counting(operation: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **more: Any) -> Any:
            nonlocal count
            count += counts
            return operation(*args, **more)

        return call

    def forward(*args: Any, **more: Any) -> Forward:
        nonlocal counts
        counts = False
        out = Target.forward(target, *args, **more)
        counts = True
        return out

    monkeypatch.setattr(target, "forward", forward)
    for name, operation in list(vars(mx).items()):
        if callable(operation) and not isinstance(operation, type) and name not in _NO_OPERATIONS:
            monkeypatch.setattr(mx, name, counting(operation))
    for name in _METHODS:
        if callable(operation := getattr(mx.array, name)) and name not in _NO_OPERATIONS:
            monkeypatch.setattr(mx.array, name, counting(operation))
    engine.step()
    return count


@pytest.mark.parametrize(
    ("most", "params"), [(150, {}), (300, {"temperature": 1.0, "top_p": 0.9, "seed": 1})], ids=["greedy", "top-p"]
)
@pytest.mark.usefixtures("as_on_a_gpu", "compiled")
def test_a_round_calls_few_operations(most: int, params: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    params = {"max_tokens": 60, "ignore_eos": True, **params}
    assert 0 < operations_of_a_round(monkeypatch, em.SamplingParams(**params)) <= most
