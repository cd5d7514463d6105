"""Concurrent clients of three APIs, a third of which disconnect mid-answer, and an account of the results."""

from __future__ import annotations

import asyncio
import json
import random
import statistics
import subprocess
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import httpx

from tests.serve.api.dialects import CHAT, DIALECTS, Answer, Dialect, Question, read

LEAVING = 1 / 3
"""Share of requests whose client does not wait for the end."""
STREAMED = 0.6
PATIENCE = 600.0
"""Seconds after which an answer counts as endless: a hundred times as long as in a full queue.

On a machine with ten other busy processes one took 104 s.
"""
CLOSE = 1e-3
"""Rounding could swap two likeliest tokens with closer log probabilities; it is about 3e-5."""
FINE = ("answered", "left", "refused")
Texts = Mapping[tuple[str, Question], str]
"""Each API's answer to a question when it is the only request."""

_OPENINGS = ("def read(path):", "class Stack:", "import os\n\n\ndef", "What does a list do?", "x = [1, 2, 3]\n")
_SYSTEM = "You answer in Python, with few words, and you say nothing that was not asked. " * 4


def questions() -> list[Question]:
    """Return questions with known answers: some share a prefix, some are long, some have a format."""
    mixed = [Question((("user", text),), max_tokens=8 + 6 * i) for i, text in enumerate(_OPENINGS)]
    mixed += [Question((("system", _SYSTEM), ("user", text))) for text in _OPENINGS[:3]]
    turns = (("user", _OPENINGS[0]), ("assistant", "return 1"), ("user", "And now?"))
    mixed += [Question(turns), Question((("user", " ".join(_OPENINGS) * 6),), max_tokens=12)]
    weather = (("user", "How is the weather in Oslo?"),)
    return [*mixed, Question(weather, "schema", 80), Question(weather, "tool", 200)]


def any_question(rng: random.Random) -> Question:
    """Return a new question."""
    sampling = {"temperature": rng.choice((0.0, 0.7, 1.0)), "seed": rng.randint(0, 999)}
    form = rng.choices(("text", "schema", "tool"), (8, 1, 1))[0]
    limit, most = (rng.randint(1, 40), 40) if form == "text" else (200, 10)  # the tiny model's context is 512 tokens
    words = " ".join(f"name_{rng.randint(0, 9999)}" for _ in range(rng.randint(1, most)))
    return Question((("user", f"{rng.choice(_OPENINGS)} {words}"),), form, limit, tuple(sampling.items()))


@dataclass
class Account:
    """What became of the requests, by API and outcome, and other observations."""

    ends: Counter[tuple[str, str, str]] = field(default_factory=Counter)
    seconds: dict[tuple[str, str], list[float]] = field(default_factory=dict)
    forms: Counter[str] = field(default_factory=Counter)
    compared: int = 0
    """Answers, whole or partial, that were compared with the text alone."""
    memory: list[int] = field(default_factory=list)
    """Bytes at regular intervals."""
    faults: list[str] = field(default_factory=list)

    def note(self, dialect: Dialect, stream: bool, end: str, seconds: float, fault: str = "") -> None:
        way = "streamed" if stream else "whole"
        self.ends[dialect.name, way, end] += 1
        if end == "answered":
            self.seconds.setdefault((dialect.name, way), []).append(seconds)
        if end not in FINE:
            self.faults.append(f"{dialect.name}, {way}: {end}: {fault}")

    @property
    def growth(self) -> float:
        """Return the median memory in the second half divided by that in the first half, minus 1."""
        half = len(self.memory) // 2
        return statistics.median(self.memory[half:]) / statistics.median(self.memory[:half]) - 1

    def table(self) -> str:
        others = sorted({end for _, _, end in self.ends} - set(FINE))
        columns = [*FINE, *others, "median s", "95 % s"]
        lines = [f"| API | way | {' | '.join(columns)} |", "|---" * (len(columns) + 2) + "|"]
        for name, way in sorted({key[:2] for key in self.ends}):
            took = sorted(self.seconds.get((name, way), [0.0]))
            numbers = [str(self.ends[name, way, end]) for end in (*FINE, *others)]
            numbers += [f"{statistics.median(took):.2f}", f"{took[int(0.95 * len(took))]:.2f}"]
            lines.append(f"| {name} | {way} | {' | '.join(numbers)} |")
        lines.append(f"\n{dict(self.forms)}; {self.compared} compared with what is said alone")
        if len(self.memory) > 1:
            quarter = max(1, len(self.memory) // 4)
            medians = [statistics.median(self.memory[i : i + quarter]) / 1e6 for i in range(0, 4 * quarter, quarter)]
            listing = ", ".join(f"{megabytes:.0f}" for megabytes in medians)
            lines.append(f"memory by quarter, MB: {listing}; second half of the first: {self.growth:+.1%}")
        return "\n".join(lines)


def resident(pid: int) -> int:
    """Return the bytes in memory of a process and its children. Shared memory counts once if the system reports it."""
    listed = subprocess.run(["ps", "-A", "-o", "pid=,ppid=,rss="], capture_output=True, text=True, check=True).stdout
    rows = [[int(number) for number in line.split()] for line in listed.splitlines()]
    family = {pid}
    while more := {child for child, parent, _ in rows if parent in family} - family:
        family |= more
    return 1024 * sum(_share(own, kilobytes) for own, _, kilobytes in rows if own in family)


def _share(pid: int, kilobytes: int) -> int:
    """Return a process's kilobytes, with shared pages divided by the number of their users."""
    try:
        rollup = Path(f"/proc/{pid}/smaps_rollup").read_text(encoding="ascii")
    except OSError:  # on macOS, or if it has ended
        return kilobytes
    return next((int(line.split()[1]) for line in rollup.splitlines() if line.startswith("Pss:")), 0)


def texts_alone(base: str, chosen: Sequence[Question]) -> dict[tuple[str, Question], str]:
    """Return each API's answer to each question, asked alone and without drafts.

    Questions are left out if rounding could decide their answer.
    """
    texts = {}
    with httpx.Client(base_url=base, timeout=PATIENCE) as http:
        for question in chosen:
            if question.form == "text" and _least_gap(http, question) < CLOSE:
                continue
            for dialect in DIALECTS:
                got = http.post(dialect.path, json={**dialect.body(question), "spec_decode": "none"})
                assert got.status_code == 200, got.text
                texts[dialect.name, question] = dialect.whole(got.json()).said
    return texts


def _least_gap(http: httpx.Client, question: Question) -> float:
    fields = {**CHAT.body(question), "spec_decode": "none", "logprobs": True, "top_logprobs": 2}
    content = http.post(CHAT.path, json=fields).json()["choices"][0]["logprobs"]["content"]
    best = [[token["logprob"] for token in place["top_logprobs"]] for place in content]
    return min((first - second for first, second in best), default=CLOSE)


async def crowd(base: str, clients: int, seconds: float, texts: Texts, memory: Callable[[], int]) -> Account:
    """Run this many clients for this long, and wait for their last answers."""
    account, until = Account(), time.monotonic() + seconds
    limits = httpx.Limits(max_connections=None, max_keepalive_connections=clients)
    async with httpx.AsyncClient(base_url=base, timeout=None, limits=limits) as http:
        asking = [asyncio.create_task(_client(http, random.Random(i), until, texts, account)) for i in range(clients)]
        while time.monotonic() < until:
            await asyncio.sleep(min(1.0, seconds / 8))
            account.memory.append(await asyncio.to_thread(memory))
        await asyncio.gather(*asking)
    return account


async def _client(http: httpx.AsyncClient, rng: random.Random, until: float, texts: Texts, account: Account) -> None:
    pool: Sequence[Question] = list(dict.fromkeys(question for _, question in texts))
    while time.monotonic() < until:
        dialect, stream, leaves = rng.choice(DIALECTS), rng.random() < STREAMED, rng.random() < LEAVING
        question = rng.choice(pool) if rng.random() < 0.5 else any_question(rng)
        body = {**dialect.body(question), "num_speculative_tokens": rng.choice((0, 1, 3, None)), "stream": stream}
        account.forms[question.form] += 1
        begun = time.monotonic()
        try:
            async with asyncio.timeout(PATIENCE):
                ask = _streamed if stream else _whole
                end, text = await ask(http, dialect, body, leaves, rng)
        except TimeoutError:
            end, text = "no end", f"within {PATIENCE:g} s"
        except httpx.HTTPError as e:
            end, text = "connection lost", repr(e)
        alone = texts.get((dialect.name, question))
        if alone is not None and end in ("answered", "left") and text is not None:
            account.compared += 1
            if not (text == alone if end == "answered" else alone.startswith(text)):
                end, text = "wrong text", f"{text!r}, and alone {alone!r}"
        account.note(dialect, stream, end, time.monotonic() - begun, text or "")
        if end == "refused":
            await asyncio.sleep(1 + 2 * rng.random())  # as Retry-After says, or a bit longer


async def _whole(
    http: httpx.AsyncClient, dialect: Dialect, body: dict[str, object], leaves: bool, rng: random.Random
) -> tuple[str, str | None]:
    """Return how a request ended, and its text."""
    try:
        async with asyncio.timeout(2 * rng.random() if leaves else None):
            got = await http.post(dialect.path, json=body)
    except TimeoutError:
        return "left", None
    if got.status_code != 200:
        return _refused(got.status_code), got.text
    return _judged(dialect.whole(json.loads(got.text)))


async def _streamed(
    http: httpx.AsyncClient, dialect: Dialect, body: dict[str, object], leaves: bool, rng: random.Random
) -> tuple[str, str | None]:
    """The same for streams. A client that leaves does so after some events."""
    async with http.stream("POST", dialect.path, json=body) as got:
        if got.status_code != 200:
            return _refused(got.status_code), (await got.aread()).decode()
        answer = await read(dialect, got.aiter_lines(), rng.randint(1, 8) if leaves else None)
    if leaves and not answer.has_ended and not answer.error:
        return "left", answer.text if not answer.calls else None
    return _judged(answer)


def _refused(status: int) -> str:
    return "refused" if status == 429 else "server error" if status >= 500 else f"status {status}"


def _judged(answer: Answer) -> tuple[str, str]:
    if answer.error:
        return "server error", answer.error
    return ("answered", answer.said) if answer.has_ended else ("cut short", answer.text)
