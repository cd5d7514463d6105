"""Long and short prompts: no request waits for two chunks in a row of a prompt longer than its own."""

from __future__ import annotations

import mlx.core as mx
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import eagle_mlx as em
from eagle_mlx.request_state import RequestState
from tests.fakes import tiny_head, tiny_target
from tests.full import some

TARGET = tiny_target()
CHUNK = 8
RNG = np.random.default_rng(0)
TEXT = [int(t) for t in RNG.integers(3, 128, 400)]


def engine(max_batch: int = 4, **settings: int) -> em.Engine:
    head = em.HeadProposer(tiny_head(TARGET))
    return em.Engine(TARGET, head, policy=em.FixedPolicy(2), max_batch=max_batch, prefill_chunk=CHUNK, **settings)


def submit(busy: em.Engine, length: int, client: str = "", tokens: int = 4, at: int = 0) -> RequestState:
    params = em.SamplingParams(max_tokens=tokens, ignore_eos=True)
    request = busy.prepare(TEXT[at : at + length], params, client=client)
    busy.submit(request)
    return request


def steps_until(busy: em.Engine, request: RequestState) -> int:
    """Return how many steps it takes until a request's first token."""
    steps = 0
    while not request.tokens:
        busy.step()
        steps += 1
        assert steps < 1000
    return steps


def finish(busy: em.Engine) -> None:
    while not busy.idle:
        busy.step()


def chunks(length: int) -> int:
    return -(-(length - 1) // CHUNK)


@pytest.mark.parametrize("client", ["many", "other"])
def test_a_short_prompt_is_read_between_two_chunks_of_a_long_one(client: str) -> None:
    busy = engine()
    long = submit(busy, 300, "many")
    busy.step()
    short = submit(busy, 5, client, at=100)
    assert steps_until(busy, short) <= 2
    assert not long.tokens
    finish(busy)
    assert long.tokens == engine().generate([TEXT[:300]], em.SamplingParams(max_tokens=4, ignore_eos=True))[0].tokens


@pytest.mark.parametrize("places", [4, 2])
def test_a_short_prompt_does_not_wait_for_the_last_chunk_of_a_long_one(places: int) -> None:
    """Nor for a place, if another client has all of them."""
    busy = engine(max_batch=places)
    submit(busy, 5, "many", tokens=50)
    busy.step()
    long = submit(busy, 2 * CHUNK + 1, "many", at=50)
    busy.step()
    short = submit(busy, 4, "one", at=100)
    assert steps_until(busy, short) == 1
    assert not long.tokens
    pauses = busy.pauses
    submit(busy, 4, "another", at=200)
    assert steps_until(busy, long) == 1, "two short prompts passed it in a row"
    assert busy.pauses == pauses, "a row was paused for a prompt that was not read then"
    finish(busy)


def test_a_prompt_of_several_chunks_is_divided_evenly(positions_read: list[int]) -> None:
    """Another's short prompt waits for a whole chunk at most, and a last chunk of few tokens costs a step."""
    busy = em.Engine(TARGET, prefill_chunk=300)
    busy.generate([TEXT[:400]] * 2, em.SamplingParams(max_tokens=1))
    assert [count for count in positions_read if count > 2] == [200, 199, 200, 199]


def test_a_long_prompt_takes_at_most_twice_as_many_steps() -> None:
    busy = engine(max_batch=3)
    long = submit(busy, 200)
    busy.step()
    steps = 1
    while not long.tokens:
        if busy.waiting < 4:
            submit(busy, 6, f"client {steps}", tokens=1, at=steps)
        busy.step()
        steps += 1
    assert chunks(200) + 10 < steps <= 2 * chunks(200) + 1
    finish(busy)


def test_two_long_prompts_alternate_and_the_shorter_ends_first() -> None:
    busy = engine()
    longer = submit(busy, 200, "a")
    busy.step()
    shorter = submit(busy, 60, "b", at=50)
    assert steps_until(busy, shorter) <= 2 * chunks(60) + 1
    assert not longer.tokens
    left = chunks(200) - 1 - chunks(60)
    assert steps_until(busy, longer) <= left + 1
    finish(busy)


def test_a_prompt_of_the_same_length_waits_for_the_one_before_it() -> None:
    """Alternating would delay the first prompt's tokens without making the second's earlier."""
    busy = engine()
    first = submit(busy, 81, "a")
    busy.step()
    second = submit(busy, 81, "b", at=50)
    assert steps_until(busy, first) <= chunks(81)
    assert not second.tokens
    assert steps_until(busy, second) <= chunks(81) + 1
    finish(busy)


def test_one_client_with_fifty_long_requests_does_not_hold_up_anothers_short_one() -> None:
    """It waits for one chunk, and for the first row that ends if all are taken."""
    busy = engine(max_batch=2)
    crowd = [submit(busy, 120, "many", tokens=20) for _ in range(50)]
    busy.step()
    short = submit(busy, 5, "one", tokens=2, at=100)
    assert steps_until(busy, short) <= 2
    while len([row for row in crowd if row.tokens and not row.finish_reason]) < 2:
        busy.step()
    late = submit(busy, 5, "one", tokens=2, at=100)
    ended = sum(row.finish_reason is not None for row in crowd)
    steps_until(busy, late)
    assert sum(row.finish_reason is not None for row in crowd) <= ended + 1
    for row in crowd:
        busy.cancel(row)
    finish(busy)


def test_a_request_that_waits_for_memory_is_not_passed_forever() -> None:
    busy = engine(max_batch=8, kv_bytes=1)
    busy.kv_budget.nbytes = busy.kv_budget.size.nbytes(1, 400)
    busy.kv_budget.longest = 400
    long = submit(busy, 150, "a", tokens=4)
    busy.step()
    big = submit(busy, 380, "b", tokens=4)
    steps = passed = 0
    while not big.tokens:
        if busy.waiting < 4:
            submit(busy, 4, f"c{steps}", tokens=1, at=steps)
            passed += 1
        busy.step()
        steps += 1
        assert steps < 300
    assert long.tokens
    assert passed < 60
    finish(busy)


@settings(max_examples=some(20), deadline=None)
@given(
    events=st.lists(
        st.tuples(st.sampled_from("abc"), st.integers(1, 90), st.integers(0, 3), st.booleans()), max_size=9
    ),
    cached=st.booleans(),
)
def test_texts_do_not_depend_on_arrivals_and_cancellations(
    events: list[tuple[str, int, int, bool]], cached: bool
) -> None:
    """events: the client, the prompt's length, the steps before the next event, and whether a request is cancelled."""
    busy = engine(max_batch=3, prefix_cache_bytes=(1 << 22) * cached)
    rows: list[RequestState] = []
    for client, length, steps, leaves in events:
        rows.append(submit(busy, length, client, tokens=5, at=length))
        for _ in range(steps):
            busy.step()
            assert len(busy.snapshot().requests) - len(busy.snapshot().waiting) <= 3
        if leaves:
            busy.cancel(rows[len(rows) // 2])
    finish(busy)
    alone = em.Engine(TARGET, max_batch=1)
    for row in rows:
        expected = alone.generate([row.prompt], em.SamplingParams(max_tokens=5, ignore_eos=True))[0].tokens
        assert row.tokens == expected[: len(row.tokens)]
        assert (len(row.tokens) == 5) or row.finish_reason == "cancelled"


def test_a_request_may_be_cancelled_by_its_own_processor_at_its_first_token() -> None:
    busy = em.Engine(TARGET)

    def leave(_: list[int], logits: mx.array) -> mx.array:
        busy.cancel(row)
        return logits

    row = busy.prepare(TEXT[:5], em.SamplingParams(max_tokens=4, logits_processors=(leave,)))
    busy.submit(row)
    finish(busy)
    assert (row.finish_reason, row.tokens) == ("cancelled", [])
