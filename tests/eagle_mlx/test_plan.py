"""A round's plan and result: plain numbers that can be sent, and what follows from them."""

from __future__ import annotations

import json
from dataclasses import asdict
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

import eagle_mlx as em
from eagle_mlx.plan import MATCH, PLAIN, Abilities, Context, Plan, RoundResult, Trial
from tests.fakes import tiny_head, tiny_target

LOOKUPS = st.lists(st.integers(0, 16), max_size=4).map(tuple)
PLANS = st.builds(Plan, st.integers(0, 16), st.integers(0, 64), st.none() | st.floats(0, 2), LOOKUPS)
COUNTS = st.lists(st.integers(0, 16), min_size=1, max_size=4)


def restored(sent: str) -> RoundResult:
    fields: dict[str, Any] = json.loads(sent)
    plan, trials = plan_of(fields["plan"]), [Trial(*trial) for trial in fields["trials"]]
    return RoundResult(**{**fields, "plan": plan, "trials": trials, "forced": tuple(fields["forced"])})


def plan_of(fields: dict[str, Any]) -> Plan:
    return Plan(**{name: tuple(value) if isinstance(value, list) else value for name, value in fields.items()})


@given(PLANS)
def test_a_plan_can_be_sent(plan: Plan) -> None:
    assert plan_of(json.loads(json.dumps(asdict(plan)))) == plan


@given(
    PLANS,
    COUNTS,
    st.floats(0, 9),
    st.none() | st.floats(0, 9),
    st.lists(st.lists(st.integers(0, 63), max_size=5), max_size=4),
    st.lists(st.lists(st.floats(0, 1), min_size=1, max_size=4), max_size=4),
    st.lists(st.builds(Trial, st.integers(1, 16), st.integers(0, 16)), max_size=3),
)
def test_a_result_can_be_sent(
    plan: Plan,
    counts: list[int],
    seconds: float,
    draft_seconds: float | None,
    paths: list[list[int]],
    confidences: list[list[float]],
    trials: list[Trial],
) -> None:
    taken = [count + 1 for count in counts]
    result = RoundResult(plan, counts, counts[::-1], taken, seconds, draft_seconds, paths, confidences, trials=trials)
    assert restored(json.dumps(asdict(result))) == result


@pytest.mark.parametrize("plan", [Plan(3), Plan(6, stop_below=1e-3), Plan(3, 9)])
def test_what_an_engine_tells_of_a_round_can_be_sent(plan: Plan) -> None:
    class Planned(em.FixedPolicy):
        def plan(self, context: Context) -> Plan:
            return plan

    target, results = tiny_target(), list[RoundResult]()
    engine = em.Engine(target, em.HeadProposer(tiny_head(target)), policy=Planned(plan.depth, plan.nodes))
    engine.observer = results.append
    engine.generate([[5, 6, 7], [8, 9]], em.SamplingParams(max_tokens=12))
    assert any(result.plan == plan for result in results)
    for result in results:
        again = restored(json.dumps(asdict(result)))
        assert json.dumps(asdict(again)) == json.dumps(asdict(result))
        assert (again.rows, again.kept, again.emitted) == (result.rows, result.kept, result.emitted)


@pytest.mark.parametrize(
    ("plan", "most", "cut"),
    [
        (Plan(4), 3, Plan(3)),
        (Plan(4), 4, Plan(4)),
        (Plan(4), 9, Plan(4)),
        (Plan(4), 0, PLAIN),
        (Plan(4, 12), 2, Plan(2, 12)),
        (Plan(4, 12), 0, PLAIN),
        (Plan(4, 3), 2, Plan(2)),
        (Plan(8, stop_below=0.5), 5, Plan(5, stop_below=0.5)),
        (Plan(8, stop_below=0.5), 0, PLAIN),
        (Plan(0, lookups=(6, 0)), 4, Plan(0, lookups=(4, 0))),
        (Plan(3, lookups=(6, 0, 2)), 4, Plan(3, lookups=(4, 0, 2))),
        (Plan(3, lookups=(6, 0, 2)), 6, Plan(3, lookups=(6, 0, 2))),
        (Plan(3, lookups=(6, 0)), 0, PLAIN),
        (PLAIN, 3, PLAIN),
    ],
)
def test_a_plan_is_cut_to_what_rows_have_a_use_for(plan: Plan, most: int, cut: Plan) -> None:
    assert plan.cut(most) == cut


@pytest.mark.parametrize(
    ("plan", "can", "lesser"),
    [
        (Plan(3, 8), Abilities(trees=True), Plan(3, 8)),
        (Plan(3, 8), Abilities(), Plan(3)),
        (Plan(3, 2), Abilities(), Plan(3)),
        (Plan(6, stop_below=0.5), Abilities(early_exit=True), Plan(6, stop_below=0.5)),
        (Plan(6, stop_below=0.5), Abilities(trees=True), Plan(6)),
        (PLAIN, Abilities(), PLAIN),
    ],
)
def test_a_plan_becomes_the_nearest_lesser_one(plan: Plan, can: Abilities, lesser: Plan) -> None:
    assert plan.within(can) == lesser


HEAD, TEXT = Abilities(trees=True, early_exit=True), Abilities(model=False)


@pytest.mark.parametrize(
    ("plan", "can", "sources", "nearest"),
    [
        (Plan(4, lookups=(4, 4)), HEAD, (MATCH, 0), Plan(4, lookups=(4, 0))),
        (Plan(4, lookups=(4, 4)), HEAD, (MATCH, 3), Plan(0, lookups=(4, 4))),
        (Plan(4, lookups=(4, 4)), HEAD, (), Plan(4)),
        (Plan(3, 8, lookups=(4, 4)), HEAD, (MATCH, 0), Plan(3, lookups=(4, 0))),
        (Plan(3, 8, lookups=(0, 0)), HEAD, (MATCH, 0), Plan(3, 8)),
        (Plan(4, stop_below=0.5), TEXT, (MATCH, 0), Plan(0, lookups=(4, 0))),
        (Plan(4, lookups=(2, 2)), TEXT, (MATCH, 0), Plan(0, lookups=(2, 0))),
        (Plan(4, 8), TEXT, (), PLAIN),
    ],
)
def test_only_rows_with_a_source_draft_from_it(
    plan: Plan, can: Abilities, sources: tuple[int, ...], nearest: Plan
) -> None:
    """A plan with lookups is for chains. If every row has one, no model drafts."""
    assert plan.within(can, sources) == nearest


@pytest.mark.parametrize(
    ("plan", "is_tree", "size"),
    [(PLAIN, False, 0), (Plan(4), False, 4), (Plan(4, 4), False, 4), (Plan(4, 5), True, 5), (Plan(0, 5), False, 0)],
)
def test_a_tree_has_more_tokens_than_it_is_deep(plan: Plan, is_tree: bool, size: int) -> None:
    assert (plan.is_tree, plan.size) == (is_tree, size)


def test_what_was_kept_ends_where_the_row_did() -> None:
    result = RoundResult(Plan(4), [4, 2, 0], [3, 2, 0], [2, 3, 1], 1.0)
    assert result.kept == [2, 2, 0]
    assert (result.rows, result.emitted, result.depth) == (3, 6, 4)
