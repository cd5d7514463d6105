"""`--prefill-chunk`: how many prompt tokens the commands' engines read in one forward."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from eagle_mlx.serve.api import start
from eagle_mlx.serve.api.cli import main as serve
from eagle_mlx.serve.api.loader import load as load_config
from eagle_mlx.serve.api.options import LoadConfig
from eagle_mlx.serve.bench.cli import main as bench
from eagle_mlx.serve.generate import main as generate
from tests.fakes import tiny_target_folder


@pytest.fixture
def folder(tmp_path: Path) -> str:
    tiny_target_folder(tmp_path / "target")
    (tmp_path / "prompts.jsonl").write_text('{"prompt": "def median(values):"}\n{"prompt": "import os"}\n')
    return str(tmp_path / "target")


@pytest.mark.parametrize("chunk", [4, 6])
@pytest.mark.parametrize("command", [generate, bench])
def test_the_flag_reaches_the_engine(command: Any, chunk: int, folder: str, positions_read: list[int]) -> None:
    own = {
        generate: ["--spec-decode", "none", "--file"],
        bench: ["--modes", "plain", "--repeats", "1", "--batch", "2", "--prompts"],
    }[command]
    prompts = str(Path(folder).parent / "prompts.jsonl")
    given = ["--target", folder, "--max-tokens", "2", "--quiet", "--prefill-chunk", str(chunk), *own, prompts]
    assert command(given) == 0
    assert max(positions_read) == chunk


def test_the_flag_reaches_the_servers_engine(folder: str, monkeypatch: pytest.MonkeyPatch) -> None:
    chunks = []

    def load(config: LoadConfig, say: Any) -> Any:
        loaded = load_config(config, say)
        chunks.append(loaded.engine.prefill_chunk)
        return loaded

    monkeypatch.setattr(start, "load", load)
    for given in ([], ["--prefill-chunk", "77"]):
        assert serve(["--target", folder, "--spec-decode", "none", "--check", *given]) == 0
    assert chunks == [2048, 77]


@pytest.mark.parametrize("command", [generate, bench])
def test_a_chunk_of_zero_is_refused(command: Any, folder: str, capsys: pytest.CaptureFixture[str]) -> None:
    """Before a model is loaded."""
    what = ["x"] if command is generate else []
    assert command([*what, "--target", "nowhere", "--prefill-chunk", "0"]) == 2
    assert capsys.readouterr().err.splitlines()[-1] == "error: --prefill-chunk must be at least 1, not 0"
