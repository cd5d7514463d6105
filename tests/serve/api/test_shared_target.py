"""A server with a target sharded over two processes: same answers, a common end, and every request is answered."""

from __future__ import annotations

import json
import signal
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from threading import Thread
from time import monotonic, sleep
from typing import Any

import httpx
import pytest

import eagle_mlx as em
from eagle_mlx.errors import ConfigError
from eagle_mlx.heads.eagle3 import save_eagle3
from eagle_mlx.serve.api.cli import main
from eagle_mlx.serve.api.options import LoadConfig
from eagle_mlx.serve.speculation import Speculation
from eagle_mlx.target_options import TargetOptions
from tests.fakes import tiny_head, tiny_target_folder
from tests.forks import Fork
from tests.full import FULL
from tests.processes import ended, free_ports, needs_ring, start

PROMPT = "def median(values):"


@dataclass
class Shared:
    """Two processes; the first one listens."""

    processes: list[Fork]
    http: httpx.Client

    def until_ready(self) -> None:
        until = monotonic() + 90
        while monotonic() < until:
            if any(process.poll() is not None for process in self.processes):
                raise AssertionError([errors[-2000:] for _, errors in ended(self.processes)])
            with suppress(httpx.TransportError):  # not listening yet
                if self.http.get("/health").status_code == 200:
                    return
            sleep(0.1)
        raise AssertionError("the server is not ready")

    def complete(self, tokens: int, **more: Any) -> httpx.Response:
        body = {"prompt": PROMPT, "max_tokens": tokens, "temperature": 0, "ignore_eos": True, **more}
        return self.http.post("/v1/completions", json=body)


@contextmanager
def shared(target: Path, folder: Path, shard: str = "tensor", drafts: str = "--spec-decode ngram") -> Iterator[Shared]:
    [port] = free_ports(1)
    flags = f"--target {target} --shard {shard} {drafts} --rank-seconds 30 --port {port} --no-prior"
    processes = start(2, folder, "eagle_mlx.serve.api.cli", *flags.split())
    try:
        with httpx.Client(base_url=f"http://127.0.0.1:{port}", timeout=60) as http:
            yield Shared(processes, http)
    finally:
        for process in processes:
            process.kill()
            process.communicate()


@needs_ring
def test_answers_are_those_of_one_process_and_sigterm_at_any_rank_drains(tmp_path: Path) -> None:
    target = tiny_target_folder(tmp_path / "target")
    whole = em.load_target(target)
    plain = em.Engine(whole, max_batch=1).generate([PROMPT], em.SamplingParams(max_tokens=24, ignore_eos=True))[0]
    with shared(target, tmp_path) as server:
        server.until_ready()
        assert server.complete(24).json()["choices"][0]["text"] == plain.text
        choices = {"type": "json_schema", "json_schema": {"name": "a", "schema": {"enum": ["yes", "no"]}}}
        answer = server.http.post(
            "/v1/chat/completions",
            json={"messages": [{"role": "user", "content": "?"}], "seed": 3, "response_format": choices},
        ).json()
        assert json.loads(answer["choices"][0]["message"]["content"]) in ("yes", "no")
        assert server.complete(1, echo=True, logprobs=1).json()["choices"][0]["logprobs"]["tokens"]
        metrics = server.http.get("/metrics").text
        assert 'eagle:ranks{model_name="target"} 2.0' in metrics
        kept = server.http.post("/admin/unload", json={"model": "target"})
        assert kept.status_code == 409
        assert "runs on several machines" in kept.json()["error"]["message"]
        answers: list[httpx.Response] = []
        asking = Thread(target=lambda: answers.append(server.complete(200)))
        asking.start()
        while 'eagle:rows{model_name="target"} 1.0' not in server.http.get("/metrics").text:
            sleep(0.01)
        server.processes[1].send_signal(signal.SIGTERM)
        asking.join()
        assert answers[0].status_code == 200, answers[0].text
        assert answers[0].json()["usage"]["completion_tokens"] == 200
        assert [process.wait(60) for process in server.processes] == [0, 0]


@needs_ring
@pytest.mark.skipif(not FULL, reason="tests of the ranks themselves have the same texts and the same refusal")
def test_layers_on_two_machines_answer_as_one_process_and_refuse_a_head(tmp_path: Path) -> None:
    target = tiny_target_folder(tmp_path / "target", architecture="qwen2")
    whole = em.load_target(target)
    plain = em.Engine(whole, max_batch=1).generate([PROMPT], em.SamplingParams(max_tokens=24, ignore_eos=True))[0]
    with shared(target, tmp_path, "pipeline") as server:
        server.until_ready()
        assert server.complete(24).json()["choices"][0]["text"] == plain.text
        server.processes[0].send_signal(signal.SIGTERM)
        assert [process.wait(60) for process in server.processes] == [0, 0]
    save_eagle3(tiny_head(whole), tmp_path / "head", target_name="tiny")
    with shared(target, tmp_path, "pipeline", f"--head {tmp_path / 'head'}") as server:
        [(_, errors), _] = ended(server.processes)
        assert "so a head cannot read them; draft with n-grams or a draft model, or use --shard tensor" in errors
        assert server.processes[0].returncode == 2


@needs_ring
def test_requests_end_with_an_error_if_the_other_rank_is_killed(tmp_path: Path) -> None:
    with shared(tiny_target_folder(tmp_path / "target"), tmp_path) as server:
        server.until_ready()
        answers: list[httpx.Response] = []
        asking = [Thread(target=lambda: answers.append(server.complete(400))) for _ in range(3)]
        for thread in asking:
            thread.start()
        while 'eagle:rows{model_name="target"} 3.0' not in server.http.get("/metrics").text:
            sleep(0.01)
        server.processes[1].kill()
        for thread in asking:
            thread.join()
        assert [answer.status_code for answer in answers] == [500] * 3
        assert all("rank 1" in answer.json()["error"]["message"] for answer in answers)
        assert server.processes[0].wait(60) == 2


def test_settings_that_conflict_with_a_shard_are_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(ConfigError, match="--prefix-cache-dir cannot be used with --shard"):
        LoadConfig("a", Speculation(), loading=TargetOptions(shard="tensor"), prefix_cache_dir=tmp_path)
    models = tmp_path / "models.yaml"
    models.write_text("one: {target: a, shard: tensor}")
    assert main(["--models", str(models)]) == 2
    assert "one has a shard; serve that model alone" in capsys.readouterr().err
