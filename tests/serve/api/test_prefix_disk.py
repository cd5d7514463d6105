"""A restarted server reuses the prefixes in its files."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from eagle_mlx.serve.api.cli import main
from eagle_mlx.serve.api.loader import load
from eagle_mlx.serve.api.model import Loaded
from eagle_mlx.serve.api.options import LoadConfig
from eagle_mlx.serve.speculation import Speculation
from tests.fakes import tiny_target_folder
from tests.full import in_full
from tests.serve.api.live import NAME, Live, live, wide
from tests.serve.api.test_life import hold
from tests.serve.api.test_prefixes import SYSTEM, user
from tests.serve.api.test_prefixes import load as hybrid
from tests.serve.api.test_status import samples

QUESTIONS = ["How do I open a file?", "What is a list, and what is a tuple?", "Sort these words for me."]


def with_files(folder: Path) -> Callable[[], Loaded]:
    return lambda: hybrid(folder)


def asked(running: Live, chat: list[dict[str, Any]]) -> tuple[str, int, int]:
    """Return the answer, the prompt's tokens, and how many of them were reused."""
    body = {"model": NAME, "messages": chat, "max_tokens": 5}
    answer = running.http.post("/v1/chat/completions", json=body).json()
    usage = answer["usage"]
    content: str = answer["choices"][0]["message"]["content"]
    return content, usage["prompt_tokens"], usage["prompt_tokens_details"]["cached_tokens"]


def test_a_restarted_server_reuses_its_prefix_files(tmp_path: Path) -> None:
    chats = [[SYSTEM, user(question)] for question in QUESTIONS]

    def turn(running: Live) -> list[tuple[str, int, int]]:
        with ThreadPoolExecutor(len(chats)) as pool:
            return list(pool.map(lambda chat: asked(running, chat), chats))

    with live(with_files(tmp_path)) as running, live(hybrid) as never_restarted:
        turn(never_restarted)
        for chat, (content, _, _) in zip(chats, turn(running), strict=True):
            chat += [{"role": "assistant", "content": content}, user("And then?")]
        before = turn(never_restarted)
        held = hold(running, 2, in_full(400, 60))
        running.terminate()
        assert all(stream.rest().endswith("data: [DONE]\n\n") for stream in held)
    with live(with_files(tmp_path)) as restarted:
        after = turn(restarted)
        numbers = samples(restarted)
        restarted.until(lambda: samples(restarted)["eagle:prefix_disk_written_bytes_total"] > 0)
    with live(hybrid) as cold:
        for chat, (content, _, _) in zip(chats, after, strict=True):
            assert asked(cold, chat)[0] == content
    assert sum(cached for _, _, cached in after) >= 0.9 * sum(cached for _, _, cached in before) > 0
    assert numbers["eagle:prefix_disk_hits_total"] >= 1
    assert numbers["eagle:prefix_disk_read_bytes_total"] > 0
    assert numbers["eagle:prefix_disk_passed_over_total"] == numbers["eagle:prefix_disk_left_out_total"] == 0
    assert 0 < numbers["eagle:prefix_disk_bytes"] <= numbers["eagle:prefix_disk_bytes_max"] == 1 << 30


def test_after_a_restart_files_serve_the_key_and_salt_that_wrote_them(tmp_path: Path) -> None:
    keys = wide(api_key="mine yours")

    def cached(running: Live, key: str, salt: str | None = None) -> bool:
        body = {"messages": [SYSTEM, user(QUESTIONS[0])], "max_tokens": 5} | ({"cache_salt": salt} if salt else {})
        answer = running.http.post("/v1/chat/completions", json=body, headers={"Authorization": f"Bearer {key}"})
        return answer.json()["usage"]["prompt_tokens_details"]["cached_tokens"] > 0

    with live(with_files(tmp_path), keys) as running:
        assert [cached(running, "mine"), cached(running, "mine", "pepper")] == [False, False]
    with live(with_files(tmp_path), keys) as restarted:
        assert not cached(restarted, "yours")
        assert not cached(restarted, "mine", "salt")
        assert cached(restarted, "mine")
        assert cached(restarted, "mine", "pepper")
    files = [file for file in tmp_path.rglob("*") if file.is_file()]
    assert files
    assert not any(b"pepper" in file.read_bytes() for file in files)


def test_the_flags_open_the_folder_and_say_so(tmp_path: Path) -> None:
    model = tiny_target_folder(tmp_path / "model")
    lines = list[str]()
    config = LoadConfig(model, Speculation(), prefix_cache_dir=tmp_path / "cache", prefix_disk_gb=1.0)
    loaded = load(config, lines.append)
    assert loaded.disk is not None
    assert loaded.disk.folder.parent == tmp_path / "cache"
    [line] = [line for line in lines if line.startswith("prefix files: ")]
    assert line.endswith("0.0 MB, limit 1.00 GB for all models")
    loaded.disk.close(10)


@pytest.mark.parametrize(
    ("args", "reason"),
    [
        (["--prefix-cache-dir", "x", "--prefix-cache-gb", "0"], "remove one of them"),
        (["--prefix-disk-gb", "1"], "give that folder too"),
        (["--prefix-cache-dir", "x", "--prefix-disk-gb", "0"], "--prefix-disk-gb must be above 0"),
        (
            ["--prefix-cache-dir", "x", "--prefix-disk-gb", "9e9"],
            "--prefix-disk-gb 9e+09 is more than the disk of x has",
        ),
        (["--prefix-cache-dir", __file__], "is a file, so"),
    ],
)
def test_invalid_cache_settings_are_refused_at_startup(
    args: list[str], reason: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    model = tiny_target_folder(tmp_path / "model")
    assert main(["--target", str(model), "--spec-decode", "none", "--port", "0", *args]) == 2
    assert reason in capsys.readouterr().err
