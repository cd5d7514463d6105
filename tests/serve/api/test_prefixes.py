"""What a server takes over of earlier chats, with a model that keeps states beside keys and values."""

from __future__ import annotations

import importlib
import logging
from collections.abc import Iterator
from typing import Any

import pytest

import eagle_mlx as em
from eagle_mlx.serve.api.model import Loaded
from tests.architectures import COMMON, CONFIGS
from tests.fakes import embedded_tokenizer, randomize
from tests.serve.api.live import NAME, Live, live

SYSTEM = {"role": "system", "content": "You write Python and nothing else. " * 6}
HEADER = "x-anthropic-billing-header: cc_version=2.1; cch={};\n"


def load() -> Loaded:
    arch = importlib.import_module("mlx_lm.models.lfm2")
    config = {"model_type": "lfm2", **COMMON, **CONFIGS["lfm2"], "vocab_size": 4096}
    model = arch.Model(arch.ModelArgs.from_dict(config))
    randomize(model, 0, 0.2)
    target = em.Target(model, embedded_tokenizer(), name="hybrid")
    return Loaded(em.Engine(target, prefix_cache_bytes=1 << 24), "none", 0, {"temperature": 0.0})


@pytest.fixture(scope="module")
def hybrid() -> Iterator[Live]:
    with live(load) as running:
        yield running


def asked(running: Live, *messages: dict[str, Any]) -> tuple[int, int]:
    """Tokens of a chat's prompt, and those of them that were taken over."""
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


def test_a_header_that_changes_is_left_out_and_what_else_changes_is_named_once(
    hybrid: Live, caplog: pytest.LogCaptureFixture
) -> None:
    chat: list[dict[str, Any]] = [user("Count to three, one number a turn, and wait for me in between.")]
    with caplog.at_level(logging.WARNING, "eagle_mlx.serve"):
        for number in range(4):
            rules = {"role": "system", "content": HEADER.format(number) + SYSTEM["content"]}
            _, cached = asked(hybrid, rules, *chat)
            assert cached > 40 if number else cached >= 0
            chat += [{"role": "assistant", "content": str(number)}, user("Go on, please.")]
        assert not caplog.messages
        for number in range(3):
            asked(hybrid, {"role": "system", "content": f"It is {number} o'clock."}, *chat)
            chat += [{"role": "assistant", "content": str(number)}, user("Go on, please.")]
    [said] = caplog.messages
    assert said.startswith("messages[0] (system) has changed")
