"""Reuse of earlier chats, with a model that has recurrent states besides keys and values."""

from __future__ import annotations

import importlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import eagle_mlx as em
from eagle_mlx.engine.disk import DiskTier
from eagle_mlx.serve.api.model import Loaded
from tests.architectures import COMMON, CONFIGS
from tests.fakes import embedded_tokenizer, randomize
from tests.serve.api.live import NAME, Live, live, wide

SYSTEM = {"role": "system", "content": "You write Python and nothing else. " * 6}
HEADER = "x-anthropic-billing-header: cc_version=2.1; cch={};\n"


def load(folder: Path | None = None) -> Loaded:
    """`folder`: for files of the prefix cache."""
    arch = importlib.import_module("mlx_lm.models.lfm2")
    config = {"model_type": "lfm2", **COMMON, **CONFIGS["lfm2"], "vocab_size": 4096}
    model = arch.Model(arch.ModelArgs.from_dict(config))
    randomize(model, 0, 0.2)
    target = em.Target(model, embedded_tokenizer(), name="hybrid")
    files = DiskTier(folder, 1 << 30, target) if folder is not None else None
    return Loaded(em.Engine(target, prefix_cache_bytes=1 << 24, prefix_files=files), "none", 0, {"temperature": 0.0})


@pytest.fixture(scope="module")
def hybrid() -> Iterator[Live]:
    with live(load) as running:
        yield running


def asked(running: Live, *messages: dict[str, Any]) -> tuple[int, int]:
    """Return the number of a chat's prompt tokens, and how many of them were reused."""
    body = {"model": NAME, "messages": list(messages), "max_tokens": 5}
    usage = running.http.post("/v1/chat/completions", json=body).json()["usage"]
    return usage["prompt_tokens"], usage["prompt_tokens_details"]["cached_tokens"]


def user(text: str) -> dict[str, Any]:
    return {"role": "user", "content": text}


def test_another_question_and_the_next_turn_are_not_read_from_the_start(hybrid: Live) -> None:
    first, cached = asked(hybrid, SYSTEM, user("How do I open a file and read it line by line?"))
    assert cached == 0
    other, cached = asked(hybrid, SYSTEM, user("What is a list?"))
    assert other - cached < 20
    question = user("How do I open a file and read it line by line?")
    following, cached = asked(hybrid, SYSTEM, question, {"role": "assistant", "content": "So."}, user("And close it?"))
    assert cached > first - 10
    assert following - cached < 40


def test_changing_headers_are_removed(hybrid: Live) -> None:
    chat: list[dict[str, Any]] = [user("Count to three, one number a turn, and wait for me in between.")]
    for number in range(4):
        rules = {"role": "system", "content": HEADER.format(number) + SYSTEM["content"]}
        _, cached = asked(hybrid, rules, *chat)
        assert cached > 40 if number else cached >= 0
        chat += [{"role": "assistant", "content": str(number)}, user("Go on, please.")]


MESSAGES, RESPONSES, CHAT = "/v1/messages", "/v1/responses", "/v1/chat/completions"
TEXT = "The password of the door is 4711, and nobody else may know it. " * 3


def cached_tokens(running: Live, path: str, key: str = "", **more: Any) -> int:
    """Return how many prompt tokens were reused, as this API reports it."""
    fields = {"input": TEXT} if path == RESPONSES else {"messages": [user(TEXT)], "max_tokens": 3}
    body = fields | ({"max_output_tokens": 3} if path == RESPONSES else {}) | more
    answer = running.http.post(path, json=body, headers={"x-api-key": key, "Authorization": ""}).json()
    usage = answer["usage"]
    if path == MESSAGES:
        told: int = usage["cache_read_input_tokens"]
        assert usage["input_tokens"] + told == len(running_prompt(running))
        return told
    told = usage["prompt_tokens_details" if path == CHAT else "input_tokens_details"]["cached_tokens"]
    assert answer["timings"]["cache_n"] == told
    return told


def running_prompt(running: Live) -> list[int]:
    assert running.service.loaded is not None
    return running.service.loaded.chat.chat([user(TEXT)]).tokens()


@pytest.mark.parametrize("path", [CHAT, MESSAGES, RESPONSES])
def test_prompts_of_other_keys_and_salts_stay_hidden(path: str) -> None:
    with live(load, wide(api_key="mine yours")) as running:
        assert cached_tokens(running, path, "mine") == 0
        assert cached_tokens(running, path, "yours") == 0
        assert cached_tokens(running, path, "mine") > 16
        assert cached_tokens(running, path, "mine", cache_salt="pepper") == 0
        assert cached_tokens(running, path, "yours", cache_salt="pepper") == 0
        assert cached_tokens(running, path, "mine", cache_salt="pepper") > 16
        refused = running.http.post(path, json={"cache_salt": ""}, headers={"x-api-key": "mine"})
        assert refused.status_code == 400
        assert running.http.post(path, json={}, headers={"x-api-key": "mine yours"}).status_code == 401


def test_without_keys_requests_share_unless_they_are_salted() -> None:
    with live(load) as running:
        assert cached_tokens(running, CHAT) == 0
        assert cached_tokens(running, MESSAGES) > 16
        assert cached_tokens(running, CHAT, cache_salt="pepper") == 0


def test_counts_can_be_hidden() -> None:
    with live(load, wide(cache_report=False)) as running:
        for path in (CHAT, CHAT, MESSAGES, RESPONSES):
            assert cached_tokens(running, path) == 0
        assert running.service.totals.cached_tokens > 0
        metrics = running.http.get("/metrics").text
        assert "eagle:prompt_tokens_total" in metrics
        assert "cached" not in metrics
        assert "prefix" not in metrics
        body = {"messages": [user(TEXT)], "max_tokens": 3, "stream": True, "stream_options": {"include_usage": True}}
        assert '"cached_tokens":0' in running.http.post(CHAT, json=body).text
