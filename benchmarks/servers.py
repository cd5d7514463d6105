"""Compare servers: the same chats from several clients at once.

    python benchmarks/servers.py --clients 1 4 8 --temperature 0 0.7
    python benchmarks/servers.py --clients 1 4 --peers vllm-mlx rapid-mlx --python out/servers/bin/python

The servers run on this machine and take turns while the others sleep. The bare engine decodes the same chats in this
process. All load the model in float32, because bfloat16 is slow on a CPU, and use the same BLAS. Prompt caches are off,
because all turns send the same chats. Chats with a looping greedy answer are left out, as in eagle-bench. To measure
the cost of HTTP, use more clients than slots, so that no slot is empty: --clients 16 --max-batch 8.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import json
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median
from typing import Any, Protocol

import httpx
from peers import blas_of_children, copy_in_float32

from eagle_mlx import blas
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
OURS, REFERENCE, ENGINE = "eagle-serve", "mlx_lm.server", "bare engine"
PEERS = {
    # Both batch only if told to. rapid-mlx asks before it downloads, and writes caches, unless told not to.
    "vllm-mlx": ("vllm_mlx.cli", "--continuous-batching --disable-prefix-cache --offline"),
    "rapid-mlx": ("rapid_mlx.cli", "--disable-prefix-cache --disable-disk-caches --no-preflight --yes"),
}
"""Programs with a server of OpenAI's API, with module and flags."""


@dataclass(frozen=True)
class Turn:
    """One pass of all chats through one server or the engine."""

    texts: tuple[str, ...]
    tokens: int
    seconds: float
    cpu_seconds: float
    """CPU seconds of all of the server's threads."""
    first_token_seconds: float
    """Median over the chats; the whole time if nothing is streamed."""


@dataclass(frozen=True)
class Figures:
    """What one server did in one setting."""

    server: str
    clients: int
    temperature: float
    tokens_per_s: float
    of_reference: float
    """Median of the turns' ratios of tokens/s."""
    cpu_seconds_per_1000: float
    """CPU seconds per 1,000 tokens over all turns."""
    first_token_ms: float
    same_texts: int
    """Texts equal to the reference's in the same turn."""
    texts: int


class Contestant(Protocol):
    def turn(self, chats: Sequence[Chat], clients: int, temperature: float, max_tokens: int) -> Turn: ...


class Server:
    """A server in its own process, which a context manager ends."""

    def __init__(self, command: Sequence[str], port: int, model: str | None):
        self.url = f"http://127.0.0.1:{port}/v1/chat/completions"
        self._model = {"model": model} if model else {}
        self._process = subprocess.Popen(
            command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, env=blas_of_children()
        )

    def wait(self, seconds: float = 300.0) -> None:
        """Wait until the server answers a chat. Raises ConfigError if it does not."""
        body = {**self._model, "messages": [{"role": "user", "content": "x"}], "max_tokens": 1}
        end = time.monotonic() + seconds
        while time.monotonic() < end and self._process.poll() is None:
            with suppress(httpx.HTTPError):  # not listening yet
                if httpx.post(self.url, json=body, timeout=60).status_code == 200:
                    return
            time.sleep(0.2)
        raise ConfigError(f"the server at {self.url} did not start: {' '.join(map(str, self._process.args))}")  # type: ignore[arg-type]  # a list

    def stop(self) -> None:
        self._process.terminate()
        try:
            self._process.wait(30)
        except subprocess.TimeoutExpired:
            self._process.kill()

    def turn(self, chats: Sequence[Chat], clients: int, temperature: float, max_tokens: int) -> Turn:
        return asyncio.run(self._turn(chats, clients, {"temperature": temperature, "max_tokens": max_tokens}))

    async def _turn(self, chats: Sequence[Chat], clients: int, settings: dict[str, Any]) -> Turn:
        turns = iter(enumerate(chats))
        answers: dict[int, tuple[str, int, float]] = {}
        async with httpx.AsyncClient(timeout=600) as http:

            async def client() -> None:
                for number, chat in turns:
                    body = {**self._model, **settings, "messages": chat}
                    answers[number] = await _ask_with_retries(http, self.url, body)

            cpu, start = cpu_seconds(self._process.pid), time.perf_counter()
            await asyncio.gather(*(client() for _ in range(clients)))
            seconds, cpu = time.perf_counter() - start, cpu_seconds(self._process.pid) - cpu
        texts, tokens, firsts = zip(*(answers[number] for number in range(len(chats))), strict=True)
        return Turn(texts, sum(tokens), seconds, cpu, median(firsts))


def cpu_seconds(process: int) -> float:
    """Return the CPU seconds of a process so far, as `ps` prints them: whole seconds on Linux."""
    printed = subprocess.run(["ps", "-o", "time=", "-p", str(process)], capture_output=True, text=True, check=True)
    days, _, clock = printed.stdout.strip().rpartition("-")
    seconds = 0.0
    for part in clock.split(":"):
        seconds = 60 * seconds + float(part)
    return 86400 * int(days or 0) + seconds


async def _ask_with_retries(http: httpx.AsyncClient, url: str, body: dict[str, Any]) -> tuple[str, int, float]:
    """Call `_ask`; retry if the connection is refused, as OpenAI's client does."""
    for pause in (0.05, 0.1, 0.2, 0.4, 0.8):
        try:
            return await _ask(http, url, body)
        except httpx.TransportError:
            await asyncio.sleep(pause)
    return await _ask(http, url, body)


async def _ask(http: httpx.AsyncClient, url: str, body: dict[str, Any]) -> tuple[str, int, float]:
    """Return a streamed answer, its number of tokens, and the seconds to its first text."""
    start, first, tokens, text = time.perf_counter(), 0.0, 0, ""
    async with http.stream("POST", url, json={**body, "stream": True, "stream_options": {"include_usage": True}}) as r:
        if r.status_code != 200:
            raise ConfigError(f"{url} answered {r.status_code}: {(await r.aread()).decode()[:300]}")
        async for line in r.aiter_lines():
            if not line.startswith("data: {"):
                continue
            chunk = json.loads(line.removeprefix("data: "))
            piece = "".join(choice["delta"].get("content") or "" for choice in chunk["choices"])
            if piece and not first:
                first = time.perf_counter() - start
            text += piece
            tokens = (chunk.get("usage") or {}).get("completion_tokens", tokens)
    return text, tokens, first or time.perf_counter() - start


@contextmanager
def running(args: argparse.Namespace, max_batch: int) -> Iterator[dict[str, Server]]:
    """Start all servers; end them afterwards. Raises ConfigError if one does not start."""
    ours = [sys.executable, "-m", "eagle_mlx.serve.api.cli", "--target", args.target, "--head", args.head]
    commands = {
        OURS: [*ours, "--max-batch", str(max_batch), "--prefix-cache-gb", "0", "--no-memory"],
        REFERENCE: [sys.executable, "-m", "mlx_lm", "server", "--model", args.target, "--prompt-cache-size", "1"],
    }
    for peer in args.peers:
        module, flags = PEERS[peer]
        commands[peer] = [str(args.python), "-m", module, "serve", args.target, *flags.split()]
    models = {OURS: Path(args.target).resolve().name, REFERENCE: None}
    with ExitStack() as stack:
        servers: dict[str, Server] = {}
        for name, command in commands.items():
            port = _free_port()
            servers[name] = Server([*command, "--port", str(port)], port, models.get(name, args.target))
            stack.callback(servers[name].stop)
        for server in servers.values():
            server.wait()
        yield servers


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


class BareEngine:
    """The engine in this process, with as many slots as there are clients, or the maximum."""

    def __init__(self, target: str, head: str, max_batch: int):
        self.speculation = Speculation(head=head, no_memory=True)  # the same prompts are decoded again and again
        self.target, self.max_batch = load_target(target), max_batch
        self._engines: dict[int, Engine] = {}

    def turn(self, chats: Sequence[Chat], clients: int, temperature: float, max_tokens: int) -> Turn:
        if clients not in self._engines:
            proposer, policy = self.speculation.proposer(self.target), self.speculation.make_policy()
            self._engines[clients] = Engine(
                self.target, proposer, policy=policy, max_batch=min(clients, self.max_batch)
            )
        cpu, start = time.process_time(), time.perf_counter()
        outputs = self._engines[clients].generate(chats, SamplingParams(temperature, max_tokens=max_tokens))
        seconds, cpu = time.perf_counter() - start, time.process_time() - cpu
        texts = tuple(output.text for output in outputs)
        return Turn(texts, sum(len(output.tokens) for output in outputs), seconds, cpu, seconds)

    def chats_that_do_not_loop(self, chats: Sequence[Chat], max_tokens: int) -> list[Chat]:
        outputs = Engine(self.target).generate(chats, SamplingParams(max_tokens=max_tokens))
        return [c for c, output in zip(chats, outputs, strict=True) if not is_loop(output.tokens, LEAST_DISTINCT)]


def compare(args: argparse.Namespace) -> list[Figures]:
    engine = BareEngine(args.target, args.head, args.max_batch or max(args.clients))
    contents = [question.content for question in read_questions(args.prompts) if not isinstance(question.content, str)]
    questions = [[dict(turn) for turn in content if isinstance(turn, Mapping)] for content in contents[: args.limit]]
    chats = engine.chats_that_do_not_loop(questions, args.max_tokens)
    if not chats:
        raise ConfigError(f"all {len(questions)} answers loop; give other --prompts or a larger --limit")
    figures: list[Figures] = []
    with running(args, engine.max_batch) as servers:
        all_of_them: dict[str, Contestant] = {**servers, ENGINE: engine}
        names = list(all_of_them)
        for temperature, clients in itertools.product(args.temperature, args.clients):
            turns: list[dict[str, Turn]] = []
            for repeat in progress_bar(range(args.repeats + 1), desc=f"{clients} clients, temperature {temperature:g}"):
                first = repeat % len(names)
                took = {
                    name: all_of_them[name].turn(chats, clients, temperature, args.max_tokens)
                    for name in names[first:] + names[:first]
                }
                turns += [took] if repeat else []  # the first pass warms up
            figures += [_figures(name, clients, temperature, turns) for name in names]
            print(table(figures[-len(names) :]), flush=True)
    return figures


def _figures(name: str, clients: int, temperature: float, turns: Sequence[dict[str, Turn]]) -> Figures:
    rates = [{server: turn.tokens / turn.seconds for server, turn in took.items()} for took in turns]
    pairs = [pair for took in turns for pair in zip(took[name].texts, took[REFERENCE].texts, strict=True)]
    return Figures(
        name,
        clients,
        temperature,
        tokens_per_s=median(rate[name] for rate in rates),
        of_reference=median(rate[name] / rate[REFERENCE] for rate in rates),
        cpu_seconds_per_1000=1e3
        * sum(took[name].cpu_seconds for took in turns)
        / sum(took[name].tokens for took in turns),
        first_token_ms=1e3 * median(took[name].first_token_seconds for took in turns),
        same_texts=sum(text == reference for text, reference in pairs),
        texts=len(pairs),
    )


def table(figures: Sequence[Figures]) -> str:
    """Return a Markdown table."""
    lines = [
        f"| clients | temperature | server | tokens/s | of {REFERENCE} | CPU s per 1,000 tokens | first token, ms "
        f"| texts as {REFERENCE}'s |",
        "|---" * 8 + "|",
    ]
    for taken in figures:
        first = "" if taken.server == ENGINE else f"{taken.first_token_ms:.0f}"
        same = f"{taken.same_texts} of {taken.texts}" if not taken.temperature else ""
        lines.append(
            f"| {taken.clients} | {taken.temperature:g} | {taken.server} | {taken.tokens_per_s:.0f} "
            f"| {taken.of_reference:.2f} | {taken.cpu_seconds_per_1000:.1f} | {first} | {same} |"
        )
    return "\n".join(lines)


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--target", type=Path, help="folder of the model (default: the embedded one)")
    parser.add_argument("--head", default=None, help="folder of its head (default: the embedded one's)")
    parser.add_argument("--peers", nargs="+", choices=list(PEERS), default=[], help="other servers (none)")
    parser.add_argument("--python", type=Path, default=Path(sys.executable), help="Python with the peers' packages")
    parser.add_argument("--prompts", type=Path, help="jsonl of `messages` rows (default: held-out functions)")
    parser.add_argument("--limit", type=int, default=32, help="number of chats (default 32)")
    parser.add_argument("--max-tokens", type=int, default=128)
    parser.add_argument("--clients", type=int, nargs="+", default=[1, 4, 8])
    parser.add_argument("--max-batch", type=int, metavar="N", help="rows of eagle-serve (default: one per client)")
    parser.add_argument("--temperature", type=float, nargs="+", default=[0.0])
    parser.add_argument("--repeats", type=int, default=3, help="turns that are counted, after one that is not")
    parser.add_argument("--json", type=Path, metavar="FILE")
    args = parser.parse_args(argv)
    args.python = args.python.absolute()
    print(f"blas: {blas.activate()}; {describe()}")
    try:
        args.head = str(args.head or embedded("head"))
        args.prompts = args.prompts or embedded("prompts.jsonl")
        with tempfile.TemporaryDirectory() as folder:
            copy_in_float32(args.target or embedded("target"), target := Path(folder) / "target")
            args.target = str(target)
            comparison = compare(args)
        if args.json is not None:
            report.write_json({"machine": vars(describe()), "servers": [asdict(f) for f in comparison]}, args.json)
    except EagleError as e:
        print(f"error: {e}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
