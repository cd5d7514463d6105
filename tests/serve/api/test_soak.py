"""Sixty-four clients at once, of which many leave: everybody gets an end, and nothing stays behind.

For two seconds in the suite, three in full; `SOAK_SECONDS=120 pytest tests/serve/api/test_soak.py` is the long run,
which watches the memory too.
"""

from __future__ import annotations

import asyncio
import gc
import os
import random
import time
from collections import Counter
from pathlib import Path

import httpx
import pytest

from eagle_mlx.serve.api.limits import Limits
from eagle_mlx.serve.api.model import Loaded
from tests.full import in_full
from tests.serve.api.live import DEPTH, Live, engine, live, wide

SECONDS = float(os.environ.get("SOAK_SECONDS", in_full("3", "2")))
LONG = 60.0
"""Seconds from which the memory says something."""
CLIENTS = 64


def resident() -> int:
    """Bytes of this process in memory, the server's and the clients'."""
    gc.collect()
    return int(Path("/proc/self/statm").read_text(encoding="ascii").split()[1]) * os.sysconf("SC_PAGE_SIZE")


async def client(http: httpx.AsyncClient, rng: random.Random, until: float, ends: Counter[str]) -> None:
    while time.monotonic() < until:
        stream = rng.random() < 0.6
        body = {
            "prompt": [rng.randint(3, 4000) for _ in range(rng.randint(1, 60))],
            "max_tokens": rng.randint(1, 40),
            "temperature": rng.choice((0.0, 1.0)),
            "num_speculative_tokens": rng.choice((0, 1, 3)),
            "stream": stream,
        }
        leaves = rng.random() < 0.3
        try:
            async with asyncio.timeout(rng.random() if leaves else 60):
                answer = await http.post("/v1/completions", json=body)
        except TimeoutError:
            ends["left" if leaves else "never answered"] += 1
            continue
        whole = answer.text.endswith("data: [DONE]\n\n") if stream else answer.text.endswith("}")
        ends[str(answer.status_code) if whole or answer.status_code != 200 else "cut short"] += 1
        if answer.status_code == 429:
            await asyncio.sleep(0.1 * rng.random())


async def crowd(server: Live, seconds: float, ends: Counter[str]) -> list[int]:
    """The memory after each quarter of the time."""
    until = time.monotonic() + seconds
    limits = httpx.Limits(max_connections=CLIENTS)
    memory = []
    async with httpx.AsyncClient(base_url=server.base, timeout=60, limits=limits) as http:
        clients = [asyncio.create_task(client(http, random.Random(i), until, ends)) for i in range(CLIENTS)]
        for _ in range(4):
            await asyncio.sleep(seconds / 4)
            memory.append(resident())
        await asyncio.gather(*clients)
    return memory


def test_everybody_gets_an_end_and_nothing_stays_behind(caplog: pytest.LogCaptureFixture) -> None:
    ends: Counter[str] = Counter()
    made = lambda: Loaded(engine(prefix_cache_bytes=1 << 20), "ngram", DEPTH)  # noqa: E731
    with live(made, settings=wide(Limits(queue=24))) as server:
        memory = asyncio.run(crowd(server, SECONDS, ends))
        assert set(ends) <= {"200", "429", "left"}
        assert min(ends.values()) > 0
        assert server.until(lambda: server.idle) < 1.0
        assert server.service.totals.requests["failed"] == 0
        print(f"{dict(ends)}; memory by quarter, MB: {[round(x / 1e6) for x in memory]}")
        assert not [record for record in caplog.records if record.levelname in ("ERROR", "CRITICAL")]
        assert SECONDS < LONG or memory[3] < 1.05 * memory[0], memory
