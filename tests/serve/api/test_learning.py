"""A server that learns: what it collects from requests, when it works, and what it says about it."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from threading import Event
from threading import enumerate as enumerate_threads
from time import perf_counter
from typing import Any

import pytest

from eagle_mlx.errors import ConfigError
from eagle_mlx.heads.eagle3 import save_eagle3
from eagle_mlx.hidden_states import Example
from eagle_mlx.serve.api.cli import main
from eagle_mlx.serve.api.loader import load
from eagle_mlx.serve.api.model import Loaded
from eagle_mlx.serve.api.options import LoadConfig
from eagle_mlx.serve.learning.texts import Texts
from tests.fakes import tiny_head, tiny_target, tiny_target_folder
from tests.serve.api.live import DEPTH, NAME, Live, engine, live, one_model, wide

CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("models")
    tiny_target_folder(folder / "target")
    save_eagle3(tiny_head(tiny_target(tokenizer=True), draft_vocab=512), folder / "head", target_name="tiny")
    return folder


def config(models: Path, **more: Any) -> LoadConfig:
    named = {"target": str(models / "target"), "head": str(models / "head"), "learn": str(models / "learned")}
    return LoadConfig.of(**{**named, "kv_gb": 0.01, "prior": False, **more})


@pytest.fixture(scope="module")
def learning(models: Path) -> Iterator[Live]:
    with live(lambda: load(config(models), lambda _: None)) as running:
        yield running


def number(server: Live, name: str) -> float:
    lines = server.http.get("/metrics").text.splitlines()
    [line] = [line for line in lines if line.startswith(f'{name}{{model_name="{NAME}"}}')]
    return float(line.split()[-1])


@pytest.mark.parametrize(
    ("fields", "count"),
    [({}, 1), ({"learn": False}, 0), ({"memory": False}, 0), ({"memory": False, "learn": True}, 1), ({"n": 2}, 2)],
)
@pytest.mark.parametrize("path", [COMPLETIONS, CHAT])
def test_a_request_says_whether_its_text_is_collected(
    path: str, fields: dict[str, Any], count: int, learning: Live
) -> None:
    text = f"say {fields}"
    body = {"prompt": text} if path == COMPLETIONS else {"messages": [{"role": "user", "content": text}]}
    before = number(learning, "eagle:learn_texts_total")
    answer = learning.http.post(path, json={**body, **fields, "max_tokens": 4, "ignore_eos": True})
    assert answer.status_code == 200, answer.text
    learning.until(lambda: number(learning, "eagle:learn_texts_total") == before + count)
    assert number(learning, "eagle:learn_version") == 0


def test_the_turns_of_a_chat_are_one_conversation(learning: Live) -> None:
    loaded = learning.service.loaded
    assert loaded is not None
    assert loaded.learner is not None
    system, first = {"role": "system", "content": "be brief"}, {"role": "user", "content": "one"}
    answer, second = {"role": "assistant", "content": "1"}, {"role": "user", "content": "two"}
    chats = [[system, first], [system, first, answer, second], [system, second]]
    learner = loaded.learner
    expected = len(learner.texts.all) + len(chats)
    for messages in chats:
        body = {"messages": messages, "max_tokens": 4, "ignore_eos": True, "seed": 1, "temperature": 2.0}
        assert learning.http.post(CHAT, json=body).status_code == 200
    learning.until(lambda: len(learner.texts.all) == expected)
    keys = [text.key for text in learner.texts.all][-3:]
    assert keys[0] == keys[1] != keys[2]


def test_a_second_server_and_a_server_without_a_head_are_refused(
    models: Path, learning: Live, capsys: pytest.CaptureFixture[str]
) -> None:
    assert learning.service.loaded is not None
    learned = str(models / "learned")
    second = ["--target", str(models / "target"), "--head", str(models / "head"), "--learn", learned, "--check"]
    assert main(second) == 2
    assert f"another process is writing to {learned}" in capsys.readouterr().err
    assert main(["--target", str(models / "target"), "--head", "none", "--learn", learned, "--check"]) == 2
    assert "--learn needs a head" in capsys.readouterr().err
    with pytest.raises(ConfigError, match="--learn cannot be used with --shard"):
        config(models, shard="tensor")


def test_a_server_without_a_head_starts_with_ngrams(models: Path, tmp_path: Path) -> None:
    lines: list[str] = []
    named = {"target": str(models / "target"), "learn": str(tmp_path / "learned"), "spec_decode": "ngram"}
    with live(lambda: load(LoadConfig.of(**named, kv_gb=0.01, prior=False), lines.append)) as server:
        assert any("n-grams draft until a head is better" in line for line in lines)
        assert server.http.post(COMPLETIONS, json={"prompt": "a b c a b c", "max_tokens": 8}).status_code == 200
        server.until(lambda: number(server, "eagle:learn_texts_total") == 1)
        now = server.http.get("/v1/spec_decode/metrics").json()
        assert (now["spec_decode_modes"], now["spec_decode_drafters"]) == (["ngram", "none"], ["ngram"])


def test_a_model_whose_texts_cannot_be_written_still_gives_back_its_memory(
    models: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folders = {"learn": str(tmp_path / "learned"), "prefix_cache_dir": str(tmp_path / "cache"), "prefix_disk_gb": 0.1}
    before = set(enumerate_threads())

    def full(texts: Texts, example: Example) -> None:
        raise OSError(28, "No space left on device")

    with live(lambda: load(config(models, **folders), lambda _: None)) as server:
        assert server.http.post(COMPLETIONS, json={"prompt": "a b c", "max_tokens": 4}).status_code == 200
        monkeypatch.setattr(Texts, "add", full)
        assert server.http.post("/admin/unload", json={"model": NAME}).status_code == 200
        server.until(lambda: not any("writer" in thread.name for thread in {*enumerate_threads()} - before))
        assert len(list(tmp_path.glob("cache/memory-*.npz"))) == 1


def test_a_model_that_cannot_be_loaded_leaves_no_thread_in_memory(models: Path, tmp_path: Path) -> None:
    """A thread would keep the weights, and each request loads the model again."""
    folders = {"learn": str(tmp_path / "learned"), "prefix_cache_dir": str(tmp_path / "cache"), "prefix_disk_gb": 0.1}
    before = set(enumerate_threads())
    for _ in range(2):
        with pytest.raises(ConfigError, match="missing.txt"):
            load(config(models, **folders, memory=(str(tmp_path / "missing.txt"),)), lambda _: None)
    for thread in {*enumerate_threads()} - before:
        thread.join(20)
        assert not thread.is_alive(), thread.name


class Eager:
    """Always has work to do; a piece of it can be held."""

    collector = None
    pending = True

    def __init__(self) -> None:
        self.done: list[str] = []
        self.held, self.entered, self.released = Event(), Event(), Event()

    def work(self) -> None:
        self.done.append("work")
        if self.held.is_set():
            self.entered.set()
            self.released.wait(20)

    def may_work(self, seconds: float) -> bool:
        assert seconds >= 0
        return False

    def close(self) -> None: ...


def test_a_request_waits_for_one_piece_of_learning_at_most() -> None:
    learner = Eager()

    def loaded() -> Loaded:
        made = Loaded(engine(), "ngram", DEPTH, {"temperature": 0.0})
        step = made.engine.step

        def counted() -> Any:
            learner.done.append("step")
            return step()

        made.engine.step = counted  # type: ignore[method-assign]
        made.learner = learner  # type: ignore[assignment]
        return made

    with live(loaded) as server, ThreadPoolExecutor() as pool:
        server.until(lambda: len(learner.done) > 3)
        learner.held.set()
        assert learner.entered.wait(20)
        before = len(learner.done)
        worker, submitted = server.service.worker, Event()
        submit = worker.submit
        worker.submit = lambda job: (submit(job), submitted.set())[0]  # type: ignore[method-assign, func-returns-value]
        answer = pool.submit(server.http.post, COMPLETIONS, json={"prompt": "x", "max_tokens": 30, "ignore_eos": True})
        assert submitted.wait(20)
        learner.held.clear()
        learner.released.set()
        assert answer.result().status_code == 200
        after = learner.done[before:]
        steps = after.index("work") if "work" in after else len(after)
        assert steps > 5
        assert "step" not in after[steps:]


def test_a_head_that_learns_keeps_its_unused_model_loaded() -> None:
    learner = Eager()

    def loaded() -> Loaded:
        made = Loaded(engine(), "ngram", DEPTH)
        made.learner = learner  # type: ignore[assignment]
        return made

    with live(models=one_model(loaded, wide(idle_unload_minutes=1e-4))) as server:
        began = server.service.last_used
        server.until(lambda: perf_counter() - began > 0.3)
        assert server.service.state == "loaded"
        learner.pending = False
        server.until(lambda: server.service.state == "unloaded")
