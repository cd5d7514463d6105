"""Long work is done one client at a time, even if some of them leave."""

from __future__ import annotations

import asyncio
import json
from collections import Counter
from functools import partial
from threading import Event
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from eagle_mlx.serve.api.limits import Pool, has_more_containers


async def ended(tasks: list[asyncio.Task[None]]) -> None:
    async with asyncio.timeout(10):
        await asyncio.gather(*tasks, return_exceptions=True)


def test_clients_take_turns() -> None:
    async def run() -> list[str]:
        pool, order = Pool("test", 1, 1), list[str]()
        names = ["a0", "a1", "a2", "a3", "b0", "c0", "b1"]
        await ended([asyncio.create_task(pool.run(lambda name=name: order.append(name), name[0])) for name in names])  # type: ignore[misc]
        pool.close()
        return order

    assert asyncio.run(run()) == ["a0", "b0", "c0", "a1", "b1", "a2", "a3"]


@given(
    st.lists(st.tuples(st.sampled_from("abc"), st.integers(0, 6), st.booleans()), max_size=12), st.sampled_from([1, 3])
)
def test_clients_that_leave_do_not_take_turns_from_others(
    clients: list[tuple[str, int, bool]], per_client: int
) -> None:
    """clients: the name, the event loop's steps until it leaves, and whether it leaves."""

    async def run() -> None:
        pool, running = Pool("test", 4, per_client), Counter[str]()

        def work(client: str) -> None:
            running[client] += 1
            assert running[client] <= per_client
            running[client] -= 1

        tasks = [asyncio.create_task(pool.run(partial(work, client), client)) for client, _, _ in clients]
        for step in range(7):
            for task, (_, when, leaves) in zip(tasks, clients, strict=True):
                if leaves and when == step:
                    task.cancel()
            await asyncio.sleep(0)
        await ended(tasks)
        assert all(leaves for task, (_, _, leaves) in zip(tasks, clients, strict=True) if task.cancelled())
        assert not any(task.exception() for task in tasks if not task.cancelled())
        async with asyncio.timeout(10):
            await asyncio.gather(*(pool.run(partial(work, client), client) for client in "abcd"))
        pool.close()

    asyncio.run(run())


JSON = st.recursive(
    st.none() | st.integers() | st.text('"\\\\[]{}a\n', max_size=9),
    lambda values: st.lists(values, max_size=4) | st.dictionaries(st.text('"\\\\[{', max_size=4), values, max_size=4),
)


def containers(value: Any) -> int:
    if isinstance(value, dict):
        return 1 + sum(map(containers, value.values()))
    return 1 + sum(map(containers, value)) if isinstance(value, list) else 0


@given(JSON, st.integers(0, 9), st.booleans())
def test_objects_and_lists_are_counted_without_parsing(value: Any, most: int, ascii: bool) -> None:
    body = json.dumps(value, ensure_ascii=ascii).encode()
    assert has_more_containers(body, most) == (containers(value) > most)


def test_work_that_has_begun_keeps_its_turn_although_its_client_leaves() -> None:
    async def run() -> list[str]:
        pool, over, begun, order = Pool("test", 2, 1), Event(), Event(), list[str]()

        def first() -> None:
            begun.set()
            over.wait(20)
            order.append("first")

        leaving = asyncio.create_task(pool.run(first, "a"))
        await asyncio.to_thread(begun.wait, 20)
        waiting = asyncio.create_task(pool.run(lambda: order.append("waiting"), "a"))
        leaving.cancel()
        await pool.run(lambda: order.append("other"), "b")
        over.set()
        await waiting
        pool.close()
        return order

    assert asyncio.run(run()) == ["other", "first", "waiting"]
