"""Reading ahead in the background, in order."""

from __future__ import annotations

from collections import deque
from collections.abc import Generator, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

T = TypeVar("T")
_END = object()


def ahead(items: Iterator[T], count: int) -> Generator[T, None, None]:
    """The same items, of which one thread fetches up to `count` before they are asked for.

    mlx-data's own prefetching does this too, but its threads set those of OpenBLAS to one and back for every batch, in
    the middle of the step that computes meanwhile: a product's last bits depend on them, and no run could be repeated.
    What fetching an item raises is raised in its place. Close the generator when leaving early: it joins the thread.
    """
    pool = ThreadPoolExecutor(1, thread_name_prefix="ahead")
    try:
        coming = deque(pool.submit(next, items, _END) for _ in range(count))
        while (item := coming.popleft().result()) is not _END:
            coming.append(pool.submit(next, items, _END))
            yield item  # type: ignore[misc]
    finally:
        pool.shutdown(cancel_futures=True)
