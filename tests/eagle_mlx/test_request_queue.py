"""The queue's order: clients in turns, short prompts before long ones, and no request is passed forever."""

from __future__ import annotations

import itertools
from collections import Counter

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

import eagle_mlx as em
from eagle_mlx.engine.request_queue import MOST_SKIPS, RequestQueue
from eagle_mlx.request import Request
from eagle_mlx.request_state import RequestState
from tests.fakes import tiny_target

CHUNK = 10


def row(client: str = "", length: int = 5) -> RequestState:
    params = em.SamplingParams(max_tokens=4)
    return RequestState(Request([3] * length, params, seed=0, limit=4, stop_ids=frozenset(), client=client))


def queue(*rows: RequestState) -> RequestQueue:
    made = RequestQueue(CHUNK)
    for each in rows:
        made.append(each)
    return made


def pop(waiting: RequestQueue) -> RequestState:
    first = waiting.peek()
    waiting.take(first)
    return first


def drained(waiting: RequestQueue) -> list[RequestState]:
    order = []
    while waiting:
        order.append(pop(waiting))
    return order


def test_one_client_with_prompts_of_similar_size_is_served_in_order() -> None:
    rows = [row(length=1 + n % CHUNK) for n in range(20)]
    assert drained(queue(*rows)) == rows


def test_clients_take_turns() -> None:
    many = [row("a") for _ in range(40)]
    late, later = row("b"), row("c")
    assert drained(queue(*many, late, later))[:4] == [many[0], late, later, many[1]]


def test_short_prompts_pass_a_long_one_a_limited_number_of_times() -> None:
    long, short = row(length=100), [row() for _ in range(MOST_SKIPS + 3)]
    assert drained(queue(long, *short)) == [*short[:MOST_SKIPS], long, *short[MOST_SKIPS:]]


def test_a_row_that_leaves_takes_no_turn() -> None:
    gone, stays, other = row("a"), row("a"), row("b")
    waiting = queue(gone, stays, other)
    waiting.remove(gone)
    assert gone not in waiting
    assert drained(waiting) == [stays, other]
    waiting = queue(gone, stays)
    waiting.clear()
    assert not waiting
    assert list(waiting) == []


def test_a_client_without_a_request_that_fits_keeps_its_turn() -> None:
    big, small, other = row("a", 50), row("b", 5), row("c", 5)
    waiting = queue(big, small, other)
    for wanted in (small, other):
        found = waiting.first(lambda each: len(each.prompt) < 10)
        assert found is wanted
        waiting.take(found)
        assert waiting.peek() is big
    assert waiting.first(lambda each: len(each.prompt) < 10) is None
    assert drained(waiting) == [big]


@given(st.lists(st.tuples(st.sampled_from("abcd"), st.integers(1, 60)), min_size=1, max_size=40))
def test_if_all_fit_the_first_is_the_next(rows: list[tuple[str, int]]) -> None:
    waiting = queue(*(row(client, length) for client, length in rows))
    while waiting:
        assert waiting.first(lambda _: True) is waiting.peek()
        pop(waiting)


@given(st.lists(st.tuples(st.sampled_from("abcd"), st.integers(1, 60), st.booleans()), max_size=60))
def test_no_request_is_lost_or_waits_longer_than_promised(events: list[tuple[str, int, bool]]) -> None:
    """A request waits at most as many turns of its client as those before it can be passed."""
    waiting, order, ahead = RequestQueue(CHUNK), [], {}
    taken: Counter[str] = Counter()

    def take() -> None:
        each = pop(waiting)
        order.append(each)
        taken[each.client] += 1
        depth, before = ahead[id(each)]
        assert taken[each.client] - before <= (depth + 1) * (MOST_SKIPS + 1)

    rows = []
    for client, length, pops in events:
        rows.append(row(client, length))
        ahead[id(rows[-1])] = (sum(each.client == client for each in waiting), taken[client])
        waiting.append(rows[-1])
        if pops:
            take()
    while waiting:
        take()
    assert sorted(map(id, order)) == sorted(map(id, rows))


@given(st.lists(st.sampled_from("abcd"), min_size=1, max_size=40))
def test_between_two_turns_of_a_client_every_other_has_one(clients: list[str]) -> None:
    order = drained(queue(*(row(client) for client in clients)))
    for (i, first), (j, second) in itertools.combinations(enumerate(order), 2):
        if first.client != second.client:
            continue
        between = {each.client for each in order[i + 1 : j]}
        assert {each.client for each in order[j:]} <= between | {first.client}


def test_a_new_client_goes_before_those_served_since_its_own_last_turn() -> None:
    first, second, *more = [row("a") for _ in range(6)]
    waiting = queue(first, second, *more)
    assert pop(waiting) is first
    new = row("b")
    waiting.append(new)
    assert pop(waiting) is new
    again = row("b")
    waiting.append(again)
    assert [pop(waiting) for _ in range(3)] == [second, again, more[0]]


def test_new_clients_do_not_pass_a_client_forever() -> None:
    waiting = queue(row("a"), row("a"))
    pop(waiting)
    order = []
    for number in range(40):
        waiting.append(row(f"new {number}"))
        order.append(pop(waiting).client)
    assert order.index("a") == MOST_SKIPS


@given(st.lists(st.tuples(st.sampled_from("abcd"), st.integers(1, 40), st.booleans()), max_size=40))
def test_a_request_knows_how_many_are_ahead_of_it(events: list[tuple[str, int, bool]]) -> None:
    waiting, told = RequestQueue(CHUNK), row("a")
    assert waiting.before(told) is None
    for client, length, pops in events:
        waiting.append(row(client, length))
        if pops:
            pop(waiting)
    places = {id(each): waiting.before(each) for each in waiting}
    assert [places[id(each)] for each in drained(waiting)] == list(range(len(places)))


def test_a_short_request_does_not_wait_for_all_requests_of_another_client() -> None:
    engine = em.Engine(tiny_target(), max_batch=2)
    rng = np.random.default_rng(0)
    params = em.SamplingParams(max_tokens=30)
    prompts = rng.integers(3, 128, (12, 50)).tolist()
    long = [engine.prepare(prompt, params, client="many") for prompt in prompts]
    for each in long:
        engine.submit(each)
    engine.step()
    short = engine.prepare([5, 6, 7], em.SamplingParams(max_tokens=2), client="one")
    engine.submit(short)
    while short.finish_reason is None:
        engine.step()
    assert sum(each.finish_reason is not None for each in long) <= 2
    while not engine.idle:
        engine.step()
    assert {each.finish_reason for each in long} == {"length"}
