"""Several models in one server: requests get the model that they name, as far as memory allows."""

from __future__ import annotations

import gc
import json
import shutil
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from threading import Event
from time import perf_counter
from typing import Any, NoReturn

import httpx
import mlx.core as mx
import pytest

import eagle_mlx as em
from eagle_mlx.errors import TargetError
from eagle_mlx.serve.api.limits import Limits
from eagle_mlx.serve.api.loader import load, weights_bytes
from eagle_mlx.serve.api.loader import several as several_sources
from eagle_mlx.serve.api.model import Loaded
from eagle_mlx.serve.api.models import Models
from eagle_mlx.serve.api.options import LoadConfig, Settings
from eagle_mlx.serve.api.service import ModelSource
from eagle_mlx.serve.speculation import MemoryOptions, Speculation
from tests.fakes import tiny_target, tiny_target_folder
from tests.serve.api.live import DEPTH, NAME, Live, live, one_model, wide
from tests.serve.api.test_status import samples

CHAT, COMPLETIONS, MESSAGES, RESPONSES = "/v1/chat/completions", "/v1/completions", "/v1/messages", "/v1/responses"
PROMPT = "def f(x):\n    return x\n"
SAID = [{"role": "user", "content": "x"}]
SEEDS = {"a": 1, "b": 2, "c": 3}


class Loads:
    """Loads models by name, and counts the loads. `before` may take time or raise."""

    def __init__(self) -> None:
        self.count: Counter[str] = Counter()
        self.before: Callable[[str], object] = lambda name: None

    def __call__(self, name: str) -> Loaded:
        self.count[name] += 1
        self.before(name)
        return Loaded(made(SEEDS[name], em.NgramProposer()), "ngram", DEPTH, {"temperature": 0.0})


def made(seed: int, proposer: em.NgramProposer | None = None) -> em.Engine:
    target = tiny_target(seed, layers=2, tokenizer=True)
    target.context_length = 512
    return em.Engine(target, proposer, policy=em.FixedPolicy(DEPTH), max_batch=4, prefix_cache_bytes=1 << 22)


@contextmanager
def serving(loads: Loads, room: int | None = None, settings: Settings | None = None) -> Iterator[Live]:
    """Serve the models of SEEDS, of which `room` fit in memory."""
    sources = [ModelSource(name, partial(loads, name), 4, lambda: 100) for name in SEEDS]
    with live(models=Models(settings or wide(), sources, None if room is None else 100 * room)) as server:
        yield server


def complete(server: Live, model: str, **more: object) -> httpx.Response:
    return server.http.post(COMPLETIONS, json={"model": model, "prompt": PROMPT, "max_tokens": 24, **more})


def states(server: Live) -> dict[str, str]:
    return {model["id"]: model["state"] for model in server.http.get("/v1/models").json()["data"]}


@pytest.fixture(scope="module")
def wanted() -> dict[str, str]:
    """Return each model's own text, without drafts."""
    params = em.SamplingParams(max_tokens=24)
    return {name: made(seed).generate([PROMPT], params)[0].text for name, seed in SEEDS.items()}


@pytest.fixture(scope="module")
def several() -> Iterator[Live]:
    with serving(Loads()) as server:
        yield server


def test_each_model_decodes_as_it_does_alone(wanted: dict[str, str]) -> None:
    """Loaded by the first requests, four at once for each, while the others load and decode."""
    loads = Loads()
    assert len(set(wanted.values())) == len(SEEDS)
    with serving(loads) as server, ThreadPoolExecutor(12) as pool:
        assert states(server) == dict.fromkeys(SEEDS, "unloaded")
        assert server.http.get("/health").json() == {"status": "ready"}
        answers = [(name, pool.submit(complete, server, name)) for _ in range(4) for name in SEEDS]
        for name, answer in answers:
            body = answer.result().json()
            assert (body["model"], body["choices"][0]["text"]) == (name, wanted[name])
        assert loads.count == dict.fromkeys(SEEDS, 1)
        assert states(server) == dict.fromkeys(SEEDS, "loaded")
        numbers = samples(server, labelled=True)
        assert [numbers[f"eagle:requests_total{{model_name={name}}}{{outcome=finished}}"] for name in SEEDS] == [4] * 3


def test_every_api_accepts_a_model_name(several: Live) -> None:
    for path, body in [
        (CHAT, {"messages": SAID, "max_tokens": 4}),
        (MESSAGES, {"messages": SAID, "max_tokens": 4}),
        (RESPONSES, {"input": "x", "max_output_tokens": 4}),
    ]:
        for name in ("a", "b"):
            answer = several.http.post(path, json={"model": name, **body})
            assert (answer.status_code, answer.json()["model"]) == (200, name)
    for path in ("/tokenize", "/v1/messages/count_tokens"):
        body = {"model": "b", "messages": SAID}
        assert several.http.post(path, json=body).status_code == 200
    assert several.http.get("/v1/spec_decode/metrics", params={"model": "a"}).json()["spec_decode_mode"] == "ngram"


def test_an_unknown_name_is_refused_with_the_known_ones(several: Live) -> None:
    listing = "available: 'a', 'b', 'c'"
    for path, body in [
        (CHAT, {"messages": SAID}),
        (COMPLETIONS, {"prompt": "x"}),
        (RESPONSES, {"input": "x"}),
        ("/tokenize", {"prompt": "x"}),
        ("/admin/load", {}),
        ("/admin/unload", {}),
        ("/admin/speculation", {}),
    ]:
        answer = several.http.post(path, json={"model": "d", **body})
        error = answer.json()["error"]
        assert (answer.status_code, error["code"], error["param"]) == (404, "model_not_found", "model")
        assert listing in error["message"]
    for path, more in ((MESSAGES, {"max_tokens": 4}), ("/v1/messages/count_tokens", {})):
        answer = several.http.post(path, json={"model": "d", "messages": SAID, **more})
        assert (answer.status_code, answer.json()["type"]) == (404, "error")
        assert answer.json()["error"]["type"] == "not_found_error"
        assert listing in answer.json()["error"]["message"]
    assert several.http.get("/v1/models/d").json()["error"]["code"] == "model_not_found"
    answer = several.http.post(COMPLETIONS, json={"prompt": "x"})
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, "model")
    assert "this server has several: 'a', 'b', 'c'" in answer.json()["error"]["message"]


def test_the_model_idle_longest_is_unloaded(wanted: dict[str, str]) -> None:
    loads = Loads()
    with serving(loads, room=2) as server:
        for name in ("a", "b", "a", "c", "a"):
            assert complete(server, name).json()["choices"][0]["text"] == wanted[name]
        assert states(server) == {"a": "loaded", "b": "unloaded", "c": "loaded"}
        assert complete(server, "b").json()["choices"][0]["text"] == wanted["b"]
        assert states(server) == {"a": "loaded", "b": "loaded", "c": "unloaded"}
        assert loads.count == {"a": 1, "b": 2, "c": 1}
        numbers = samples(server, labelled=True)
        assert [numbers[f"eagle:loaded{{model_name={name}}}"] for name in SEEDS] == [1, 1, 0]
        assert numbers["eagle:requests_total{model_name=c}{outcome=finished}"] == 1  # kept after unloading


def test_unloading_frees_memory() -> None:
    taken: dict[str, int] = {}
    with serving(Loads(), room=1) as server:
        for name in ("a", "b", "a", "b"):  # the first time, each thread takes a few bytes and keeps them
            before = taken.get(name)
            assert complete(server, name).status_code == 200
            gc.collect()
            taken[name] = mx.get_active_memory()
        assert before == taken["b"]
        assert server.http.post("/admin/unload", json={"model": "b"}).json()["state"] == "unloaded"
        gc.collect()
        without = mx.get_active_memory()
        assert without <= taken["b"] - made(1).target.weight_bytes


def test_a_model_with_requests_is_not_unloaded() -> None:
    settings = wide(Limits(room_seconds=0.2))
    with serving(Loads(), room=1, settings=settings) as server:
        assert complete(server, "a").status_code == 200
        with (
            server.slowed(),
            server.openai.completions.with_streaming_response.create(
                model="a", prompt=PROMPT, max_tokens=400, stream=True, extra_body={"ignore_eos": True}
            ),
        ):
            busy = server.http.post("/admin/unload", json={"model": "a"})
            assert (busy.status_code, busy.json()["error"]["code"]) == (409, "model_busy")
            late = complete(server, "b")
            assert (late.status_code, late.json()["error"]["code"]) == (503, "no_room")
            assert int(late.headers["retry-after"]) > 0
            assert states(server) == {"a": "loaded", "b": "unloaded", "c": "unloaded"}
        server.until(lambda: server.idle)
        assert complete(server, "b").status_code == 200  # the disconnected client's model could be unloaded


def test_a_model_without_memory_waits_for_another_to_finish() -> None:
    with serving(Loads(), room=1) as server, ThreadPoolExecutor(2) as pool:
        assert complete(server, "a").status_code == 200
        with server.slowed():
            first = pool.submit(complete, server, "a")
            server.until(lambda: not server.idle)
            second = pool.submit(complete, server, "b")
            server.until(lambda: server.models.services["b"].state == "loading")
            assert states(server) == {"a": "loaded", "b": "loading", "c": "unloaded"}
            busy = server.http.post("/admin/unload", json={"model": "a"})
            assert (busy.status_code, busy.json()["error"]["code"]) == (409, "model_busy")
            assert states(server)["b"] == "loading", "nobody waits for the load to be told so"
        assert [first.result().status_code, second.result().status_code] == [200, 200]
        assert states(server) == {"a": "unloaded", "b": "loaded", "c": "unloaded"}


def test_a_failed_load_is_reported_and_can_be_retried(wanted: dict[str, str]) -> None:
    loads = Loads()

    def missing(name: str) -> None:
        raise TargetError(f"there is no folder {name}")

    with serving(loads) as server, ThreadPoolExecutor(3) as pool:
        loads.before = missing
        for answer in pool.map(partial(complete, server), "aaa"):
            assert answer.status_code == 500
            error = answer.json()["error"]
            assert error["code"] == "model_not_loaded"
            assert error["message"] == "model 'a' could not be loaded; see the server's log"
        answer = server.http.post(MESSAGES, json={"model": "a", "messages": SAID, "max_tokens": 4})
        assert (answer.status_code, answer.json()["error"]["type"]) == (500, "api_error")
        assert states(server)["a"] == "failed"
        loads.before = lambda name: None
        assert complete(server, "a").json()["choices"][0]["text"] == wanted["a"]
        assert states(server)["a"] == "loaded"


def truncate(folder: Path) -> None:
    weights = folder / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-100])


def replace_weights(folder: Path) -> None:
    shutil.copy(tiny_target_folder(folder / "other", layers=1) / "model.safetensors", folder / "model.safetensors")


DAMAGES: dict[str, tuple[Callable[[Path], object], str]] = {
    "no JSON": (lambda folder: (folder / "config.json").write_text("{"), "cannot be loaded as a target"),
    "unknown": (lambda folder: (folder / "config.json").write_text('{"model_type": "new"}'), "new not supported"),
    "no config": (lambda folder: (folder / "config.json").unlink(), "config.json"),
    "no tokenizer": (lambda folder: (folder / "tokenizer.json").write_text("{"), "no tokenizer"),
    "no weights": (lambda folder: (folder / "model.safetensors").unlink(), "has no weights"),
    "cut short": (truncate, "is damaged or cut short"),
    "others": (replace_weights, "cannot be loaded as a target"),
    "gone": (shutil.rmtree, "there is no folder"),
}


def test_a_broken_model_does_not_unload_a_working_one(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    works = tiny_target_folder(tmp_path / "works", layers=2)
    for name, (damage, _) in DAMAGES.items():
        damage(Path(shutil.copytree(works, tmp_path / name)))
    memory = MemoryOptions(kv_gb=(1 << 22) / 1e9)
    names = ("works", *DAMAGES)
    configs = {name: LoadConfig(tmp_path / name, Speculation(mode="none"), memory=memory) for name in names}
    nbytes = (1 << 22) + weights_bytes(configs["works"]) + 1000  # room for one
    models = Models(wide(), several_sources(configs, nbytes, lambda _: None), nbytes)
    with live(models=models) as server:
        assert complete(server, "works").status_code == 200
        for name in DAMAGES:
            answer = complete(server, name)
            assert (answer.status_code, answer.json()["error"]["code"]) == (500, "model_not_loaded")
            assert str(tmp_path) not in answer.text
        assert states(server) == {"works": "loaded"} | dict.fromkeys(DAMAGES, "failed")
    errors = [record.getMessage() for record in caplog.records if record.levelname == "ERROR"]
    for line, (name, (_, reason)) in zip(errors, DAMAGES.items(), strict=True):
        assert line.startswith(f"model {name} could not be loaded")
        assert reason in line, (name, line)


def test_a_model_is_reloaded_after_its_engine_dies(wanted: dict[str, str]) -> None:
    loads = Loads()
    with serving(loads, room=1) as server:
        assert complete(server, "a").status_code == 200
        loaded = server.service.loaded
        assert loaded is not None

        def die() -> NoReturn:
            raise SystemExit

        loaded.engine.step = die  # type: ignore[method-assign]
        answer = complete(server, "a")
        assert (answer.status_code, answer.json()["error"]["message"]) == (500, "the engine's thread died")
        server.until(lambda: states(server)["a"] == "failed")
        for name in ("b", "a"):
            assert complete(server, name).json()["choices"][0]["text"] == wanted[name]
        assert loads.count == {"a": 2, "b": 1}


@pytest.mark.parametrize("fails", [False, True])
def test_a_stream_sends_events_while_its_model_loads(fails: bool) -> None:
    loads, seen = Loads(), Event()

    def slow(name: str) -> None:
        assert seen.wait(20)
        if fails:
            raise TargetError("it is broken")

    loads.before = slow
    told = "model 'a' could not be loaded; see the server's log"
    for path, body, alive, ends in [
        (CHAT, {"messages": SAID, "max_tokens": 4}, 'data: {"id":"chatcmpl-', "data: [DONE]"),
        (MESSAGES, {"messages": SAID, "max_tokens": 4}, "event: ping", "event: message_stop"),
        (RESPONSES, {"input": "x", "max_output_tokens": 4}, "event: response.created", "event: response.incomplete"),
    ]:
        seen.clear()
        with serving(loads, settings=wide(Limits(keep_alive_seconds=0.02))) as server:
            body = {"model": "a", "stream": True, **body}
            with server.http.stream("POST", path, json=body) as answer:
                assert answer.status_code == 200
                lines = answer.iter_lines()
                assert next(lines).startswith(alive)
                assert complete_other(server)
                seen.set()
                rest = list(lines)
            if fails:
                (error,) = [line for line in rest if told in line]
                fields = json.loads(error.removeprefix("data: "))
                assert "error" in fields or fields["type"] in ("error", "response.failed")
            else:
                assert any(line.startswith(ends) for line in rest)
            server.until(lambda: server.idle)


def complete_other(server: Live) -> bool:
    """Other requests are answered meanwhile."""
    return server.http.get("/v1/models").status_code == 200


def test_a_client_that_leaves_while_the_model_loads_decodes_nothing() -> None:
    loads, ready = Loads(), Event()
    loads.before = lambda name: ready.wait(20)
    with serving(loads) as server:
        with pytest.raises(httpx.ReadTimeout):
            server.http.post(COMPLETIONS, json={"model": "a", "prompt": "x"}, timeout=0.2)
        server.until(lambda: server.idle)
        ready.set()
        server.until(lambda: server.service.loaded is not None)
        assert server.service.totals.rounds == 0
        assert complete(server, "a").status_code == 200


def test_models_are_loaded_and_unloaded_on_request() -> None:
    loads = Loads()
    with serving(loads, settings=wide(api_key="secret", is_local=False)) as server:
        for path in ("/admin/load", "/admin/unload", "/admin/speculation"):
            assert server.http.post(path, json={"model": "a"}, headers={"Authorization": ""}).status_code == 401
        loaded = server.http.post("/admin/load", json={"model": "b"}).json()
        assert (loaded["id"], loaded["state"], loaded["max_model_len"]) == ("b", "loaded", 512)
        assert server.http.get("/v1/models/b").json() == loaded
        assert server.http.post("/admin/load", json={"model": "b"}).json() == loaded
        for _ in range(2):
            unloaded = server.http.post("/admin/unload", json={"model": "b"}).json()
            assert (unloaded["state"], unloaded["max_model_len"]) == ("unloaded", None)
        assert loads.count == {"b": 1}
        assert server.http.get("/v1/spec_decode/metrics", params={"model": "b"}).status_code == 409


def test_without_a_key_only_this_machine_can_load_and_unload() -> None:
    with serving(Loads(), settings=wide(is_local=False)) as server:
        for path in ("/admin/load", "/admin/unload", "/admin/speculation"):
            answer = server.http.post(path, json={"model": "a"})
            assert (answer.status_code, answer.json()["error"]["code"]) == (403, "api_key_needed")
        assert states(server)["a"] == "unloaded"


def test_a_single_model_can_be_unloaded_and_reloaded() -> None:
    with live() as server:
        before = complete(server, "tiny").json()["choices"]
        assert server.http.post("/admin/unload", json={"model": "tiny"}).json()["state"] == "unloaded"
        assert server.http.get("/health").json() == {"status": "ready"}
        assert complete(server, "tiny").json()["choices"] == before


def test_shutdown_drains_all_models() -> None:
    with serving(Loads()) as server, ThreadPoolExecutor(2) as pool:
        for name in "ab":
            assert complete(server, name).status_code == 200
        with server.slowed():
            answers = [pool.submit(complete, server, name, max_tokens=100, ignore_eos=True) for name in "ab"]
            server.until(lambda: all(not server.models.services[name].idle for name in "ab"))
            server.terminate()
            refused = complete(server, "b")
            assert (refused.status_code, refused.json()["error"]["code"]) == (503, "draining")
        assert [answer.result().json()["usage"]["completion_tokens"] for answer in answers] == [100, 100]
        server.until(lambda: server.server.should_exit)


IDLE = 1e-4
"""Minutes: 6 ms."""


def one_that_is_unloaded(model: Path, **settings: Any) -> Models:
    """Return a single model that drafts with a memory, as `--target` and `--idle-unload-minutes` serve it."""
    speculation = Speculation(mode="ngram", policy="fixed", num_tokens=DEPTH, ngram_min=12)
    config = LoadConfig(model, speculation, memory=MemoryOptions(kv_gb=0.01), **settings)
    return one_model(lambda: load(config, lambda _: None), wide(idle_unload_minutes=IDLE))


@pytest.mark.parametrize("in_a_file", [False, True])
def test_a_model_that_nobody_uses_is_unloaded_and_loaded_by_the_next_request(tmp_path: Path, in_a_file: bool) -> None:
    model, body = tiny_target_folder(tmp_path / "model"), {"prompt": PROMPT, "max_tokens": 40, "temperature": 0}
    folder = {"prefix_cache_dir": tmp_path / "cache", "prefix_disk_gb": 0.1} if in_a_file else {}
    with live(models=one_that_is_unloaded(model, **folder)) as server:
        taken, texts, accepted = list[int](), set[str](), list[int]()
        for _ in range(3):
            answer = server.http.post(COMPLETIONS, json=body).json()
            texts.add(answer["choices"][0]["text"])
            accepted.append(answer["timings"]["draft_n_accepted"])
            server.until(lambda: states(server) == {NAME: "unloaded"})
            assert server.http.get("/health").json() == {"status": "ready", "unloaded": [NAME]}
            gc.collect()
            taken.append(mx.get_active_memory())
        assert len(texts) == 1
        assert accepted[0] < accepted[1] == accepted[2]  # the memory of texts has survived
        assert taken[2] <= taken[0]
        assert samples(server)["eagle:loaded"] == 0
        assert server.models.failure is None


def test_unloading_an_unused_model_returns_its_memory(tmp_path: Path) -> None:
    with live(models=one_that_is_unloaded(tiny_target_folder(tmp_path / "model"))) as server:
        server.until(lambda: states(server) == {NAME: "unloaded"})
        gc.collect()
        without = mx.get_active_memory()
        server.models.settings = replace(server.models.settings, idle_unload_minutes=None)
        assert server.http.post("/admin/load", json={"model": NAME}).json()["state"] == "loaded"
        loaded = server.service.loaded
        assert loaded is not None
        assert mx.get_active_memory() >= without + loaded.target.weight_bytes


def test_only_models_without_requests_are_unloaded(wanted: dict[str, str]) -> None:
    loads = Loads()
    with serving(loads, settings=wide(idle_unload_minutes=IDLE)) as server:
        assert server.http.post("/admin/load", json={"model": "b"}).status_code == 200
        with ThreadPoolExecutor(1) as pool:
            answer = pool.submit(complete, server, "a", max_tokens=24)
            server.until(lambda: server.models.services["a"].state == "loaded" or answer.done())
            server.until(lambda: states(server)["b"] == "unloaded")
            assert answer.result().json()["choices"][0]["text"] == wanted["a"]
        server.until(lambda: states(server) == dict.fromkeys(SEEDS, "unloaded"))
        assert complete(server, "b").json()["choices"][0]["text"] == wanted["b"]


def test_a_model_in_use_stays_loaded(tmp_path: Path) -> None:
    with live(models=one_that_is_unloaded(tiny_target_folder(tmp_path / "model"))) as server:
        stream = {"prompt": PROMPT, "max_tokens": 100, "stream": True, "ignore_eos": True}
        assert server.http.post("/admin/load", json={"model": NAME}).status_code == 200
        with server.http.stream("POST", COMPLETIONS, json=stream) as answer:
            lines = answer.iter_lines()
            assert next(lines).startswith("data: ")
            with server.slowed():
                began = server.service.last_used
                server.until(lambda: perf_counter() - began > 20 * 60 * IDLE)
                assert states(server) == {NAME: "loaded"}
            assert list(lines)[-2] == "data: [DONE]"
        server.until(lambda: states(server) == {NAME: "unloaded"})


def test_a_reload_that_fails_is_an_error_of_its_request_and_the_server_goes_on(tmp_path: Path) -> None:
    model = tiny_target_folder(tmp_path / "model")
    with live(models=one_that_is_unloaded(model)) as server:
        server.until(lambda: states(server) == {NAME: "unloaded"})
        model.rename(tmp_path / "elsewhere")
        for _ in range(3):
            assert complete(server, NAME).json()["error"]["code"] == "model_not_loaded"
        (tmp_path / "elsewhere").rename(model)
        assert complete(server, NAME).status_code == 200
