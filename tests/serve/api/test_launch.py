"""`eagle-serve launch`: commands that start agents with a running server."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from threading import Thread

import pytest

from eagle_mlx.serve.api.cli import main
from tests.serve.api.live import NAME, Live, live, wide

KEY = "it's-$ecret"
CONTEXT = 512


@pytest.fixture(scope="module")
def guarded() -> Iterator[Live]:
    with live(settings=wide(api_key=KEY)) as running:
        yield running


@pytest.fixture
def programs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Programs of these names that print their environment and arguments."""
    for name in ("claude", "codex", "opencode"):
        program = tmp_path / name
        program.write_text(
            f"#!{sys.executable}\nimport json, os, sys\nprint(json.dumps([dict(os.environ), sys.argv[1:]]))\n"
        )
        program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")


def launched(server: Live, capsys: pytest.CaptureFixture[str], *given: str) -> tuple[dict[str, str], list[str]]:
    """Return what the printed command gives to the program: variables and arguments."""
    assert main(["launch", "--url", server.base, *given]) == 0
    printed = capsys.readouterr().out
    assert KEY not in printed
    ran = subprocess.run(printed, shell=True, check=True, capture_output=True, text=True)
    variables, arguments = json.loads(ran.stdout)
    return variables, arguments


@pytest.mark.usefixtures("programs")
def test_claude_gets_the_address_the_key_and_the_model(
    guarded: Live, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("EAGLE_API_KEY", KEY)
    variables, arguments = launched(guarded, capsys, "claude", "--", "-p", "What's new?")
    assert arguments == ["-p", "What's new?"]
    assert variables["ANTHROPIC_BASE_URL"] == guarded.base
    assert variables["ANTHROPIC_AUTH_TOKEN"] == KEY
    assert variables["ANTHROPIC_DEFAULT_HAIKU_MODEL"] == variables["ANTHROPIC_MODEL"] == NAME
    assert variables["CLAUDE_CODE_MAX_CONTEXT_TOKENS"] == str(CONTEXT)
    assert variables["CLAUDE_CODE_MAX_OUTPUT_TOKENS"] == str(CONTEXT // 4)


@pytest.mark.usefixtures("programs")
def test_codex_gets_settings_in_toml(
    guarded: Live, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("EAGLE_API_KEY", KEY)
    _, arguments = launched(guarded, capsys, "codex")
    assert set(arguments[::2]) == {"-c"}
    settings = dict(setting.split("=", 1) for setting in arguments[1::2])
    assert settings["model"] == json.dumps(NAME)
    assert settings["model_context_window"] == str(CONTEXT)
    assert settings["model_providers.eagle.base_url"] == json.dumps(f"{guarded.base}/v1")
    assert settings["model_providers.eagle.wire_api"] == '"responses"'
    assert settings["model_providers.eagle.env_key"] == '"EAGLE_API_KEY"'


@pytest.mark.usefixtures("programs")
def test_opencode_gets_its_settings_in_a_variable(server: Live, capsys: pytest.CaptureFixture[str]) -> None:
    variables, arguments = launched(server, capsys, "opencode", "--model", NAME)
    content = json.loads(variables["OPENCODE_CONFIG_CONTENT"])
    assert arguments == []
    assert content["model"] == f"eagle/{NAME}"
    provider = content["provider"]["eagle"]
    assert provider["options"] == {"baseURL": f"{server.base}/v1", "apiKey": "none"}
    assert provider["models"][NAME]["limit"]["context"] == CONTEXT


@pytest.mark.usefixtures("programs")
def test_run_becomes_the_program(server: Live) -> None:
    command = ["-m", "eagle_mlx.serve.api.cli", "launch", "claude", "--url", server.base, "--run", "--", "a b"]
    ran = subprocess.run([sys.executable, *command], capture_output=True, text=True, check=True)
    variables, arguments = json.loads(ran.stdout)
    assert (variables["ANTHROPIC_MODEL"], arguments) == (NAME, ["a b"])


def test_what_is_wrong_is_named(
    guarded: Live, server: Live, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.delenv("EAGLE_API_KEY", raising=False)
    cases = [
        (["claude", "--url", "http://127.0.0.1:1"], "no eagle-serve answers at http://127.0.0.1:1"),
        (["claude", "--url", "nowhere"], "no eagle-serve answers at nowhere"),
        (["claude", "--url", guarded.base], "needs a key; set EAGLE_API_KEY"),
        (["claude", "--url", server.base, "--model", "other"], f"has {NAME}"),
        (["codex", "--url", server.base, "--run"], "npm install -g @openai/codex"),
    ]
    monkeypatch.setenv("PATH", str(tmp_path))
    for arguments, wanted in cases:
        assert main(["launch", *arguments]) == 2
        assert wanted in capsys.readouterr().err
    assert main(["launch", "emacs"]) == 2
    assert "program must be one of claude, codex, opencode, not 'emacs'" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ({"data": [{"id": "m", "object": "model"}]}, "no eagle-serve answers"),  # as of mlx_lm.server
        ({"data": [{}]}, "no eagle-serve answers"),
        ({"data": 5}, "no eagle-serve answers"),
        ([], "no eagle-serve answers"),
        ({"data": []}, "has no models"),
    ],
)
def test_another_server_is_named(content: object, message: str, capsys: pytest.CaptureFixture[str]) -> None:
    class Other(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(200)
            self.end_headers()
            self.wfile.write(json.dumps(content).encode())

        def log_message(self, format: str, *args: object) -> None: ...

    with HTTPServer(("127.0.0.1", 0), Other) as other:
        Thread(target=other.handle_request, daemon=True).start()
        url = f"http://127.0.0.1:{other.server_port}"
        assert main(["launch", "claude", "--url", url]) == 2
        error = capsys.readouterr().err
        assert message in error
        assert url in error
