"""What the server reports about itself, and how it counts text."""

from __future__ import annotations

from importlib import metadata
from itertools import count
from typing import Any

import pytest
from prometheus_client.parser import text_string_to_metric_families

import eagle_mlx as em
from eagle_mlx.plan import Plan, RoundResult
from eagle_mlx.proposers.ngram import NgramState
from eagle_mlx.serve.api.model import Loaded
from eagle_mlx.serve.api.service import Totals
from eagle_mlx.target import nbytes_of
from tests.fakes import tiny_target
from tests.serve.api.given import given_target
from tests.serve.api.live import DEPTH, NAME, Live, engine, live, wide

COMPLETIONS = "/v1/completions"
PROMPT = "def f(x):\n    return x\n" * 6


def samples(server: Live, labelled: bool = False) -> dict[str, float]:
    """Return all numbers of /metrics, by name and labels; `labelled` includes the model's label."""
    answer = server.http.get("/metrics")
    assert answer.headers["content-type"].startswith("text/plain")
    return {
        sample.name
        + "".join(
            f"{{{key}={value}}}" for key, value in sample.labels.items() if labelled or key != "model_name"
        ): sample.value
        for family in text_string_to_metric_families(answer.text)
        for sample in family.samples
    }


def test_the_model_is_listed(server: Live) -> None:
    model = server.openai.models.list().data[0]
    assert (model.id, model.object, model.owned_by) == (NAME, "model", "eagle-mlx")
    assert server.openai.models.retrieve(NAME).model_dump() == model.model_dump()
    assert server.http.get("/v1/models").json()["data"][0]["max_model_len"] == 512


def test_the_version_is_told(server: Live) -> None:
    assert server.http.get("/version").json() == {"version": metadata.version("eagle-mlx")}


def test_health_can_be_asked_without_a_body(server: Live) -> None:
    answer = server.http.head("/health")
    assert (answer.status_code, answer.content) == (200, b"")


def test_websocket_requests_are_answered_and_not_logged(server: Live, caplog: pytest.LogCaptureFixture) -> None:
    headers = {"Connection": "Upgrade", "Upgrade": "websocket", "Sec-WebSocket-Version": "13"}
    assert server.http.get("/health", headers=headers).status_code == 200
    assert not caplog.records


def test_a_proposer_that_raised_is_counted_and_drafts_again(monkeypatch: pytest.MonkeyPatch) -> None:
    real, calls = NgramState.draft, count()

    def draft(self: NgramState, *args: Any) -> Any:
        if next(calls) == 0:
            raise RuntimeError("broken once")
        return real(self, *args)

    monkeypatch.setattr(NgramState, "draft", draft)
    with live(lambda: Loaded(engine(), "ngram", DEPTH)) as server:
        body = {"prompt": PROMPT, "max_tokens": 30, "temperature": 0}
        answer = server.http.post(COMPLETIONS, json=body).json()
        counts = answer["metrics"]["speculative_decoding"]
        assert counts["num_draft_failures"] == samples(server)["eagle:draft_failures_total"] == 1
        assert counts["num_draft_tokens"] > 0


def test_the_numbers_add_up() -> None:
    with live(lambda: Loaded(engine(prefix_cache_bytes=1 << 24), "ngram", DEPTH)) as server:
        assert samples(server)["vllm:spec_decode_num_drafts_total"] == 0
        answers = [
            server.http.post(COMPLETIONS, json={"prompt": PROMPT, "n": 2, "max_tokens": 30, "temperature": 0})
            for _ in range(2)
        ]
        told = [answer.json() for answer in answers]
        steps = [answer["metrics"]["speculative_decoding"] for answer in told]
        now = samples(server)
        assert now["vllm:spec_decode_num_drafts_total"] == sum(step["num_spec_steps"] for step in steps) > 0
        assert now["vllm:spec_decode_num_draft_tokens_total"] == sum(step["num_draft_tokens"] for step in steps)
        accepted = sum(step["num_accepted_draft_tokens"] for step in steps)
        assert now["vllm:spec_decode_num_accepted_tokens_total"] == accepted > 0
        by_position = [
            now[f"vllm:spec_decode_num_accepted_tokens_per_pos_total{{position={place}}}"] for place in range(DEPTH)
        ]
        assert sum(by_position) == accepted
        assert by_position == sorted(by_position, reverse=True)
        assert now["eagle:generation_tokens_total"] == 120 == sum(t["usage"]["completion_tokens"] for t in told)
        assert now["eagle:prompt_tokens_total"] == 2 * sum(t["usage"]["prompt_tokens"] for t in told)
        assert now["eagle:cached_prompt_tokens_total"] == sum(t["timings"]["cache_n"] for t in told) > 0
        assert (
            sum(value for key, value in now.items() if key.startswith("eagle:rounds_by_depth_total"))
            == (now["eagle:rounds_total"])
        )
        assert now["eagle:requests_total{outcome=finished}"] == 2
        assert now["eagle:time_to_first_token_seconds_count"] == now["eagle:request_seconds_count"] == 2
        assert (now["eagle:rows"], now["eagle:queue"], now["eagle:rows_max"], now["eagle:ready"]) == (0, 0, 4, 1)
        assert now["eagle:verify_seconds_total"] > now["eagle:draft_seconds_total"] > 0

        summary = server.http.get("/v1/spec_decode/metrics").json()
        assert summary["spec_decode_enabled"] is True
        assert summary["spec_decode_mode"] == "ngram"
        assert summary["total_proposed"] == now["vllm:spec_decode_num_draft_tokens_total"]
        assert summary["total_accepted"] == accepted
        assert 0 <= summary["total_bonus_tokens"] <= 120 - accepted
        assert summary["total_steps"] == now["eagle:row_rounds_total"]
        assert summary["avg_tokens_per_step"] == round(120 / summary["total_steps"], 4)
        assert summary["acceptance_rate_ema"] is None, "a fixed policy estimates nothing"
        assert summary["current_k"] == DEPTH


def test_bonus_tokens_come_after_fully_accepted_drafts() -> None:
    totals = Totals()
    # a whole draft, a part of one, none, and a whole one whose row ended with its last token
    totals.observe(RoundResult(Plan(2), drafted=[2, 2, 0, 1], accepted=[2, 1, 0, 1], taken=[3, 2, 1, 1], seconds=0.1))
    assert (totals.bonus, totals.accepted, totals.emitted) == (1, 4, 7)


def test_forced_tokens_are_counted_apart_from_drafts() -> None:
    totals, plan = Totals(), Plan(2, lookups=(4, 0, 2))
    totals.observe(RoundResult(plan, [4, 2, 2], [3, 1, 2], [4, 2, 3], seconds=0.1, forced=(True, False, False)))
    assert (totals.forced, totals.drafted, totals.accepted, totals.drafts, totals.bonus) == (3, 4, 3, 2, 1)
    assert (totals.emitted, totals.plain_rounds, totals.accepted_by_position[:2]) == (9, 0, [2, 1])


def test_a_request_is_logged_in_one_line_without_its_text(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO", "eagle_mlx.serve")
    with live() as server:
        body = {"prompt": PROMPT, "max_tokens": 30, "temperature": 0, "ignore_eos": True}
        answer = server.http.post(COMPLETIONS, json=body).json()
    [line] = [record.getMessage() for record in caplog.records if record.getMessage().startswith("request ")]
    usage, timings = answer["usage"], answer["timings"]
    assert f"to model {NAME} finished: {usage['prompt_tokens']} prompt tokens (0 cached), 30 tokens" in line
    assert f"{timings['draft_n_accepted']} of {timings['draft_n']} drafts accepted" in line
    assert PROMPT not in line
    assert answer["choices"][0]["text"] not in line
    caplog.clear()
    with live(settings=wide(log_requests=False)) as server:
        server.http.post(COMPLETIONS, json=body)
    assert not [record for record in caplog.records if record.getMessage().startswith("request ")]


def test_memory_is_counted_and_requests_that_never_fit_get_400() -> None:
    made = engine(prefix_cache_bytes=1 << 24)
    allowed = made.kv_budget.size.nbytes(1, 300)
    with live(lambda: Loaded(engine(prefix_cache_bytes=1 << 24, kv_bytes=allowed), "ngram", DEPTH)) as server:
        before = samples(server)
        assert (before["eagle:kv_bytes"], before["eagle:prefix_cache_bytes"]) == (0, 0)
        assert before["eagle:kv_bytes_max"] == allowed
        refused = server.http.post(COMPLETIONS, json={"prompt": [7] * 300})
        assert refused.status_code == 400
        error = refused.json()["error"]
        assert error["code"] == "context_length_exceeded", "agents shorten the conversation"
        assert "maximum context length is 300 tokens" in error["message"]
        assert error["message"].endswith("or raise --kv-gb")
        assert server.http.get("/v1/models").json()["data"][0]["max_model_len"] == 300
        question = {"messages": [{"role": "user", "content": "x " * 300}], "max_tokens": 1}
        refused = server.http.post("/v1/messages", json=question)
        assert refused.json()["error"]["message"].startswith("prompt is too long: ")
        (model,) = server.http.get("/v1/models", headers={"anthropic-version": "2023-06-01"}).json()["data"]
        assert model["max_input_tokens"] == 300
        for limit in ({}, {"max_tokens": 300}):
            body = {"prompt": PROMPT, "temperature": 0, "ignore_eos": True, **limit}
            usage = server.http.post(COMPLETIONS, json=body).json()["usage"]
            assert usage["total_tokens"] == 300  # as if the context were this long
        body = {"prompt": PROMPT, "max_tokens": 150, "temperature": 0, "n": 3, "ignore_eos": True}
        with server.openai.completions.with_streaming_response.create(
            model=NAME, prompt=PROMPT, max_tokens=150, stream=True
        ):
            server.until(lambda: samples(server)["eagle:kv_bytes"] > 0)
            now = samples(server)
            assert now["eagle:kv_bytes"] + now["eagle:prefix_cache_bytes"] <= allowed
        texts = {choice["text"] for choice in server.http.post(COMPLETIONS, json=body).json()["choices"]}
        assert len(texts) == 1  # one after the other, since two do not fit
        server.until(lambda: server.idle)
        assert 0 < samples(server)["eagle:prefix_cache_bytes"] <= allowed


@pytest.mark.parametrize("mode", ["none", "draft", "hybrid"])
def test_weights_and_caches_of_a_draft_model_are_in_the_metrics(mode: str) -> None:
    target, draft = given_target(), tiny_target(seed=1, layers=2, tokenizer=True)
    proposer = em.DraftModelProposer(draft)
    proposers = {"none": None, "draft": proposer, "hybrid": em.HybridProposer(proposer)}
    made = em.Engine(target, proposers[mode], policy=em.FixedPolicy(DEPTH))
    with live(lambda: Loaded(made, mode, DEPTH)) as server:
        before = samples(server)
        assert before["eagle:target_weight_bytes"] == nbytes_of(target.model)
        assert before["eagle:draft_weight_bytes"] == (0 if mode == "none" else nbytes_of(draft.model))
        assert before["eagle:draft_kv_bytes"] == 0
        with server.openai.completions.with_streaming_response.create(
            model=NAME, prompt=PROMPT, max_tokens=150, stream=True
        ):
            server.until(lambda: samples(server)[f"eagle:{'' if mode == 'none' else 'draft_'}kv_bytes"] > 0)
            assert mode != "none" or samples(server)["eagle:draft_kv_bytes"] == 0


def test_the_depth_follows_the_limits_of_requests(server: Live) -> None:
    before = samples(server)
    body = {"prompt": "x", "max_tokens": 20, "temperature": 0, "num_speculative_tokens": 0}
    assert server.http.post(COMPLETIONS, json=body).json()["timings"]["draft_n"] == 0
    now = samples(server)
    name = "vllm:spec_decode_num_draft_tokens_total"
    assert now[name] == before[name]
    body["num_speculative_tokens"] = 1
    counts = server.http.post(COMPLETIONS, json=body).json()["metrics"]["speculative_decoding"]
    assert counts["num_draft_tokens"] == counts["num_spec_steps"] > 0


def test_text_to_tokens_and_back(server: Live) -> None:
    for text in ("def f(x):\n    pass", "naïve 🦅", ""):
        answer = server.http.post("/tokenize", json={"prompt": text, "return_token_strs": True}).json()
        assert answer["count"] == len(answer["tokens"]) == len(answer["token_strs"])
        assert answer["max_model_len"] == 512
        assert server.http.post("/detokenize", json={"tokens": answer["tokens"]}).json() == {"prompt": text}
    messages = [{"role": "user", "content": "hi"}]
    count = server.http.post("/tokenize", json={"messages": messages}).json()["count"]
    fields = {"messages": messages, "max_tokens": 1}
    assert server.http.post("/v1/chat/completions", json=fields).json()["usage"]["prompt_tokens"] == count
