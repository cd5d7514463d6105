"""The programs of examples/ run on the included model, are short, and print what their docstrings promise."""

from __future__ import annotations

import ast
import re
import runpy
import signal
import sys
import time
from contextlib import suppress
from pathlib import Path

import httpx
import pytest

from eagle_mlx.data_pipelines import MakeConfig
from eagle_mlx.train.run import loop
from tests.forks import Fork
from tests.full import FULL, in_full
from tests.train.empty_pictures import leave_empty_pictures

ROOT = Path(__file__).parent.parent
EXAMPLES = sorted((ROOT / "examples").glob("*.py"))


@pytest.fixture(autouse=True)
def _few_pictures(monkeypatch: pytest.MonkeyPatch) -> None:
    """Replace pictures of training by empty files, unless in full: drawing takes longer than two steps."""
    if not FULL:
        monkeypatch.setattr(loop, "write_plots", leave_empty_pictures)


def run(name: str, *args: str, patch: pytest.MonkeyPatch, shown: pytest.CaptureFixture[str]) -> str:
    """Return what an example prints."""
    patch.chdir(ROOT)
    patch.setattr(sys, "argv", [name, *args])
    runpy.run_path(f"examples/{name}.py", run_name="__main__")
    return shown.readouterr().out


def number(pattern: str, text: str) -> float:
    """Return the number in the only match of a pattern."""
    [value] = re.findall(pattern, text)
    return float(value)


@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: path.stem)
def test_an_example_is_short_and_says_how_to_run_it(path: Path) -> None:
    text = path.read_text(encoding="utf-8")
    assert len(text.splitlines()) <= 60
    assert f"python examples/{path.name}" in (ast.get_docstring(ast.parse(text)) or "")
    assert f"run({path.stem!r}".replace("'", '"') in Path(__file__).read_text(encoding="utf-8"), "it has no test here"


def test_prompts_with_their_own_parameters_decode_together(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    out = run("batch", "--max-tokens", "16", patch=monkeypatch, shown=capsys)
    counts = re.findall(r"\[(\d+) tokens in (\d+) forwards, ended by (?:stop|length)\]", out)
    assert len(counts) == 4
    assert sum(int(tokens) for tokens, _ in counts) > sum(int(forwards) for _, forwards in counts)
    assert "def median(values):" in out


def test_a_text_is_streamed_with_colored_drafts(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    out = run("stream", "--max-tokens", "16", patch=monkeypatch, shown=capsys)
    assert number(r"\[(\S+) tokens per forward", out) >= 1  # on a busy machine, the policy may decode plainly
    assert "fibonacci" in re.sub(r"\x1b\[\d+m", "", out)


def test_an_own_proposer_drafts_and_leaves_the_text_unchanged(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    out = run("own_proposer", patch=monkeypatch, shown=capsys)
    assert number(r"\[(\d+) of \d+ drafts accepted, and the text is unchanged\]", out) > 0


class Forked(Fork):
    """The server of an example, which starts in milliseconds and is ready: the client waits longer after each try."""

    def __init__(self, command: list[str]):
        super().__init__(*command[2:])
        address = f"http://127.0.0.1:{command[command.index('--port') + 1]}/health"
        ready = False
        while not ready:
            assert self.poll() is None, self.communicate()
            with suppress(httpx.TransportError):
                ready = httpx.get(address).status_code == 200
            time.sleep(0.02)

    def terminate(self) -> None:
        self.send_signal(signal.SIGTERM)


def test_the_openai_client_calls_a_tool(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    if not FULL:
        Fork("-c", "").wait()  # the first one uses Popen itself
        monkeypatch.setattr("subprocess.Popen", Forked)
    out = run("serve_tool", patch=monkeypatch, shown=capsys)
    assert re.search(r'get_weather\(\{"city": "(Oslo|Rome)"\}\) returned \d+ degrees\nanswer: ', out)


@pytest.mark.filterwarnings("ignore::eagle_mlx.HeadWarning")  # a head of two steps drafts poorly
def test_a_head_is_trained_from_python(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    args = ("--steps", "2", "--limit", "4", "--output", str(tmp_path / "head"))
    out = run("train_head", *args, patch=monkeypatch, shown=capsys)
    assert number(r"(\S+) after 2 steps", out) >= number(r"tokens per forward: (\S+) untrained", out) >= 1
    assert number(r"\[\d+ of (\d+) drafts accepted\]", out) > 0


def test_a_head_is_adapted_to_prompts(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    """Two steps need not make a good head better."""
    monkeypatch.setattr(MakeConfig, "max_tokens", in_full(MakeConfig.max_tokens, 32))
    older = tmp_path / "older.jsonl"
    older.write_text('{"prompt": "def f(x):", "completion": "return x"}\n' * 12)
    limit = in_full(60, 30)
    args = ("--steps", "2", "--output", str(tmp_path / "head"), "--limit", str(limit))
    args += in_full((), ("--replay", str(older)))
    out = run("adapt_head", *args, patch=monkeypatch, shown=capsys)
    assert number(r"tokens per forward: (\S+) before", out) > 1
    assert number(r"(\S+) after 2 steps", out) > 1
    assert 0.8 * limit < len((tmp_path / "head.self.jsonl").read_text().splitlines()) <= limit
    assert (tmp_path / "head" / "best" / "config.json").exists()
