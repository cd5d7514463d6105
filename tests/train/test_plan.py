from __future__ import annotations

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from eagle_mlx.train.data.batches import Rows
from eagle_mlx.train.step.inputs import InputPlan, make_plan
from tests.full import some


def rows_of(segments: list[list[int]], mask: list[list[int]]) -> Rows:
    s = np.array(segments, np.int32)
    return Rows(np.zeros_like(s), np.array(mask, np.uint8), s, None)


def pairs(plan: InputPlan, rows: Rows, step: int) -> list[tuple[int, int, int]]:
    """Return (row, t, u) of every position with loss in a step, from the plan."""
    length, count = rows.tokens.shape[1], plan.positions.shape[1]
    triples = []
    for n, u in enumerate(plan.labels):
        if plan.valid[step, n]:
            row, place = divmod(int(plan.select[step, n]), count)
            assert row == u // length
            triples.append((row, int(plan.positions[row, place]), int(u % length)))
    return sorted(triples)


def expected(rows: Rows, step: int) -> list[tuple[int, int, int]]:
    """Return the definition's positions: t reads up to t+1+j and predicts token t+2+j, in one segment."""
    triples = []
    width, length = rows.tokens.shape
    for row in range(width):
        for t in range(length - 2 - step):
            inside = rows.segments[row, t : t + 3 + step]
            if inside[0] > 0 and len(set(inside.tolist())) == 1 and rows.loss_mask[row, t + 2 + step]:
                triples.append((row, t, t + 1 + step))
    return triples


def test_a_prompt_and_an_answer() -> None:
    rows = rows_of([[1] * 8], [[0, 0, 0, 1, 1, 1, 1, 1]])
    plan = make_plan(rows, 2)
    assert pairs(plan, rows, 0) == [(0, t, t + 1) for t in (1, 2, 3, 4, 5)]
    assert pairs(plan, rows, 1) == [(0, t, t + 2) for t in (0, 1, 2, 3, 4)]
    assert plan.positions.tolist() == [[1, 2, 3, 4, 0, 5]], "those with both draft steps first"
    assert plan.counts.tolist() == [5.0, 5.0]


@settings(max_examples=some(150), deadline=None)
@given(st.data(), st.integers(1, 5), st.sampled_from([1, 4, 64]))
def test_the_plan_is_the_definition(data: st.DataObject, steps: int, multiple: int) -> None:
    width, length = data.draw(st.integers(1, 3)), data.draw(st.integers(3, 20))
    segments, mask = [], []
    for _ in range(width):
        row: list[int] = []
        for number in range(1, data.draw(st.integers(1, 4)) + 1):
            row += [number] * data.draw(st.integers(1, 9))
        segments.append((row + [0] * length)[:length])
        mask.append(data.draw(st.lists(st.integers(0, 1), min_size=length, max_size=length)))
    rows = rows_of(segments, mask)
    plan = make_plan(rows, steps, multiple)
    for step in range(steps):
        assert pairs(plan, rows, step) == expected(rows, step)
        assert plan.counts[step] == len(expected(rows, step))
    assert len(plan.labels) % multiple == 0
    assert plan.positions.shape[1] <= length
    assert plan.select.max(initial=0) < max(plan.positions.size, 1)


def test_a_batch_without_answers_carries_no_loss() -> None:
    plan = make_plan(rows_of([[1] * 6], [[0] * 6]), 3)
    assert plan.counts.tolist() == [0, 0, 0]
