"""Compare eagle-serve with mlx_lm.server and with the bare engine: the same chats from several clients at once.

    python benchmarks/servers.py --clients 1 4 8 --temperature 0 0.7 --json servers.json

Both servers run on this machine and take turns while the other sleeps. The engine decodes the same chats in this
process. Prompt caches are off, because all turns send the same chats. Chats with a looping greedy answer are left out,
as in eagle-bench. To measure the cost of HTTP, use more clients than slots, so that no slot is empty: --clients 16
--max-batch 8.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import os
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

import httpx

from eagle_mlx.catalog import embedded
from eagle_mlx.engine import Engine
from eagle_mlx.errors import ConfigError, EagleError
from eagle_mlx.machine import describe
from eagle_mlx.progress import progress_bar
from eagle_mlx.sampling_params import SamplingParams
from eagle_mlx.serve.bench import report
from eagle_mlx.serve.prompts import read_questions
from eagle_mlx.serve.speculation import Speculation
from eagle_mlx.target import load_target
from eagle_mlx.text import LEAST_DISTINCT, is_loop

Chat = list[dict[str, str]]

_MLX_LM = "import eagle_mlx, sys; from mlx_lm.server import main; sys.argv[0] = 'mlx_lm.server'; main()"
"""mlx-lm's server with this project's fast BLAS."""


@dataclass(frozen=True)
class Turn:
    """One pass of all chats through one server or the engine."""

    tokens: int
    seconds: float
    first_token_seconds: float
    """Median over the chats; the whole time if nothing is streamed."""


@dataclass(frozen=True)
class Comparison:
    clients: int
    temperature: float
    eagle_tokens_per_s: float
    mlx_lm_tokens_per_s: float
    engine_tokens_per_s: float
    ratio_to_mlx_lm: float
    """Median of the turns' ratios, as for the other ratio."""
    ratio_to_engine: float
    eagle_first_token_ms: float
    mlx_lm_first_token_ms: float

    def __str__(self) -> str:
        return (
            f"{self.clients} clients, temperature {self.temperature:g}: eagle-serve {self.eagle_tokens_per_s:.0f} "
            f"tokens/s, {self.ratio_to_mlx_lm:.2f} x mlx_lm.server ({self.mlx_lm_tokens_per_s:.0f}), "
            f"{self.ratio_to_engine:.2f} x the bare engine ({self.engine_tokens_per_s:.0f}); first token after "
            f"{self.eagle_first_token_ms:.0f} ms, mlx_lm.server {self.mlx_lm_first_token_ms:.0f} ms"
        )


class Server:
    """A server in its own process."""

    def __init__(self, command: Sequence[str], port: int):
        self.url = f"http://127.0.0.1:{port}/v1"
        self._process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)

    def wait(self, seconds: float = 120.0) -> None:
        """Wait until the server answers a chat. Raises ConfigError if it does not."""
        body = {"messages": [{"role": "user", "content": "x"}], "max_tokens": 1}
        end = time.monotonic() + seconds
        while time.monotonic() < end and self._process.poll() is None:
            with suppress(httpx.HTTPError):  # not listening yet
                if httpx.post(f"{self.url}/chat/completions", json=body, timeout=60).status_code == 200:
                    return
            time.sleep(0.2)
        raise ConfigError(f"the server at {self.url} did not start")

    def stop(self) -> None:
        self._process.terminate()
        self._process.wait(30)

    def turn(self, chats: Sequence[Chat], clients: int, body: dict[str, Any]) -> Turn:
        return asyncio.run(self._turn(chats, clients, body))

    async def _turn(self, chats: Sequence[Chat], clients: int, body: dict[str, Any]) -> Turn:
        turns = iter(chats)
        answers: list[tuple[int, float]] = []
        async with httpx.AsyncClient(timeout=600) as http:

            async def client() -> None:
                for chat in turns:
                    answers.append(
                        await _ask_with_retries(http, f"{self.url}/chat/completions", {**body, "messages": chat})
                    )

            start = time.perf_counter()
            await asyncio.gather(*(client() for _ in range(clients)))
            seconds = time.perf_counter() - start
        return Turn(sum(tokens for tokens, _ in answers), seconds, median(first for _, first in answers))


async def _ask_with_retries(http: httpx.AsyncClient, url: str, body: dict[str, Any]) -> tuple[int, float]:
    """Call `_ask`; retry if the connection is refused, as OpenAI's client does."""
    for pause in (0.05, 0.1, 0.2, 0.4, 0.8):
        try:
            return await _ask(http, url, body)
        except httpx.TransportError:
            await asyncio.sleep(pause)
    return await _ask(http, url, body)


async def _ask(http: httpx.AsyncClient, url: str, body: dict[str, Any]) -> tuple[int, float]:
    """Return the number of tokens in a streamed answer, and the seconds to its first text."""
    start, first, tokens = time.perf_counter(), 0.0, 0
    async with http.stream("POST", url, json={**body, "stream": True, "stream_options": {"include_usage": True}}) as r:
        if r.status_code != 200:
            raise ConfigError(f"{url} answered {r.status_code}: {(await r.aread()).decode()[:300]}")
        async for line in r.aiter_lines():
            if not first and '"content":' in line and '"content": ""' not in line and '"content":""' not in line:
                first = time.perf_counter() - start
            if '"completion_tokens"' in line:
                tokens = int(line.split('"completion_tokens":')[1].split(",")[0].strip(" }"))
    return tokens, first or time.perf_counter() - start


@contextmanager
def both_servers(target: str, head: str, max_batch: int) -> Iterator[tuple[Server, Server]]:
    ports = _free_port(), _free_port()
    ours = ["-m", "eagle_mlx.serve.api.cli", "--target", target, "--head", head, "--max-batch", str(max_batch)]
    theirs = ["-c", _MLX_LM, "--model", target, "--log-level", "ERROR"]
    # The same chats come repeatedly, so neither server may cache them.
    without_cache = ["--prefix-cache-gb", "0"], ["--prompt-cache-size", "1"]
    commands = [
        [sys.executable, *which, *cache_flags, "--port", str(port)]
        for which, cache_flags, port in zip((ours, theirs), without_cache, ports, strict=True)
    ]
    servers = [Server(command, port) for command, port in zip(commands, ports, strict=True)]
    try:
        for server in servers:
            server.wait()
        yield servers[0], servers[1]
    finally:
        for server in servers:
            server.stop()


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


class BareEngine:
    """The engine in this process, with as many slots as there are clients, or the maximum."""

    def __init__(self, target: str, head: str, max_batch: int):
        self.target, self.speculation, self.max_batch = load_target(target), Speculation(head=head), max_batch
        self._engines: dict[int, Engine] = {}

    def turn(self, chats: Sequence[Chat], clients: int, params: SamplingParams) -> Turn:
        if clients not in self._engines:
            proposer, policy = self.speculation.proposer(self.target), self.speculation.make_policy()
            self._engines[clients] = Engine(
                self.target, proposer, policy=policy, max_batch=min(clients, self.max_batch)
            )
        start = time.perf_counter()
        outputs = self._engines[clients].generate(chats, params)
        seconds = time.perf_counter() - start
        return Turn(sum(len(output.tokens) for output in outputs), seconds, seconds)

    def chats_that_do_not_loop(self, chats: Sequence[Chat], max_tokens: int) -> list[Chat]:
        outputs = Engine(self.target).generate(chats, SamplingParams(max_tokens=max_tokens))
        return [c for c, output in zip(chats, outputs, strict=True) if not is_loop(output.tokens, LEAST_DISTINCT)]


def compare(args: argparse.Namespace) -> list[Comparison]:
    engine = BareEngine(args.target, args.head, args.max_batch or max(args.clients))
    asked = [question.content for question in read_questions(args.prompts) if not isinstance(question.content, str)]
    found = [[dict(turn) for turn in content if isinstance(turn, Mapping)] for content in asked[: args.limit]]
    chats = engine.chats_that_do_not_loop(found, args.max_tokens)
    comparisons = []
    with both_servers(args.target, args.head, engine.max_batch) as (ours, theirs):
        for temperature, clients in itertools.product(args.temperature, args.clients):
            body = {"temperature": temperature, "max_tokens": args.max_tokens}
            params = SamplingParams(temperature, max_tokens=args.max_tokens)
            turns: list[tuple[Turn, Turn, Turn]] = []
            for repeat in progress_bar(range(args.repeats + 1), desc=f"{clients} clients, temperature {temperature:g}"):
                ways = [
                    partial(ours.turn, chats, clients, {**body, "model": Path(args.target).resolve().name}),
                    partial(theirs.turn, chats, clients, body),
                    partial(engine.turn, chats, clients, params),
                ]
                took = {which % 3: ways[which % 3]() for which in range(repeat, repeat + 3)}
                if repeat:
                    turns.append((took[0], took[1], took[2]))
            comparisons.append(_comparison(clients, temperature, turns))
            print(comparisons[-1], flush=True)
    return comparisons


def _comparison(clients: int, temperature: float, turns: Sequence[tuple[Turn, Turn, Turn]]) -> Comparison:
    rates = [[turn.tokens / turn.seconds for turn in each] for each in turns]
    return Comparison(
        clients,
        temperature,
        eagle_tokens_per_s=median(rate[0] for rate in rates),
        mlx_lm_tokens_per_s=median(rate[1] for rate in rates),
        engine_tokens_per_s=median(rate[2] for rate in rates),
        ratio_to_mlx_lm=median(rate[0] / rate[1] for rate in rates),
        ratio_to_engine=median(rate[0] / rate[2] for rate in rates),
        eagle_first_token_ms=1e3 * median(each[0].first_token_seconds for each in turns),
        mlx_lm_first_token_ms=1e3 * median(each[1].first_token_seconds for each in turns),
    )


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--target", default=None, help="folder of the model (default: the embedded one)")
    parser.add_argument("--head", default=None, help="folder of its head (default: the embedded one's)")
    parser.add_argument("--prompts", type=Path, help="jsonl of `messages` rows (default: held-out functions)")
    parser.add_argument("--limit", type=int, default=32, help="number of chats (default 32)")
    parser.add_argument("--max-tokens", type=int, default=128)
    parser.add_argument("--clients", type=int, nargs="+", default=[1, 4, 8])
    parser.add_argument("--max-batch", type=int, metavar="N", help="rows of eagle-serve (default: one per client)")
    parser.add_argument("--temperature", type=float, nargs="+", default=[0.0])
    parser.add_argument("--repeats", type=int, default=3, help="turns that are counted, after one that is not")
    parser.add_argument("--json", type=Path, metavar="FILE")
    args = parser.parse_args(argv)
    try:
        args.target = str(args.target or embedded("target"))
        args.head = str(args.head or embedded("head"))
        args.prompts = args.prompts or embedded("prompts.jsonl")
        os.environ.setdefault("HF_HUB_OFFLINE", "1")
        found = compare(args)
        if args.json is not None:
            report.write_json({"machine": vars(describe()), "servers": [asdict(f) for f in found]}, args.json)
    except EagleError as e:
        print(f"error: {e}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
