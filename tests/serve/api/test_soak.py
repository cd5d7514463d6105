"""Sixty-four clients of three APIs, a third of which disconnect: every request ends, and nothing is left over.

It takes a second, or three in full. `SOAK_SECONDS=120 pytest tests/serve/api/test_soak.py` is the long run, with
`eagle-serve` as a separate process whose memory is observed. tests/clients/README.md lists its checks.
"""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from threading import Thread

import httpx
import pytest
from prometheus_client.parser import text_string_to_metric_families

from eagle_mlx.serve.api.limits import Limits
from tests.fakes import EMBEDDED_TARGET
from tests.full import in_full
from tests.serve.api.crowd import Account, crowd, questions, resident, texts_alone
from tests.serve.api.dialects import Question
from tests.serve.api.given import HEAD, TARGET
from tests.serve.api.live import live, loaded_format, wide
from tests.serve.chat.formats import with_format

LONG = float(os.environ.get("SOAK_SECONDS", 0))
CLIENTS = int(os.environ.get("SOAK_CLIENTS", 64))
QUEUE = 24
"""Smaller than the number of clients, so that some are refused."""
GROWTH = 0.05
"""Allowed memory growth, second half of the time against the first."""


def numbers(base: str) -> dict[str, float]:
    """Return the server's metrics, summed over labels."""
    totals: dict[str, float] = {}
    for family in text_string_to_metric_families(httpx.get(f"{base}/metrics", timeout=20).text):
        for sample in family.samples:
            name = sample.name + (f" {sample.labels['outcome']}" if "outcome" in sample.labels else "")
            totals[name] = totals.get(name, 0) + sample.value
    return totals


def seconds_until_idle(base: str, most: float = 20.0) -> float:
    begun = time.monotonic()
    while (now := numbers(base))["eagle:rows"] + now["eagle:queue"] and time.monotonic() - begun < most:
        time.sleep(0.01)
    return time.monotonic() - begun


@contextmanager
def process(folder: Path) -> Iterator[tuple[str, subprocess.Popen[str], list[str]]]:
    """Run eagle-serve with the given target and head, or the included ones; yield its address, process and output.

    Its prefix cache holds about five texts, so it is full before memory is measured; the disk holds about a hundred.
    """
    target = with_format(Path(TARGET or EMBEDDED_TARGET), "qwen", folder / "target")
    head = HEAD or EMBEDDED_TARGET.parent / "head"
    flags = ["--target", target, "--head", head, "--port", 0, "--max-queue", QUEUE, "--prefix-cache-gb", 0.004]
    flags += ["--prefix-cache-dir", folder / "prefixes", "--prefix-disk-gb", 0.1]
    start = "from eagle_mlx.serve.api.cli import command; command()"
    command, lines = [sys.executable, "-c", start, *map(str, flags)], list[str]()
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as running:
        assert running.stderr is not None
        for line in running.stderr:
            lines.append(line.rstrip())
            if line.startswith("ready:"):
                break
        assert running.poll() is None, lines
        reading = Thread(target=lambda: lines.extend(map(str.rstrip, running.stderr or ())), daemon=True)
        reading.start()
        try:
            yield next(line for line in lines if line.startswith("ready:")).removeprefix("ready: "), running, lines
        finally:
            running.terminate()
            running.wait(60)
            reading.join(10)


def soak(base: str, pid: int, seconds: float, chosen: Sequence[Question]) -> Account:
    """Run the crowd, and check what it leaves behind."""
    account = asyncio.run(crowd(base, CLIENTS, seconds, texts_alone(base, chosen), partial(resident, pid)))
    if (idle := seconds_until_idle(base)) > 1.0:
        account.faults.append(f"the last row was free {idle:.1f} s behind the last client")
    if failed := numbers(base).get("eagle:requests_total failed"):
        account.faults.append(f"{failed:.0f} requests failed")
    return account


def test_everybody_gets_an_end_and_nothing_stays_behind(caplog: pytest.LogCaptureFixture) -> None:
    with live(lambda: loaded_format("qwen", prefix_cache_bytes=1 << 20), wide(Limits(queue=QUEUE))) as server:
        account = soak(server.base, os.getpid(), in_full(3.0, 1.0), in_full(questions(), questions()[::4]))
        assert server.until(lambda: server.idle) < 1.0
    assert not account.faults, account.table()
    ends = {end for _, _, end in account.ends}
    assert ends >= {"answered", "left"}
    assert account.compared > 0
    assert not [record for record in caplog.records if record.levelname in ("ERROR", "CRITICAL")]


@pytest.mark.skipif(not LONG, reason="SOAK_SECONDS says for how long")
def test_the_memory_is_steady(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with process(tmp_path) as (base, running, lines):
        account = soak(base, running.pid, LONG, questions())
        running.send_signal(signal.SIGTERM)
        if status := running.wait(60):
            account.faults.append(f"the server ended with {status}")
    account.faults += [line for line in lines if "Traceback" in line or "ERROR" in line or "Exception" in line]
    if account.growth > GROWTH:
        account.faults.append(f"the memory grew by {account.growth:.1%}, which is more than {GROWTH:.0%}")
    with capsys.disabled():
        print(f"\n{CLIENTS} clients, {LONG:g} s, {TARGET or 'the included model'}\n\n{account.table()}")
        print("\n".join(["", *account.faults]) if account.faults else "no fault")
    assert not account.faults
