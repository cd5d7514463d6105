"""The device starts after the first layer of a forward, not after Python has built the whole graph."""

from __future__ import annotations

import io

import mlx.core as mx
import pytest
from mlx.utils import tree_flatten

import eagle_mlx as em
from eagle_mlx.proposers.base import Proposer
from tests.fakes import tiny_target

LAYERS = 12
TEXT = [3, 4, 5, 6] * 6


def operations_before_the_first_dispatch(proposer: Proposer | None) -> int:
    """Return the operations in the graph at the first dispatch of a round."""
    target = tiny_target(layers=LAYERS)
    engine = em.Engine(target, proposer, policy=em.FixedPolicy(3))
    engine.submit(engine.prepare(TEXT, em.SamplingParams(max_tokens=40, ignore_eos=True)))
    for _ in range(3):
        engine.step()
    found: list[int] = []
    dispatch = mx.async_eval

    def counting(*args: object) -> None:
        if not found:
            graph = io.StringIO()
            mx.export_to_dot(graph, *(leaf for _, leaf in tree_flatten(args)))
            found.append(graph.getvalue().count("shape=rectangle"))
        dispatch(*args)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(mx, "async_eval", counting)
        engine.step()
    return found[0]


@pytest.mark.parametrize("proposer", [None, em.NgramProposer()], ids=["plain", "n-grams"])
def test_the_device_starts_early(proposer: Proposer | None, request: pytest.FixtureRequest) -> None:
    """A head starts it even earlier, with its first draft token."""
    on_a_cpu = operations_before_the_first_dispatch(proposer)
    request.getfixturevalue("as_on_a_gpu")
    assert 0 < operations_before_the_first_dispatch(proposer) < on_a_cpu / 4
