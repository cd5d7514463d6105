"""Measure how long one client waits for its first token while another sends the worst requests.

    python benchmarks/two_clients.py
    python benchmarks/two_clients.py --target out/real/smollm2-135m-instruct --bar 2

Starts `eagle-serve` and sends requests from two of this machine's addresses, which Linux provides. The exit status says
whether each wait is within `--bar` seconds of the wait on an idle server, plus one chunk (`--prefill-ms`).
"""

from __future__ import annotations

import argparse
import json
import socket
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack, closing, contextmanager
from pathlib import Path
from typing import Any

import httpx

FIRST, SECOND = "127.0.0.1", "127.0.0.2"
CHAT = {"messages": [{"role": "user", "content": "Write a class."}], "stream": True, "ignore_eos": True}
LINES = " ".join(f"name_{number} = {number * 7}" for number in range(170))
"""About 1,300 tokens."""
LOADS: dict[str, tuple[str, list[dict[str, Any]]]] = {
    "nothing": ("/v1/chat/completions", []),
    "8 requests without max_tokens": (
        "/v1/chat/completions",
        [CHAT | {"seed": seed, "temperature": 1.0} for seed in range(8)],
    ),
    "30 unread streams, n = 4": ("/v1/chat/completions", [CHAT | {"n": 4, "logprobs": True, "top_logprobs": 20}] * 30),
    "64 long prompts in one request": (
        "/v1/completions",
        [{"prompt": [f"# {number}\n{LINES}" for number in range(64)], "max_tokens": 200, "stream": True}],
    ),
}
"""What the first client sends without reading the answers."""
SETTLE = 3.0
"""Seconds until the server works on the first client's requests."""


@contextmanager
def server(target: str | None, port: int, prefill_ms: float) -> Iterator[str]:
    """Run a server until the block ends. Yield its address."""
    command = [str(Path(sys.executable).with_name("eagle-serve")), "--port", str(port), "--prefill-ms", str(prefill_ms)]
    command += [] if target is None else ["--target", target]
    quiet = subprocess.DEVNULL
    process = subprocess.Popen(command, stdout=quiet, stderr=quiet)
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


def send(port: int, path: str, body: dict[str, Any]) -> socket.socket:
    """Send a request without reading the answer."""
    content = json.dumps(body).encode()
    connection = socket.socket()
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    connection.connect((FIRST, port))
    head = f"POST {path} HTTP/1.1\r\nHost: {FIRST}\r\nContent-Type: application/json\r\nContent-Length: {len(content)}"
    connection.sendall(f"{head}\r\n\r\n".encode() + content)
    return connection


def first_token(client: httpx.Client) -> float:
    """Return the seconds to the first token of a four-token chat."""
    body = {"messages": [{"role": "user", "content": "hi there"}], "max_tokens": 4, "stream": True, "ignore_eos": True}
    began, seconds = time.perf_counter(), None
    with client.stream("POST", "/v1/chat/completions", json=body) as answer:
        answer.raise_for_status()
        for line in answer.iter_lines():
            if seconds is None and '"content":"' in line and '"content":""' not in line:
                seconds = time.perf_counter() - began
    if seconds is None:
        raise SystemExit("error: an answer had no text")
    return seconds


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--target", help="default: the included model")
    parser.add_argument("--port", type=int, default=8731, help="default %(default)s")
    parser.add_argument("--prefill-ms", type=float, default=400.0, help="as for eagle-serve, default %(default)g")
    parser.add_argument("--repeats", type=int, default=5, help="chats per load, default %(default)s")
    parser.add_argument("--bar", type=float, default=2.0, metavar="S", help="limit in seconds, default %(default)g")
    args = parser.parse_args()
    alone, kept = 0.0, True
    print("| the first client sends | first token of the second, median s | most |\n|---|---|---|")
    for name, (path, bodies) in LOADS.items():
        with ExitStack() as stack:
            base = stack.enter_context(server(args.target, args.port, args.prefill_ms))
            client = stack.enter_context(
                httpx.Client(base_url=base, transport=httpx.HTTPTransport(local_address=SECOND), timeout=600)
            )
            first_token(client)  # warm up
            for body in bodies:
                stack.enter_context(closing(send(args.port, path, body)))
            time.sleep(SETTLE)
            seconds = [first_token(client) for _ in range(args.repeats)]
        alone = alone or statistics.median(seconds)
        kept &= max(seconds) <= alone + args.prefill_ms / 1000 + args.bar
        print(f"| {name} | {statistics.median(seconds):.2f} | {max(seconds):.2f} |", flush=True)
    return 0 if kept else 1


if __name__ == "__main__":
    sys.exit(main())
