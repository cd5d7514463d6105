"""The queue's order: clients in turns, and no request is passed forever."""

from __future__ import annotations

import itertools

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

import eagle_mlx as em
from eagle_mlx.engine.admission import MOST_SKIPS, RequestQueue
from eagle_mlx.request import Request
from eagle_mlx.request_state import RequestState
from tests.fakes import tiny_target


def row(client: str = "", length: int = 5) -> RequestState:
    params = em.SamplingParams(max_tokens=4)
    return RequestState(Request([3] * length, params, seed=0, limit=4, stop_ids=frozenset(), client=client))


def queue(*rows: RequestState) -> RequestQueue:
    made = RequestQueue()
    for request in rows:
        made.append(request)
    return made


def pop(waiting: RequestQueue) -> RequestState:
    first = next(iter(waiting))
    waiting.take(first, lambda _: True)
    return first


def drained(waiting: RequestQueue) -> list[RequestState]:
    order = []
    while waiting:
        order.append(pop(waiting))
    return order


def test_clients_take_turns() -> None:
    many = [row("a") for _ in range(40)]
    late, later = row("b"), row("c")
    assert drained(queue(*many, late, later))[:4] == [many[0], late, later, many[1]]


def test_a_row_that_leaves_takes_no_turn() -> None:
    gone, stays, other = row("a"), row("a"), row("b")
    waiting = queue(gone, stays, other)
    gone.finish("cancelled")
    waiting.remove_ended()
    assert gone not in waiting
    assert drained(waiting) == [stays, other]
    waiting = queue(gone, stays)
    waiting.remove_ended()
    assert list(waiting) == [stays]
    stays.finish("cancelled")
    waiting.remove_ended()
    assert not waiting
    assert list(waiting) == []


def test_a_request_that_does_not_fit_is_passed_a_limited_number_of_times() -> None:
    big, small = row("a", 50), [row(client) for client in "bcdefghijklmn"]
    waiting = queue(big, *small)
    passed = []
    while (request := waiting.first(fits)) is not None:
        waiting.take(request, fits)
        passed.append(request)
    assert passed == small[:MOST_SKIPS]
    big.finish("cancelled")
    waiting.remove_ended()
    assert waiting.first(fits) is small[MOST_SKIPS]


def fits(request: RequestState) -> bool:
    return len(request.prompt) < 10


@given(st.lists(st.tuples(st.sampled_from("abcd"), st.booleans()), max_size=60))
def test_requests_of_a_client_are_served_in_order(events: list[tuple[str, bool]]) -> None:
    waiting, order = queue(), []
    rows = []
    for client, pops in events:
        rows.append(row(client))
        waiting.append(rows[-1])
        if pops:
            order.append(pop(waiting))
    order += drained(waiting)
    assert len(order) == len(rows)
    for client in "abcd":
        assert [request for request in order if request.client == client] == [
            request for request in rows if request.client == client
        ]


@given(st.lists(st.sampled_from("abcd"), min_size=1, max_size=40))
def test_between_two_turns_of_a_client_every_other_has_one(clients: list[str]) -> None:
    order = drained(queue(*(row(client) for client in clients)))
    for (i, first), (j, second) in itertools.combinations(enumerate(order), 2):
        if first.client != second.client:
            continue
        between = {request.client for request in order[i + 1 : j]}
        assert {request.client for request in order[j:]} <= between | {first.client}


def test_a_new_client_waits_for_one_request_of_each_other_client() -> None:
    a, b = [row("a") for _ in range(3)], [row("b") for _ in range(3)]
    waiting = queue(*a, *b)
    assert pop(waiting) is a[0]
    new = row("c")
    waiting.append(new)
    assert drained(waiting) == [b[0], a[1], new, b[1], a[2], b[2]]


def test_a_client_whose_row_was_paused_goes_last() -> None:
    held, other = row("a"), row("b")
    waiting = queue(row("a"), other)
    held.pause()
    waiting.append(held)
    assert drained(waiting)[:2] == [other, held]


@given(st.lists(st.tuples(st.sampled_from("abcd"), st.booleans()), max_size=40))
def test_the_queue_lists_requests_in_the_order_of_admission(events: list[tuple[str, bool]]) -> None:
    waiting = queue()
    for client, pops in events:
        waiting.append(row(client))
        if pops:
            pop(waiting)
    foreseen = list(waiting)
    assert drained(waiting) == foreseen


def test_a_short_request_does_not_wait_for_all_requests_of_another_client() -> None:
    engine = em.Engine(tiny_target(), max_batch=2)
    rng = np.random.default_rng(0)
    params = em.SamplingParams(max_tokens=30)
    prompts = rng.integers(3, 128, (12, 50)).tolist()
    long = [engine.prepare(prompt, params, client="many") for prompt in prompts]
    for request in long:
        engine.submit(request)
    engine.step()
    short = engine.prepare([5, 6, 7], em.SamplingParams(max_tokens=2), client="one")
    engine.submit(short)
    while short.finish_reason is None:
        engine.step()
    assert sum(request.finish_reason is not None for request in long) <= 2
    while not engine.idle:
        engine.step()
    assert {request.finish_reason for request in long} == {"length"}
