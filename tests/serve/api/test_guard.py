"""Requests with a wrong host, key or framing are refused."""

from __future__ import annotations

import socket
from collections.abc import Iterator

import pytest

from eagle_mlx.serve.api.cli import main
from eagle_mlx.serve.api.start import hosts_of
from tests.serve.api.live import Live, live, wide

MODELS = "/v1/models"


@pytest.fixture(scope="module")
def guarded() -> Iterator[Live]:
    with live(settings=wide(hosts=("llm.local",), api_key="secret", allow_origin=("*",))) as running:
        yield running


@pytest.mark.parametrize(
    "host",
    [
        "127.0.0.1:8000",
        "127.0.0.1",
        "127.8.9.10:1",
        "localhost",
        "LOCALHOST:80",
        "[::1]:8000",
        "llm.local",
        "LLM.local:9",
    ],
)
def test_hosts_of_this_machine_are_served(guarded: Live, host: str) -> None:
    assert guarded.http.get(MODELS, headers={"Host": host}).status_code == 200


@pytest.mark.parametrize(
    "host",
    [
        "evil.example",
        "evil.example:8000",
        "127.0.0.1.evil.example",
        "localhost.evil.example",
        "evil.llm.local",
        "",
        "[",
        "1.2.3.4",
        "[::1].evil.example",
        "localhost@evil.example",
        "127.0.0.1:x",
        "192.168.0.1:80",
    ],
)
def test_other_hosts_are_refused(guarded: Live, host: str) -> None:
    for method, path in (("GET", MODELS), ("POST", "/v1/completions"), ("GET", "/health"), ("OPTIONS", "/tokenize")):
        answer = guarded.http.request(method, path, headers={"Host": host, "Origin": f"http://{host}"})
        assert answer.status_code == 403
        error = answer.json()["error"]
        assert (error["type"], error["code"]) == ("permission_error", "host_not_allowed")
        assert "--allowed-host" in error["message"]
        assert "access-control-allow-origin" not in answer.headers


def test_hosts_are_checked_by_default_only_at_a_loopback_address() -> None:
    with socket.create_server(("127.0.0.1", 0)) as here, socket.create_server(("0.0.0.0", 0)) as anywhere:
        assert hosts_of(here, []) == ()
        assert hosts_of(here, ["llm.local"]) == ("llm.local",)
        assert hosts_of(anywhere, []) is None
        assert hosts_of(anywhere, ["llm.local"]) == ("llm.local",)


def test_a_request_with_two_lengths_is_refused(server: Live) -> None:
    host, port = server.base.removeprefix("http://").split(":")
    with socket.create_connection((host, int(port)), timeout=10) as raw:
        raw.sendall(
            b"POST /tokenize HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nContent-Length: 5\r\n"
            b"Transfer-Encoding: chunked\r\n\r\n5\r\nhello\r\n0\r\n\r\nGET /health HTTP/1.1\r\nHost: x\r\n\r\n"
        )
        answer = b""
        while piece := raw.recv(4096):
            answer += piece
    assert answer.startswith(b"HTTP/1.1 400")
    assert b"Transfer-Encoding" in answer
    assert answer.count(b"HTTP/1.1") == 1  # the rest is not read as a request


@pytest.mark.parametrize(
    ("given", "status"),
    [
        ("Bearer secret", 200),
        ("bearer secret", 200),
        ("BEARER  secret", 200),
        ("Basic secret", 401),
        ("secret", 401),
        ("Bearer", 401),
        ("Bearer wrong", 401),
        ("Bearer sécret", 401),
        ("Bearersecret", 401),
    ],
)
def test_keys_need_the_bearer_scheme_in_any_case(guarded: Live, given: str, status: int) -> None:
    headers = {"Authorization": given.encode("latin-1")}
    assert guarded.http.get(MODELS, headers=headers).status_code == status  # type: ignore[arg-type]


def test_an_invalid_proxy_address_is_refused_at_startup(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--forwarded-allow-ips", "proxy.local"]) == 2
    printed = capsys.readouterr().err
    assert "--forwarded-allow-ips: 'proxy.local'" in printed
    assert "give addresses or networks" in printed


def test_a_refused_key_is_one_line_with_the_address_and_no_secret(caplog: pytest.LogCaptureFixture) -> None:
    with live(settings=wide(api_key="sesame", forwarded_allow_ips="127.0.0.1, 10.0.0.0/8")) as server:
        headers = {
            "X-Forwarded-For": "192.0.2.66, 192.0.2.7, 10.9.9.9",
            "x-api-key": "guessed",
            "Authorization": "Bearer guessed",
        }
        assert server.http.get("/v1/models?key=guessed", headers=headers).status_code == 401
        assert server.http.get("/v1/models").status_code == 200
    [record] = [record for record in caplog.records if "401" in record.getMessage()]
    assert record.getMessage() == "refused with 401: the API key is missing or wrong; client 192.0.2.7"
    assert not any(secret in caplog.text for secret in ("sesame", "guessed"))
