"""Measure how long one client waits while another sends the worst requests.

    python benchmarks/two_clients.py
    python benchmarks/two_clients.py --only chunks headers --seconds 5

Starts `eagle-serve` and sends requests from two of this machine's addresses, which Linux provides. Reports the first
token of a short chat, `/health`, and the tokens of a text of 100 KB. The exit status says whether the median of each is
at most twice the median before the attack, plus one chunk (`--prefill-ms`). The process that attacks takes a core, too:
`spin` shows what that costs. A connection that the server closes is opened again after a second.
"""

from __future__ import annotations

import argparse
import json
import os
import socket
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing, contextmanager
from dataclasses import dataclass
from multiprocessing import get_context
from pathlib import Path
from threading import Thread
from typing import Any

import httpx

FIRST, SECOND, KEY = "127.0.0.1", "127.0.0.2", "two-clients"
SPIN = "spin: no requests, a busy process"
CHAT, RESPONSES, COMPLETIONS = "/v1/chat/completions", "/v1/responses", "/v1/completions"
ENDLESS = {"messages": [{"role": "user", "content": "Write a class."}], "stream": True, "ignore_eos": True}
LINES = " ".join(f"name_{number} = {number * 7}" for number in range(170))
"""About 1,300 tokens."""
BODY = 8 << 20
"""The default limit of a body."""
CONTAINERS = 19_900
"""Just below the limit of objects and lists."""
PIECE, PAUSE = 1 << 15, 1 / 16
"""Bytes and seconds between pieces of a paced request: 0.5 MB/s."""


@dataclass(frozen=True)
class Attack:
    """Requests of the first client. Each connection sends its request again and again."""

    request: bytes
    connections: int = 8
    stays: bool = False
    """Whether to send it once and never read the answer, instead of again and again."""
    leaves: bool = False
    """Whether to close the connection without waiting for the answer."""
    is_paced: bool = False


def post(path: str, content: bytes, key: str = KEY, framing: str = "") -> bytes:
    framing = framing or f"Content-Length: {len(content)}"
    head = f"POST {path} HTTP/1.1\r\nHost: {FIRST}\r\nContent-Type: application/json\r\nx-api-key: {key}\r\n{framing}"
    return f"{head}\r\n\r\n".encode() + content


def posts(path: str, *bodies: dict[str, Any]) -> list[Attack]:
    """Return requests that are sent once, without reading the answers."""
    return [Attack(post(path, json.dumps(body).encode()), 1, stays=True) for body in bodies]


def repeated(head: str, item: str, tail: str, most: int = BODY) -> bytes:
    """Return a JSON text of at most 8 MB with at most `most` items."""
    count = min(most, (BODY - len(head) - len(tail)) // (len(item) + 1))
    return f"{head}{','.join([item] * count)}{tail}".encode()


TOOLS = ('{"input":"x","max_output_tokens":1,"tools":[', '{"type":"x"}', ',{"type":"function","name":"f"}]}')
REASONING = ('{"max_output_tokens":1,"input":[', '{"type":"reasoning"}', ',{"role":"user","content":"x"}]}')
CALLS = (
    '{"max_tokens":1,"messages":[{"role":"assistant","tool_calls":[',
    '{"id":"a","function":{"name":"f","arguments":"{}"}}',
    "]}]}",
)
LISTS = ('{"max_tokens":1,"prompt":[', "[]", "]}")
TEXT = json.dumps({"prompt": (LINES + "\n") * (BODY // (len(LINES) + 2) - 1)}).encode()
TINY_CHUNKS = b"1\r\n \r\n" * (BODY // 6)
HEADERS = "\r\n".join(["a:b"] * 12_000)


def attacks() -> dict[str, list[Attack]]:
    """Return what the first client sends, by name."""
    every = {
        SPIN: [],
        "endless: 8 requests without max_tokens": posts(
            CHAT, *(ENDLESS | {"seed": seed, "temperature": 1.0} for seed in range(8))
        ),
        "unread: 30 streams, n = 4": posts(CHAT, *[ENDLESS | {"n": 4, "logprobs": True, "top_logprobs": 20}] * 30),
        "prompts: 64 long ones in one request": posts(
            COMPLETIONS,
            {"prompt": [f"# {number}\n{LINES}" for number in range(64)], "max_tokens": 200, "stream": True},
        ),
        "chunks: 32 bodies of one byte per chunk": [
            Attack(post(CHAT, TINY_CHUNKS, framing="Transfer-Encoding: chunked"), 32, is_paced=True)
        ],
        "headers: 12,000 lines": [Attack(post(CHAT, b"{}", framing=f"{HEADERS}\r\nContent-Length: 2"))],
        "gone: texts of 8 MB whose clients leave": [Attack(post("/tokenize", TEXT), 4, leaves=True)],
        "text: 8 MB": [Attack(post("/tokenize", TEXT))],
    }
    shapes = {"tools": (RESPONSES, TOOLS), "reasoning": (RESPONSES, REASONING), "calls": (CHAT, CALLS)}
    for name, (path, shape) in {**shapes, "lists": (COMPLETIONS, LISTS)}.items():
        every[f"{name}: bodies of 8 MB"] = [Attack(post(path, repeated(*shape)))]
        most = CONTAINERS // (2 if shape is CALLS else 1)
        every[f"{name}: {most:,} in a body"] = [Attack(post(path, repeated(*shape, most)))]
    every["keyless: bodies of 8 MB without a key"] = [Attack(post(RESPONSES, repeated(*TOOLS), key="none"))]
    return every


def send(port: int, attack: Attack, until: float) -> None:
    """Send an attack's request over one connection after another."""
    while (left := until - time.monotonic()) > 0:
        with closing(socket.socket()) as connection:
            connection.settimeout(left)
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
            try:
                connection.connect((FIRST, port))
                for start in range(0, len(attack.request), PIECE):
                    connection.sendall(attack.request[start : start + PIECE])
                    time.sleep(PAUSE if attack.is_paced else 0)
                if attack.stays:
                    time.sleep(max(0.0, until - time.monotonic()))
                if not attack.leaves:
                    connection.recv(4096)
            except OSError:
                time.sleep(1)
        time.sleep(0.5 if attack.leaves else 0)


def attack_all(port: int, name: str, seconds: float) -> None:
    """Run all connections of the attack of this name. Runs in a process of its own."""
    until = time.monotonic() + seconds
    for attack in attacks()[name]:
        for _ in range(attack.connections):
            Thread(target=send, args=(port, attack, until), daemon=True).start()
    while time.monotonic() < until:
        time.sleep(0 if name == SPIN else 0.1)


@contextmanager
def server(target: str | None, port: int, prefill_ms: float) -> Iterator[str]:
    """Run a server until the block ends. Yield its address."""
    command = [str(Path(sys.executable).with_name("eagle-serve")), "--port", str(port), "--prefill-ms", str(prefill_ms)]
    command += [] if target is None else ["--target", target]
    quiet = subprocess.DEVNULL
    process = subprocess.Popen(command, stdout=quiet, stderr=quiet, env={**os.environ, "EAGLE_API_KEY": KEY})
    try:
        base = f"http://{FIRST}:{port}"
        while not _is_ready(base):
            if process.poll() is not None:
                raise SystemExit(f"error: {' '.join(command)} ended with {process.returncode}; run it to see why")
            time.sleep(0.2)
        yield base
    finally:
        process.terminate()
        process.wait()


def _is_ready(base: str) -> bool:
    try:
        return httpx.get(f"{base}/health").status_code == 200
    except httpx.TransportError:
        return False


def first_token(client: httpx.Client) -> float:
    """Return the seconds to the first token of a four-token chat."""
    body = {"messages": [{"role": "user", "content": "hi there"}], "max_tokens": 4, "stream": True, "ignore_eos": True}
    began, seconds = time.perf_counter(), None
    with client.stream("POST", CHAT, json=body) as answer:
        answer.raise_for_status()
        for line in answer.iter_lines():
            if seconds is None and '"content":"' in line and '"content":""' not in line:
                seconds = time.perf_counter() - began
    if seconds is None:
        raise SystemExit("error: an answer had no text")
    return seconds


def health(client: httpx.Client) -> float:
    began = time.perf_counter()
    client.get("/health").raise_for_status()
    return time.perf_counter() - began


def tokenized(client: httpx.Client) -> float:
    began = time.perf_counter()
    client.post("/tokenize", json={"prompt": LINES * 40}).raise_for_status()
    return time.perf_counter() - began


MEASURES: tuple[Callable[[httpx.Client], float], ...] = (first_token, health, tokenized)


def measured(client: httpx.Client, seconds: float) -> list[list[float]]:
    """Return the seconds of each measure, taken in turn."""
    until, results = time.monotonic() + seconds, [list[float]() for _ in MEASURES]
    while time.monotonic() < until or not results[-1]:
        for take, times in zip(MEASURES, results, strict=True):
            times.append(take(client))
            time.sleep(0.05)
    return results


def run(args: argparse.Namespace, name: str) -> tuple[list[list[float]], list[list[float]]]:
    """Return the measures before and during the attack of this name."""
    with ExitStack() as stack:
        base = stack.enter_context(server(args.target, args.port, args.prefill_ms))
        local, headers = httpx.HTTPTransport(local_address=SECOND), {"x-api-key": KEY}
        client = stack.enter_context(httpx.Client(base_url=base, transport=local, timeout=120, headers=headers))
        measured(client, args.settle)  # warm up
        alone = measured(client, args.seconds)
        limit = args.settle + args.seconds + 120
        process = get_context("spawn").Process(target=attack_all, args=(args.port, name, limit), daemon=True)
        process.start()
        stack.callback(process.join)
        stack.callback(process.terminate)
        time.sleep(args.settle)
        return alone, measured(client, args.seconds)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--target", help="default: the included model")
    parser.add_argument("--port", type=int, default=8731, help="default %(default)s")
    parser.add_argument("--prefill-ms", type=float, default=400.0, help="as for eagle-serve, default %(default)g")
    parser.add_argument(
        "--seconds", type=float, default=8.0, help="of measuring, before and during, default %(default)g"
    )
    parser.add_argument("--settle", type=float, default=4.0, help="seconds before that, default %(default)g")
    parser.add_argument("--only", nargs="*", help="attacks, by the first words of their names")
    args = parser.parse_args()
    every_kept = True
    print("| the first client sends | first token, s | /health, s | 100 KB of text, s |  |\n|---|---|---|---|---|")
    for name in attacks():
        if args.only is not None and name.split(":")[0] not in args.only:
            continue
        alone, during = ([statistics.median(times) for times in results] for results in run(args, name))
        kept = all(now <= 2 * then + args.prefill_ms / 1000 for now, then in zip(during, alone, strict=True))
        every_kept &= kept or name == SPIN
        cells = " | ".join(f"{then:.3f} → {now:.3f}" for then, now in zip(alone, during, strict=True))
        print(f"| {name} | {cells} | {'' if kept else '**missed**'} |", flush=True)
    return 0 if every_kept else 1


if __name__ == "__main__":
    sys.exit(main())
