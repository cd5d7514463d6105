"""Long work is done one client at a time, even if some of them leave."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from threading import Event
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from eagle_mlx.serve.api.limits import FairSemaphore, Limits, Pools, has_more_containers


@asynccontextmanager
async def turn(semaphore: FairSemaphore, client: str) -> AsyncIterator[None]:
    await semaphore.acquire(client)
    try:
        yield
    finally:
        semaphore.release()


async def ended(tasks: list[asyncio.Task[None]]) -> None:
    async with asyncio.timeout(10):
        await asyncio.gather(*tasks, return_exceptions=True)


def test_clients_take_turns() -> None:
    async def run() -> list[str]:
        semaphore, order = FairSemaphore(), []

        async def one(client: str, name: str) -> None:
            async with turn(semaphore, client):
                await asyncio.sleep(0)
                order.append(name)

        jobs = [("a", f"a{n}") for n in range(4)] + [("b", "b0"), ("c", "c0"), ("b", "b1")]
        await ended([asyncio.create_task(one(*job)) for job in jobs])
        return order

    assert asyncio.run(run()) == ["a0", "a1", "b0", "c0", "a2", "b1", "a3"]


@given(
    st.lists(st.tuples(st.sampled_from("abc"), st.integers(0, 6), st.booleans()), max_size=12), st.sampled_from([1, 3])
)
def test_clients_that_leave_do_not_take_turns_from_others(clients: list[tuple[str, int, bool]], at_once: int) -> None:
    """clients: the name, the event loop's steps until it leaves, and whether it leaves."""

    async def run() -> None:
        semaphore, inside, served = FairSemaphore(at_once), 0, 0

        async def one(client: str) -> None:
            nonlocal inside, served
            async with turn(semaphore, client):
                inside += 1
                assert inside <= at_once
                try:
                    await asyncio.sleep(0)
                finally:
                    inside -= 1
                served += 1

        tasks = [asyncio.create_task(one(client)) for client, _, _ in clients]
        for step in range(7):
            for task, (_, when, leaves) in zip(tasks, clients, strict=True):
                if leaves and when == step:
                    task.cancel()
            await asyncio.sleep(0)
        await ended(tasks)
        assert [task.exception() for task in tasks if not task.cancelled()] == [None] * served
        assert served >= sum(not leaves for _, _, leaves in clients)
        async with asyncio.timeout(10), turn(semaphore, "late"):
            pass

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
        pools, over, begun, order = Pools(Limits()), Event(), Event(), list[str]()

        def first() -> None:
            begun.set()
            over.wait(20)
            order.append("first")

        leaving = asyncio.create_task(pools.parse(first, "a"))
        await asyncio.to_thread(begun.wait, 20)
        others = [asyncio.create_task(pools.parse(lambda name=name: order.append(name), name)) for name in "ab"]  # type: ignore[misc]
        leaving.cancel()
        await asyncio.sleep(0)
        last = asyncio.create_task(pools.parse(lambda: order.append("last"), "b"))
        await asyncio.sleep(0)
        over.set()
        await asyncio.gather(*others, last)
        pools.close()
        return order

    assert asyncio.run(run()) == ["first", "a", "b", "last"]
