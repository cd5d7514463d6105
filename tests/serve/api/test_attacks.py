"""What one client can do to others: send much, send nothing, read nothing, request everything at once."""

from __future__ import annotations

import json
import socket
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, closing, contextmanager, suppress
from dataclasses import replace
from threading import Event, current_thread
from time import monotonic
from typing import Any, Literal

import h11
import httpx
import pytest

from eagle_mlx.serve.api import received
from eagle_mlx.serve.api.encoding import Encoder
from eagle_mlx.serve.api.limits import Limits
from eagle_mlx.serve.api.model import Loaded
from eagle_mlx.serve.api.received import B
from tests.full import in_full
from tests.serve.api.given import PATIENCE
from tests.serve.api.live import DEPTH, ELSEWHERE, Live, another_client, engine, live, wide

CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
SHORT = {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 1}
TOO_LONG = "def f(x):\n    return x\n" * 10_000
"""240 KB: more tokens than any context here but those of `unbounded`."""
LONG = TOO_LONG[:200_000]


def connect(server: Live, data: bytes = b"", unread_bytes: int | None = None) -> socket.socket:
    host, port = server.base.removeprefix("http://").split(":")
    raw = socket.socket()
    if unread_bytes is not None:
        raw.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, unread_bytes)
    raw.settimeout(20)
    raw.connect((host, int(port)))
    raw.sendall(data)
    return raw


def request(path: str, body: Any, client: str = "127.0.0.1") -> bytes:
    content = json.dumps(body).encode()
    head = f"POST {path} HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nX-Forwarded-For: {client}\r\n"
    return f"{head}Content-Length: {len(content)}\r\n\r\n".encode() + content


def closed(raw: socket.socket) -> bool:
    """Return whether the server has closed an idle connection."""
    raw.setblocking(False)
    try:
        return raw.recv(1) == b""
    except BlockingIOError:
        return False
    except ConnectionError:
        return True


def is_served(server: Live) -> bool:
    return server.http.post(CHAT, json=SHORT).status_code == 200


@pytest.fixture
def unread() -> Iterator[Callable[[Live], socket.socket]]:
    """Yield a function that starts streams of megabytes without reading them."""
    opened = []
    fields = {"messages": [{"role": "user", "content": "x"}], "max_tokens": 400, "n": 4, "stream": True}
    fields |= {"ignore_eos": True, "logprobs": True, "top_logprobs": 20}

    def begin(server: Live) -> socket.socket:
        opened.append(connect(server, request(CHAT, fields), unread_bytes=4096))
        return opened[-1]

    yield begin
    for raw in opened:
        raw.close()


def test_finished_rows_hold_no_slot_even_if_their_text_is_unread(
    unread: Callable[[Live], socket.socket],
) -> None:
    with live(settings=wide(Limits(queue=0)), unread_bytes=4096) as server:
        raw = unread(server)
        server.until(lambda: server.service.running > 0)
        assert server.http.post(CHAT, json=SHORT).status_code == 429
        server.until(lambda: server.service.running == 0)
        server.until(lambda: is_served(server))
        assert not server.service.idle  # the stream is still open
        assert 'eagle:queue{model_name="tiny"} 0.0' in server.http.get("/metrics").text
        raw.close()
        server.until(lambda: server.idle)


def test_an_unread_stream_is_closed(unread: Callable[[Live], socket.socket], caplog: pytest.LogCaptureFixture) -> None:
    with live(settings=wide(Limits(send_seconds=0.3)), unread_bytes=4096) as server:
        unread(server)
        server.until(lambda: not server.service.idle)
        server.until(lambda: server.idle)
        server.until(lambda: len(server.server.connections) == 0)
        assert is_served(server)
    assert not caplog.records


def test_an_unread_answer_is_closed() -> None:
    fields = {"prompt": TOO_LONG[:60_000], "return_token_strs": True}
    with live(settings=wide(Limits(send_seconds=0.3)), unread_bytes=4096) as server:
        raws = [connect(server, request("/tokenize", fields), unread_bytes=4096) for _ in range(3)]
        server.until(lambda: len(server.server.connections) == 3)
        server.until(lambda: len(server.server.connections) == 0)
        for raw in raws:
            raw.close()


def test_slow_readers_are_not_cut_off() -> None:
    fields = {"prompt": "x", "max_tokens": 100, "ignore_eos": True, "stream": True, "logprobs": 20}
    with live(settings=wide(Limits(send_seconds=1.0)), unread_bytes=4096) as server:
        with connect(server, request(COMPLETIONS, fields), unread_bytes=4096) as raw:
            read = b""
            while not read.endswith(b"data: [DONE]\n\n\r\n0\r\n\r\n"):
                piece = raw.recv(2048)
                assert piece, read[-300:]
                read += piece
                server.http.get("/health")  # takes a while
        server.until(lambda: server.idle)


def test_connections_that_do_not_send_a_request_are_closed() -> None:
    with live(settings=wide(Limits(head_seconds=0.3))) as server:
        assert server.http.get("/health").status_code == 200  # its connection stays open
        silent = [connect(server) for _ in range(10)]
        slow = [connect(server, b"POST /tokenize HTTP/1.1\r\nHost: x\r\n") for _ in range(10)]
        second = connect(server, b"GET /health HTTP/1.1\r\nHost: x\r\n\r\n")
        assert second.recv(4096).startswith(b"HTTP/1.1 200")
        second.sendall(b"GET /health HTT")
        unread = connect(server, b"DELETE /health HTTP/1.1\r\nHost: x\r\nContent-Length: 1000\r\n\r\nx")
        assert unread.recv(4096).startswith(b"HTTP/1.1 405")
        unread.sendall(b"x")
        for raw in (*silent, *slow, second, unread):
            server.until(lambda raw=raw: closed(raw))  # type: ignore[misc]
            raw.close()
        assert len(server.server.connections) == 1
        assert server.http.get("/health").status_code == 200


def test_a_missing_body_gets_408() -> None:
    with live(settings=wide(Limits(body_seconds=0.2))) as server:
        with connect(server, request(COMPLETIONS, {"prompt": "x"})[:-3]) as raw:
            answer = b""
            while piece := raw.recv(4096):
                answer += piece
        assert answer.startswith(b"HTTP/1.1 408")
        assert json.loads(answer.partition(b"\r\n\r\n")[2])["error"]["code"] == "request_timeout"
        assert is_served(server)


def test_beyond_the_limit_the_connections_idle_longest_are_closed() -> None:
    with live(settings=wide(Limits(connections=8))) as server:
        with server.slowed(0.01), server.http.stream("POST", COMPLETIONS, json={"prompt": "x", "stream": True}) as held:
            raws = [connect(server) for _ in range(30)]
            server.until(lambda: sum(map(closed, raws)) == 23)  # all but seven and the one that decodes
            assert len(server.server.connections) <= 8
            with httpx.Client(base_url=server.base, timeout=PATIENCE) as other:
                assert other.get("/health").status_code == 200
        assert held.status_code == 200
        for raw in raws:
            raw.close()


class LongTexts:
    """Counts the long texts that are tokenized, and holds each until it may continue."""

    def __init__(self) -> None:
        self.begun, self.go_on = 0, Event()

    def wait(self) -> None:
        self.begun += 1
        assert self.go_on.wait(60)


@pytest.fixture
def encoder(monkeypatch: pytest.MonkeyPatch) -> LongTexts:
    made = LongTexts()
    encode = Encoder.__call__

    def held(self: Encoder, text: str, add_special_tokens: bool) -> list[int]:
        if len(text) >= Limits.long_bytes:
            made.wait()
        return encode(self, text, add_special_tokens)

    monkeypatch.setattr(Encoder, "__call__", held)
    return made


class Parsed:
    """Counts the bytes that threads parse, and holds each long body until it may continue."""

    def __init__(self) -> None:
        self.nbytes, self.go_on = Counter[str](), Event()

    def note(self, body: bytes) -> None:
        name = current_thread().name.split("_")[0]
        self.nbytes[name] += len(body)
        if name == "parse":
            assert self.go_on.wait(60)


@pytest.fixture
def parsed(monkeypatch: pytest.MonkeyPatch) -> Parsed:
    made = Parsed()
    read = received.read

    def held(kind: type[B], body: bytes, unknown: Literal["forbid", "ignore"]) -> B:
        made.note(body)
        return read(kind, body, unknown)

    monkeypatch.setattr(received, "read", held)
    return made


MANY_MESSAGES = {**SHORT, "messages": SHORT["messages"] * 1500}  # type: ignore[operator]
"""53 KB: a short body, but many objects."""
LARGE = {**SHORT, "messages": [{"role": "user", "content": LONG}]}


@pytest.mark.parametrize("body", [LARGE, MANY_MESSAGES])
def test_large_bodies_are_parsed_outside_the_event_loop_one_client_at_a_time(parsed: Parsed, body: Any) -> None:
    behind = wide(forwarded_allow_ips="127.0.0.1")
    with live(settings=behind) as server, ExitStack() as stack:
        sizes = [len(json.dumps(content).encode()) for content in (body, LARGE)]
        raws = [stack.enter_context(closing(connect(server, request(CHAT, body)))) for _ in range(8)]
        server.until(lambda: parsed.nbytes["parse"] == sizes[0])
        assert is_served(server)
        assert server.http.get("/health").status_code == 200
        other = stack.enter_context(closing(connect(server, request(CHAT, LARGE, "192.0.2.7"))))
        assert is_served(server)  # the body above has been read
        assert parsed.nbytes["parse"] == sizes[0]
        for raw in raws:
            raw.close()
        server.until(lambda: len(server.server.server_state.tasks) == 1)  # the other's
        parsed.go_on.set()
        assert other.recv(100).startswith(b"HTTP/1.1 400")
        assert parsed.nbytes["parse"] == sum(sizes)  # bodies of disconnected clients were not parsed
        assert sum(parsed.nbytes.values()) - parsed.nbytes["parse"] < 1000  # the short ones, in the event loop


@pytest.mark.parametrize(
    ("path", "head", "item"),
    [
        ("/v1/responses", '{"input": "x", "tools": [', '{"type": "x"}'),
        ("/v1/responses", '{"input": [', '{"type": "reasoning"}'),
        ("/v1/messages", '{"max_tokens": 1, "messages": [', '{"role": "user", "content": []}'),
        (CHAT, '{"messages": [', "[]"),
    ],
)
def test_bodies_of_too_many_objects_are_not_parsed(
    server: Live, parsed: Parsed, path: str, head: str, item: str
) -> None:
    content = f"{head}{','.join([item] * 20_001)}]}}"
    answer = server.http.post(path, content=content, headers={"Content-Type": "application/json"})
    assert answer.status_code == 413
    assert "more than 20000 objects and lists" in answer.json()["error"]["message"]
    assert not parsed.nbytes


def test_brackets_in_a_text_are_no_objects(server: Live) -> None:
    answer = server.http.post(CHAT, json={"messages": [{"role": "user", "content": '{"[\\"' * 30_000}]})
    assert answer.json()["error"]["code"] == "context_length_exceeded"


def test_a_client_without_a_key_is_refused_before_its_body() -> None:
    with live(settings=wide(api_key="secret")) as server, closing(connect(server)) as raw:
        raw.sendall(request(CHAT, LARGE)[:1000])
        assert raw.recv(100).startswith(b"HTTP/1.1 401")


CHUNKED = request(CHAT, {}).partition(b"Content-Length")[0] + b"Transfer-Encoding: chunked\r\n\r\n"


def chunks(body: bytes, size: int) -> bytes:
    pieces = (body[start : start + size] for start in range(0, len(body), size))
    return b"".join(b"%x\r\n%b\r\n" % (len(piece), piece) for piece in pieces) + b"0\r\n\r\n"


@pytest.mark.parametrize(("size", "status"), [(1, b"400"), (200, b"400"), (300, b"200")])
def test_bodies_in_tiny_chunks_are_refused(size: int, status: bytes) -> None:
    body = json.dumps(SHORT).encode() + b" " * 1_000_000
    with live() as server, closing(connect(server)) as raw:
        with suppress(OSError):
            raw.sendall(CHUNKED + chunks(body, size))
        assert raw.recv(100).startswith(b"HTTP/1.1 " + status)


def test_a_short_body_may_have_any_chunks(server: Live) -> None:
    with closing(connect(server, CHUNKED + chunks(json.dumps(SHORT).encode(), 1))) as raw:
        assert raw.recv(100).startswith(b"HTTP/1.1 200")


@pytest.mark.parametrize("key", [b"", b"x-api-key: secret\r\n"])
def test_h11_reads_few_chunks_of_a_body_that_is_refused(key: bytes, monkeypatch: pytest.MonkeyPatch) -> None:
    events = Counter[type]()
    next_event = h11.Connection.next_event

    def counted(self: h11.Connection) -> Any:
        event = next_event(self)
        events[type(event)] += 1
        return event

    monkeypatch.setattr(h11.Connection, "next_event", counted)
    with live(settings=wide(api_key="secret")) as server, closing(connect(server)) as raw:
        head, tail = CHUNKED.split(b"\r\n", 1)
        with suppress(OSError):
            raw.sendall(head + b"\r\n" + key + tail + chunks(b" " * 100_000, 1))
            while raw.recv(4096):
                pass
        server.until(lambda: not server.server.connections)
        assert events[h11.Data] <= 520
        assert server.http.get("/health").status_code == 200


def test_the_rest_of_a_refused_body_is_read_slowly(monkeypatch: pytest.MonkeyPatch) -> None:
    times = []
    receive_data = h11.Connection.receive_data

    def timed(self: h11.Connection, data: bytes) -> None:
        times.append(monotonic())
        receive_data(self, data)

    monkeypatch.setattr(h11.Connection, "receive_data", timed)
    nbytes, most = 2_000_000, 4e6
    with live(settings=wide(api_key="secret")) as server, closing(connect(server)) as raw:
        for _ in range(2):  # the connection can be used again
            times.clear()
            raw.sendall(request(CHAT, {"prompt": " " * nbytes}))
            assert raw.recv(1000).startswith(b"HTTP/1.1 401")
            server.until(lambda: len(times) >= nbytes / 2**14)
            assert times[-1] - times[0] > 0.5 * nbytes / most


@pytest.mark.parametrize(("count", "status"), [(90, b"404"), (12_000, b"400")])
def test_header_lines_are_limited(server: Live, count: int, status: bytes) -> None:
    with closing(connect(server)) as raw:
        raw.sendall(b"GET /none HTTP/1.1\r\nHost: x\r\n" + b"a:b\r\n" * count + b"\r\n")
        assert raw.recv(100).startswith(b"HTTP/1.1 " + status)


def unbounded() -> Loaded:
    """Return a model with a context for several megabytes of text."""
    return Loaded(engine(context=1 << 22), "ngram", DEPTH, {"temperature": 0.0})


@contextmanager
def many_long_texts(server: Live, path: str, count: int, client: str = "127.0.0.1") -> Iterator[list[socket.socket]]:
    body = {"prompt": LONG} if path == "/tokenize" else {**SHORT, "messages": [{"role": "user", "content": LONG}]}
    with ThreadPoolExecutor(count) as pool:
        raws = list(pool.map(lambda _: connect(server, request(path, body, client)), range(count)))
    try:
        yield raws
    finally:
        for raw in raws:
            raw.close()


@pytest.mark.parametrize("path", ["/tokenize", CHAT])
def test_long_texts_delay_nobody_and_are_dropped_with_their_client(path: str, encoder: LongTexts) -> None:
    with live(unbounded) as server:
        with many_long_texts(server, path, 8):
            server.until(lambda: server.service.slots_taken == 8 and encoder.begun == 1)
            for _ in range(3):
                assert is_served(server)
                assert server.http.post("/tokenize", json={"prompt": "x"}).status_code == 200
        server.until(lambda: server.idle)
        encoder.go_on.set()
        assert server.http.post("/tokenize", json={"prompt": LONG}).status_code == 200
        assert encoder.begun == 2  # texts of disconnected clients were not encoded


class Pieces:
    """Lists the pieces of texts as they are encoded, by the first letter of the text, and holds A's third piece."""

    def __init__(self) -> None:
        self.begun, self.go_on = "", Event()


@pytest.fixture
def pieces(monkeypatch: pytest.MonkeyPatch) -> Pieces:
    made, encode = Pieces(), Encoder.__call__

    def held(self: Encoder, text: str, add_special_tokens: bool) -> list[int]:
        def counted() -> None:
            self.check()
            made.begun += text[0]
            assert made.begun != "AAA" or made.go_on.wait(60)

        return encode(replace(self, check=counted), text, add_special_tokens)

    monkeypatch.setattr(Encoder, "__call__", held)
    return made


def test_a_text_whose_client_leaves_ends_at_its_next_piece(pieces: Pieces) -> None:
    with live(unbounded) as server:
        with closing(connect(server, request("/tokenize", {"prompt": "A" + 5 * LONG}))):
            server.until(lambda: pieces.begun == "AAA")
        server.until(lambda: server.idle)
        pieces.go_on.set()
        assert server.http.post("/tokenize", json={"prompt": "B" + LONG}).status_code == 200
        assert pieces.begun.count("A") == 3


def test_a_long_text_of_one_client_does_not_hold_up_that_of_another(pieces: Pieces) -> None:
    behind = wide(forwarded_allow_ips="127.0.0.1")
    with live(unbounded, behind) as server, ExitStack() as stack:
        raws = [stack.enter_context(closing(connect(server, request("/tokenize", {"prompt": "A" + 5 * LONG}))))]
        server.until(lambda: pieces.begun == "AAA")
        raws.append(stack.enter_context(closing(connect(server, request("/tokenize", {"prompt": "C" + LONG})))))
        other = request("/tokenize", {"prompt": "B" + LONG}, "192.0.2.7")
        assert stack.enter_context(closing(connect(server, other))).recv(100).startswith(b"HTTP/1.1 200")
        assert "C" not in pieces.begun  # a client's texts are encoded one after another
        pieces.go_on.set()
        for raw in raws:
            raw.settimeout(PATIENCE)
            assert raw.recv(100).startswith(b"HTTP/1.1 200")
        assert pieces.begun.rindex("A") < pieces.begun.index("C")


def test_tokenizing_takes_a_slot_of_the_queue(encoder: LongTexts) -> None:
    with live(unbounded, wide(Limits(queue=0))) as server:
        with many_long_texts(server, "/tokenize", 4):
            server.until(lambda: server.service.slots_taken == 4)
            for path, body in [("/tokenize", {"prompt": "x"}), ("/detokenize", {"tokens": [5]}), (CHAT, SHORT)]:
                answer = server.http.post(path, json=body)
                assert (answer.status_code, answer.json()["error"]["code"]) == (429, "queue_full")
                assert answer.headers["retry-after"]
            encoder.go_on.set()
        server.until(lambda: server.idle)
        assert server.http.post("/tokenize", json={"prompt": "x"}).status_code == 200
        encoder.go_on.clear()
        with many_long_texts(server, "/tokenize", 1):
            server.until(lambda: server.service.slots_taken == 1)
            server.terminate()  # an idle server would close its connections within a tick
            assert server.http.post("/tokenize", json={"prompt": "x"}).status_code == 503
            encoder.go_on.set()


@pytest.mark.parametrize(
    ("path", "body"),
    [
        (COMPLETIONS, {"prompt": TOO_LONG}),
        (COMPLETIONS, {"prompt": ["x", TOO_LONG]}),
        (CHAT, {"messages": [{"role": "user", "content": TOO_LONG}]}),
    ],
)
def test_texts_that_cannot_fit_are_refused(server: Live, path: str, body: dict[str, Any]) -> None:
    answer = server.http.post(path, json=body)
    assert (answer.status_code, answer.json()["error"]["code"]) == (400, "context_length_exceeded")


def test_a_short_request_does_not_wait_for_all_requests_of_another_client() -> None:
    long = {"prompt": ["x"] * 40, "max_tokens": 20, "ignore_eos": True, "stream": True}
    other = {"X-Forwarded-For": "192.0.2.7"}  # from a proxy on this machine
    behind = wide(forwarded_allow_ips="127.0.0.1")
    with live(settings=behind) as server, server.http.stream("POST", COMPLETIONS, json=long) as many:
        pieces = many.iter_text()
        assert next(pieces)
        assert server.http.post(CHAT, json=SHORT, headers=other).status_code == 200
        assert server.service.worker.loaded is not None
        assert server.service.worker.loaded.engine.waiting >= 20
        assert "".join(pieces).endswith("data: [DONE]\n\n")


def test_forged_addresses_share_one_clients_slots(encoder: LongTexts, caplog: pytest.LogCaptureFixture) -> None:
    forged = {"X-Forwarded-For": "192.0.2.99"}
    with ExitStack() as stack:
        server = stack.enter_context(live(unbounded, wide(Limits(queue=12))))
        for number in range(14):
            stack.enter_context(many_long_texts(server, "/tokenize", 1, f"192.0.2.{number}"))
        server.until(lambda: server.service.slots_taken == 14)
        assert server.http.post("/tokenize", json={"prompt": "x"}, headers=forged).status_code == 429
        encoder.go_on.set()
    assert caplog.messages == ["refused with 429: the queue of model tiny is full; client 127.0.0.1"]


def test_one_client_cannot_take_all_places(encoder: LongTexts) -> None:
    other, behind = {"X-Forwarded-For": "192.0.2.7"}, wide(Limits(queue=12), forwarded_allow_ips="127.0.0.1")
    with live(unbounded, behind) as server, many_long_texts(server, "/tokenize", 14):
        server.until(lambda: server.service.slots_taken == 14)
        for path, body in [(CHAT, SHORT), ("/tokenize", {"prompt": "x"})]:
            assert server.http.post(path, json=body).status_code == 429
            assert server.http.post(path, json=body, headers=other).status_code == 200
        with many_long_texts(server, "/tokenize", 1, "192.0.2.7") as (waiting,):
            server.until(lambda: server.service.slots_taken == 15)
            encoder.go_on.set()
            assert waiting.recv(100).startswith(b"HTTP/1.1 200")
            assert encoder.begun <= 4  # it was second in turn
    server.until(lambda: server.idle)


@ELSEWHERE
def test_unread_streams_of_one_client_do_not_hold_up_another(unread: Callable[[Live], socket.socket]) -> None:
    with live(unread_bytes=4096) as server, another_client(server) as other:
        raws = [unread(server) for _ in range(8)]
        server.until(lambda: server.service.running == 4)
        server.until(lambda: server.service.waiting >= 20)
        assert other.post(CHAT, json=SHORT | {"max_tokens": 4}).status_code == 200
        assert server.service.slots_taken == 32  # none of them has ended
        metrics = server.http.get("/metrics").text
        assert 'vllm:num_preemptions_total{model_name="tiny"} 1.0' in metrics
        for raw in raws:  # or the server would wait for them at its end
            raw.close()


@ELSEWHERE
def test_texts_of_a_client_that_gives_a_row_back_are_those_alone() -> None:
    fields = {"messages": [{"role": "user", "content": "def f"}], "n": 6, "temperature": 1.0, "seed": 3}
    fields |= {"ignore_eos": True}  # without max_tokens

    def texts(server: Live) -> list[str]:
        answer = server.http.post(CHAT, json=fields).json()
        assert {choice["finish_reason"] for choice in answer["choices"]} == {"length"}
        return [choice["message"]["content"] for choice in answer["choices"]]

    load = lambda: Loaded(engine(context=in_full(150, 80), prefix_cache_bytes=1 << 22), "ngram", DEPTH)  # noqa: E731
    with live(load) as server, another_client(server) as other, ThreadPoolExecutor(1) as pool:
        alone = texts(server)
        again = pool.submit(texts, server)
        server.until(lambda: server.service.running == 4)
        assert other.post(CHAT, json=SHORT | {"max_tokens": 4}).status_code == 200
        assert again.result(PATIENCE) == alone
        assert server.service.loaded is not None
        assert server.service.loaded.engine.pauses >= 1


@pytest.mark.parametrize("what", ["body", "answer"])
def test_a_client_that_neither_sends_nor_reads_does_not_hold_up_a_shutdown(
    unread: Callable[[Live], socket.socket], what: str, caplog: pytest.LogCaptureFixture
) -> None:
    with live(settings=wide(drain_seconds=0.1), unread_bytes=4096) as server, ExitStack() as opened:
        if what == "answer":
            unread(server)
            server.until(lambda: any(connection.flow.write_paused for connection in server.server.connections))
        else:
            opened.enter_context(closing(connect(server, request(CHAT, SHORT)[:-1])))
            server.until(lambda: len(server.server.server_state.tasks) == 1)
        server.terminate()
        server.until(lambda: not server.server.server_state.tasks, seconds=4)
    assert not [record for record in caplog.records if record.levelname == "ERROR"]


def test_a_large_answer_is_sent_to_its_end_at_a_shutdown() -> None:
    fields = {"prompt": TOO_LONG[:60_000], "return_token_strs": True}
    with (
        live(settings=wide(drain_seconds=0.1), unread_bytes=4096) as server,
        connect(server, request("/tokenize", fields), unread_bytes=4096) as raw,
    ):
        server.until(lambda: any(connection.flow.write_paused for connection in server.server.connections))
        server.terminate()
        read = b""
        while piece := raw.recv(1 << 14):
            read += piece
    head, _, body = read.partition(b"\r\n\r\n")
    assert b" 200 " in head
    assert len(json.loads(body)["token_strs"]) == json.loads(body)["count"]
