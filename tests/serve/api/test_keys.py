"""A key can neither read, change nor infer what requests of another key leave behind.

For stored responses see `test_responses.py`, for cached prompts `test_prefixes.py` and `test_prefix_disk.py`.
"""

from __future__ import annotations

import logging
import subprocess
from collections.abc import Iterator
from hashlib import blake2b
from pathlib import Path
from typing import Any

import pytest
from prometheus_client.parser import text_string_to_metric_families

from eagle_mlx.serve.api.loader import load
from eagle_mlx.serve.api.options import LoadConfig
from eagle_mlx.serve.speculation import Speculation
from tests.fakes import tiny_target_folder
from tests.serve.api.live import DEPTH, Live, live, remembering, wide

SECRET = "The password of the door is 4711."
PATHS = {
    "/v1/chat/completions": {"messages": [{"role": "user", "content": SECRET}], "max_tokens": 2},
    "/v1/messages": {"messages": [{"role": "user", "content": SECRET}], "max_tokens": 2},
    "/v1/responses": {"input": SECRET, "max_output_tokens": 2},
    "/v1/completions": {"prompt": SECRET, "max_tokens": 2},
    "/tokenize": {"prompt": SECRET},
}
LONGER = {
    path: {**body, limit: 24}
    for path, body in PATHS.items()
    for limit in ("max_tokens", "max_output_tokens")
    if limit in body
}


def post(server: Live, key: str, path: str, body: dict[str, Any]) -> None:
    answer = server.http.post(path, json=body, headers={"Authorization": f"Bearer {key}"})
    assert answer.status_code == 200, answer.text


def test_metrics_and_log_lines_hold_no_text_and_no_key(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    with live(settings=wide(api_key="mine-key your-key")) as server:
        for path, body in PATHS.items():
            post(server, "mine-key", path, body)
        metrics = server.http.get("/metrics").text
        headers = {"Authorization": "Bearer your-key"}
        summary = server.http.get("/v1/spec_decode/metrics", headers=headers).text
    assert "request" in caplog.text
    for secret in ("4711", "mine-key", blake2b(b"mine-key", digest_size=16).hexdigest()):
        assert not any(secret in text for text in (metrics, summary, caplog.text))
    labels = {
        label
        for family in text_string_to_metric_families(metrics)
        for sample in family.samples
        for label in sample.labels
    }
    assert labels == {"model_name", "outcome", "position", "depth", "le"}


def accepted(server: Live, key: str, path: str, **fields: Any) -> int:
    """Return how many draft tokens an answer accepted."""
    before = server.service.totals.accepted
    post(server, key, path, {**LONGER[path], **fields})
    return server.service.totals.accepted - before


@pytest.mark.parametrize("path", LONGER)
def test_a_text_drafts_for_its_own_key_and_salt_only(path: str) -> None:
    with live(remembering, wide(api_key="mine yours")) as server:
        first = accepted(server, "mine", path)
        assert accepted(server, "mine", path, memory=False) == first
        assert accepted(server, "mine", path) > first
        assert accepted(server, "yours", path) == first
        assert accepted(server, "mine", path, cache_salt="pepper") == first
        assert accepted(server, "mine", path, cache_salt="pepper") > first
        assert b"eagle:memory_bytes" in server.http.get("/metrics").content


def test_after_a_restart_a_text_drafts_for_its_own_key_and_salt_only(tmp_path: Path) -> None:
    model = tiny_target_folder(tmp_path / "model")
    speculation = Speculation(mode="ngram", policy="fixed", num_tokens=DEPTH, ngram_min=12)
    config = LoadConfig(model, speculation, prefix_cache_dir=tmp_path / "cache", prefix_disk_gb=1.0)
    lines = list[str]()

    def count(server: Live, key: str, **fields: Any) -> int:
        return accepted(server, key, "/v1/chat/completions", temperature=0, **fields)

    with live(lambda: load(config, lines.append), wide(api_key="mine yours")) as server:
        first = count(server, "mine")
        salted = count(server, "mine", cache_salt="pepper")
    with live(lambda: load(config, lines.append), wide(api_key="mine yours")) as server:
        assert count(server, "yours") == first == salted
        assert count(server, "mine", cache_salt="salt") == first
        assert count(server, "mine") > first
        assert count(server, "mine", cache_salt="pepper") > first
    [file] = (tmp_path / "cache").glob("memory-*")
    assert b"pepper" not in file.read_bytes()
    assert f"memory file: {file}" in lines


def test_a_request_that_refuses_the_memory_leaves_nothing_to_it() -> None:
    with live(remembering, wide(api_key="mine")) as server:
        path = "/v1/chat/completions"
        first = accepted(server, "mine", path, memory=False)
        assert accepted(server, "mine", path) == first


def test_a_grammar_is_vetted_for_each_key(monkeypatch: pytest.MonkeyPatch) -> None:
    """Otherwise the time of the first answer would tell whether another key has used a schema."""
    vetted, run = list[str](), subprocess.run

    def noted(*args: Any, **options: Any) -> Any:
        vetted.append(options["input"])
        return run(*args, **options)

    monkeypatch.setattr(subprocess, "run", noted)
    schema = {"name": "a", "schema": {"type": "object", "properties": {"door": {"const": 4711}}}}
    form = {"response_format": {"type": "json_schema", "json_schema": schema}}
    with live(settings=wide(api_key="mine yours")) as server:
        for key, salt, times in [("mine", None, 1), ("mine", None, 1), ("yours", None, 2), ("yours", "pepper", 3)]:
            body = PATHS["/v1/chat/completions"] | form | ({"cache_salt": salt} if salt else {})
            post(server, key, "/v1/chat/completions", body)
            assert len(vetted) == times


@pytest.mark.parametrize(
    ("key", "path", "expected"),
    [
        ("first", "/admin/load", 200),
        ("first", "/admin/speculation", 200),
        ("second", "/admin/load", 403),
        ("second", "/admin/unload", 403),
        ("second", "/admin/speculation", 403),
        ("third", "/admin/load", 401),
    ],
)
def test_only_the_first_key_may_use_admin(two_keys: Live, key: str, path: str, expected: int) -> None:
    answer = two_keys.http.post(path, json={"model": "tiny"}, headers={"Authorization": f"Bearer {key}"})
    assert answer.status_code == expected
    if expected == 403:
        assert answer.json()["error"]["code"] == "admin_key_needed"


@pytest.fixture(scope="module")
def two_keys() -> Iterator[Live]:
    with live(settings=wide(api_key="first second")) as server:
        yield server
