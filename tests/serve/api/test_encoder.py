"""Long texts: tokens equal the tokenizer's own, and texts of disconnected clients are not encoded."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from threading import Event
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from mlx_lm.tokenizer_utils import TokenizerWrapper
from mlx_lm.tokenizer_utils import load as load_tokenizer
from tokenizers import AddedToken, Tokenizer, normalizers, processors
from transformers import PreTrainedTokenizerFast

from eagle_mlx.serve.api.errors import ApiError
from eagle_mlx.serve.api.model import Encoder
from eagle_mlx.serve.processes import Process
from tests.fakes import EMBEDDED_TARGET
from tests.full import diagonal, some
from tests.serve.api.live import Live, live
from tests.serve.api.test_attacks import CHAT, COMPLETIONS, MEGABYTES, SHORT, connect, request, unbounded
from tests.serve.chat.formats import tokenizer_of

BODIES: dict[str, Any] = {
    "/tokenize": {"prompt": MEGABYTES},
    CHAT: {**SHORT, "messages": [{"role": "user", "content": MEGABYTES}]},
    COMPLETIONS: {"prompt": [MEGABYTES, "x"], "max_tokens": 1},
}
ROOT = Path(__file__).parents[3]
ALONE = """
import sys, time
from threading import Event, Thread
from eagle_mlx.serve.api.model import Encoder
from eagle_mlx.serve.processes import Process
from tests.fakes import EMBEDDED_TARGET
from mlx_lm.tokenizer_utils import load
forks, fork = [], Process.fork
Process.fork = lambda self: forks.append(fork(self)) or forks[-1]
encoder = Encoder(load(EMBEDDED_TARGET))
Thread(target=encoder.encode, args=("x = 1\\n" * 4_000_000, True, True, Event()), daemon=True).start()
while not (forks and forks[0].pid):
    time.sleep(0.005)
print(encoder.process.pid, forks[0].pid, flush=True)
sys.stdin.read()
"""
"""A program that prints which processes encode for it, and continues."""


def with_ends() -> Tokenizer:
    """Return a tokenizer that adds a token before and after texts, and composes letters."""
    made: Tokenizer = load_tokenizer(EMBEDDED_TARGET).backend_tokenizer
    made.normalizer = normalizers.NFC()
    made.add_special_tokens([AddedToken("<|user|>", lstrip=True, rstrip=True)])
    made.add_tokens([AddedToken("return", single_word=True), AddedToken("    ")])
    made.post_processor = processors.TemplateProcessing(
        single="<|im_start|> $A <|im_end|>", special_tokens=[("<|im_start|>", 1), ("<|im_end|>", 2)]
    )
    made.enable_truncation(8)
    made.enable_padding(length=16)
    return made


def wrapped(backend: Tokenizer, **how: Any) -> TokenizerWrapper:
    return TokenizerWrapper(PreTrainedTokenizerFast(tokenizer_object=backend, **how))


TOKENIZERS: dict[str, TokenizerWrapper] = {
    "embedded": load_tokenizer(EMBEDDED_TARGET),
    "tags": tokenizer_of("thinking"),
    "ends": wrapped(with_ends()),
    "split": wrapped(with_ends(), split_special_tokens=True),
}
ENCODERS = {name: Encoder(tokenizer) for name, tokenizer in TOKENIZERS.items()}
PIECES = st.sampled_from(
    ["<|im_end|>", "<think>", " <|user|> ", "return", "    ", "e\u0301", "\u1112\u1161\u11ab", "🦅", "\0", "\r\n\t"]
)


@pytest.mark.parametrize("name", TOKENIZERS)
@settings(max_examples=some(30), deadline=None)
@given(text=st.lists(PIECES | st.text(max_size=20)).map("".join), ends=st.booleans())
def test_a_process_gives_the_tokenizers_own_tokens(name: str, text: str, ends: bool) -> None:
    wanted = TOKENIZERS[name].encode(text, add_special_tokens=ends)
    assert ENCODERS[name].encode(text, ends, True, Event()) == wanted
    assert ENCODERS[name].encode(text, ends, False, Event()) == wanted
    assert ENCODERS[name].process is not None


class Reversing(PreTrainedTokenizerFast):
    """Does more than its backend."""

    def _encode_plus(self, text: Any, **how: Any) -> Any:
        return super()._encode_plus(text[::-1], **how)


class Lowering:
    """A part of a backend in Python, as in some classes."""

    def normalize(self, text: Any) -> None:
        text.lowercase()


def with_a_part_in_python() -> PreTrainedTokenizerFast:
    made = PreTrainedTokenizerFast(tokenizer_object=with_ends())
    made.backend_tokenizer.normalizer = normalizers.Normalizer.custom(Lowering())
    return made


@pytest.mark.parametrize("tokenizer", [Reversing(tokenizer_object=with_ends()), with_a_part_in_python()])
def test_a_tokenizer_that_is_more_than_its_backend_encodes_here(tokenizer: Any) -> None:
    encoder = Encoder(TokenizerWrapper(tokenizer))
    assert encoder.encode("Def f", True, True, Event()) == tokenizer.encode("Def f")
    assert encoder.process is None


def test_what_is_cancelled_is_not_begun() -> None:
    cancelled = Event()
    cancelled.set()
    for is_long in (False, True):
        with pytest.raises(ApiError):
            ENCODERS["embedded"].encode("def f", True, is_long, cancelled)


def wait_until(true: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 20
    while not true():
        assert time.monotonic() < deadline
        time.sleep(0.005)


def exists(process: Process) -> bool:
    return Path(f"/proc/{process.pid}").exists()


@pytest.fixture
def forks(acknowledge: bool, monkeypatch: pytest.MonkeyPatch) -> list[Process]:
    """Record the forked processes."""
    made: list[Process] = []
    fork = Process.fork
    monkeypatch.setattr(Process, "fork", lambda self: made.append(fork(self)) or made[-1])  # type: ignore[func-returns-value]
    return made


def stop(server: Live, forks: list[Process]) -> None:
    """Stop the encoding under way, so that it never ends by itself."""
    server.until(lambda: bool(forks and forks[-1].pid))
    os.kill(forks[-1].pid, signal.SIGSTOP)


@pytest.mark.skipif(sys.platform != "linux", reason="looks for processes in /proc")
@pytest.mark.parametrize(("path", "acknowledge"), diagonal(BODIES, [False, True]), indirect=["acknowledge"])
def test_who_leaves_while_a_long_text_is_encoded_ends_that(path: str, forks: list[Process]) -> None:
    with live(unbounded) as server:
        raw = connect(server, request(path, BODIES[path]))
        stop(server, forks)
        first = forks[0].parent
        assert first is not None
        raw.close()
        server.until(lambda: server.idle and not exists(forks[0]))
        assert server.http.post("/tokenize", json={"prompt": MEGABYTES}).status_code == 200
        assert [fork.parent for fork in forks] == [first, first]  # it did not start again
        server.until(lambda: not exists(forks[1]))


@pytest.mark.skipif(sys.platform != "linux", reason="looks for processes in /proc")
def test_the_servers_end_is_that_of_its_processes(forks: list[Process]) -> None:
    with live(unbounded) as server:
        raw = connect(server, request("/tokenize", BODIES["/tokenize"]))
        stop(server, forks)
        first = forks[0].parent
        assert first is not None
    server.until(lambda: not exists(forks[0]) and not exists(first))
    raw.close()


@pytest.mark.skipif(sys.platform != "linux", reason="looks for processes in /proc")
def test_no_process_outlives_a_server_that_is_killed() -> None:
    command = [sys.executable, "-c", ALONE]
    with subprocess.Popen(command, cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as program:
        assert program.stdout is not None
        ids = list(map(int, program.stdout.readline().split()))
        assert len(ids) == 2
        assert all(Path(f"/proc/{each}").exists() for each in ids)
        program.kill()
    wait_until(lambda: not any(Path(f"/proc/{each}").exists() for each in ids))


def test_a_process_that_somebody_kills_is_started_anew(forks: list[Process]) -> None:
    with live(unbounded) as server:
        asked = connect(server, request("/tokenize", BODIES["/tokenize"]))
        stop(server, forks)
        os.kill(forks[0].pid, signal.SIGKILL)
        assert b"503" in asked.recv(100)
        asked.close()
        first = forks[0].parent
        assert first is not None
        os.kill(first.pid, signal.SIGKILL)
        server.until(lambda: not first.alive)
        assert server.http.post("/tokenize", json={"prompt": MEGABYTES}).status_code == 200
