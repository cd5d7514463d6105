"""FairSemaphore serves clients in turn, even if some of them leave."""

from __future__ import annotations

import asyncio

from hypothesis import given
from hypothesis import strategies as st

from eagle_mlx.serve.api.limits import FairSemaphore


async def ended(tasks: list[asyncio.Task[None]]) -> None:
    async with asyncio.timeout(10):
        await asyncio.gather(*tasks, return_exceptions=True)


def test_clients_take_turns() -> None:
    async def run() -> list[str]:
        semaphore, order = FairSemaphore(), []

        async def one(client: str, name: str) -> None:
            async with semaphore.acquire(client):
                await asyncio.sleep(0)
                order.append(name)

        asked = [("a", f"a{n}") for n in range(4)] + [("b", "b0"), ("c", "c0"), ("b", "b1")]
        await ended([asyncio.create_task(one(*each)) for each in asked])
        return order

    assert asyncio.run(run()) == ["a0", "a1", "b0", "c0", "a2", "b1", "a3"]


@given(
    st.lists(st.tuples(st.sampled_from("abc"), st.integers(0, 6), st.booleans()), max_size=12), st.sampled_from([1, 3])
)
def test_clients_that_leave_do_not_take_turns_from_others(asked: list[tuple[str, int, bool]], at_once: int) -> None:
    """asked: the client, the event loop's steps until it leaves, and whether it leaves."""

    async def run() -> None:
        semaphore, inside, served = FairSemaphore(at_once), 0, 0

        async def one(client: str) -> None:
            nonlocal inside, served
            async with semaphore.acquire(client):
                inside += 1
                assert inside <= at_once
                try:
                    await asyncio.sleep(0)
                finally:
                    inside -= 1
                served += 1

        tasks = [asyncio.create_task(one(client)) for client, _, _ in asked]
        for step in range(7):
            for task, (_, when, leaves) in zip(tasks, asked, strict=True):
                if leaves and when == step:
                    task.cancel()
            await asyncio.sleep(0)
        await ended(tasks)
        assert [task.exception() for task in tasks if not task.cancelled()] == [None] * served
        assert served >= sum(not leaves for _, _, leaves in asked)
        async with asyncio.timeout(10), semaphore.acquire("late"):
            pass

    asyncio.run(run())
