"""What drafts: chosen by a request, and changed while the server runs."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

import eagle_mlx as em
from eagle_mlx.plan import RoundResult
from eagle_mlx.serve.api.model import Loaded
from eagle_mlx.serve.speculation import Speculation
from tests.full import in_full
from tests.serve.api.given import given_head, given_target
from tests.serve.api.live import NAME, Live, live, wide

ROOT = Path(__file__).parents[3]
COMPLETIONS, ADMIN, METRICS = "/v1/completions", "/admin/speculation", "/v1/spec_decode/metrics"
BODY = {"prompt": "def f(x):", "max_tokens": 40, "ignore_eos": True}


def both(**settings: Any) -> Loaded:
    """Return a model with a head and n-grams."""
    target = given_target()
    made = em.Engine(target, em.HybridProposer(given_head(target)), policy=em.FixedPolicy(3), max_batch=4)
    speculation = Speculation(policy="fixed", num_tokens=3, keep=False, **settings)
    return Loaded(made, "eagle", 3, {"temperature": 0.0}, speculation=speculation)


@pytest.fixture(scope="module")
def hybrid() -> Iterator[Live]:
    with live(both, wide(api_key="secret", strict_fields=True)) as running:
        yield running


def rounds(server: Live) -> list[RoundResult]:
    """Return a list that gets the results of all later rounds."""
    results: list[RoundResult] = []
    loaded = server.service.loaded
    assert loaded is not None
    loaded.engine.observer = results.append
    return results


def drafted(results: list[RoundResult]) -> set[str]:
    return {"ngram" if round_.plan.lookups else "eagle" for round_ in results if any(round_.drafted)}


def change(server: Live, **fields: Any) -> httpx.Response:
    return server.http.post(ADMIN, json={"model": NAME, **fields})


def complete(server: Live, **more: Any) -> dict[str, Any]:
    answer = server.http.post(COMPLETIONS, json=BODY | more)
    assert answer.status_code == 200, answer.text
    body: dict[str, Any] = answer.json()
    return body


def test_a_request_chooses_among_all_that_is_loaded(hybrid: Live) -> None:
    texts = set()
    for mode in ("eagle", "ngram", "none", None):
        results = rounds(hybrid)
        texts.add(complete(hybrid, spec_decode=mode)["choices"][0]["text"])
        assert drafted(results) == {"none": set(), None: {"eagle", "ngram"}}.get(mode, {mode})
    assert len(texts) == 1
    answer = hybrid.http.post(COMPLETIONS, json=BODY | {"spec_decode": "mtp"})
    assert answer.status_code == 400
    assert "'eagle', 'ngram' and 'none' are" in answer.json()["error"]["message"]
    assert hybrid.http.get(METRICS).json()["spec_decode_modes"] == ["eagle", "ngram", "none"]


def test_fields_in_extra_body_are_those_of_the_body(hybrid: Live) -> None:
    plain = {"spec_decode": "none"}
    assert complete(hybrid, extra_body=plain)["timings"]["draft_n"] == 0
    assert complete(hybrid, **plain, extra_body=plain)["timings"]["draft_n"] == 0
    for extra, param in (
        ({"max_tokens": 4}, "extra_body.max_tokens"),
        ({"magic": 1}, "magic"),
        ({"extra_body": {}}, "extra_body"),
        ({"spec_decode": 3}, "spec_decode"),
        ([], "extra_body"),
    ):
        refused = hybrid.http.post(COMPLETIONS, json=BODY | {"extra_body": extra})
        assert (refused.status_code, refused.json()["error"]["param"]) == (400, param)


def test_speculation_of_a_running_server_changes_from_the_next_round_on(hybrid: Live) -> None:
    def summary() -> dict[str, Any]:
        metrics: dict[str, Any] = hybrid.http.get(METRICS).json()
        return {name: metrics[name] for name in ("spec_decode_drafters", "current_k", "spec_policy")}

    length = in_full(120, 50)
    text = complete(hybrid, max_tokens=length)["choices"][0]["text"]
    for fields, drafters, depth, policy in (
        ({"spec_decode": "eagle"}, ["eagle"], 3, "fixed"),
        ({"num_speculative_tokens": 1}, ["eagle"], 1, "fixed"),
        ({"spec_decode": "ngram", "num_speculative_tokens": 2}, ["ngram"], 2, "fixed"),
        ({"spec_policy": "acceptance-ema"}, ["ngram"], 2, "acceptance-ema"),
        ({"spec_decode": "none"}, [], 0, "acceptance-ema"),
        ({"spec_decode": "auto"}, ["eagle"], 2, "acceptance-ema"),
        ({"spec_policy": "throughput"}, ["eagle", "ngram"], 2, "throughput"),
    ):
        body = BODY | {"max_tokens": length, "stream": True}
        with hybrid.slowed(0.001), hybrid.http.stream("POST", COMPLETIONS, json=body) as stream:
            pieces = stream.iter_text()
            begun = next(pieces)
            changed = change(hybrid, **fields)
            results = rounds(hybrid)
            rest = begun + "".join(pieces)
        assert changed.status_code == 200, changed.text
        assert summary() == {"spec_decode_drafters": drafters, "current_k": depth, "spec_policy": policy}
        assert changed.json()["spec_decode_mode"] == next(iter(drafters), "none")
        assert drafted(results) <= set(drafters)
        longest = max(max(result.drafted) for result in results)
        assert longest <= (2 * depth if policy == "throughput" else depth)  # it lets n-grams draft twice as many
        assert "".join(texts_of(rest)) == text
    results = rounds(hybrid)
    assert change(hybrid, spec_decode="none", spec_policy="fixed").json()["spec_decode_enabled"] is False
    complete(hybrid, spec_decode="eagle")  # a request may choose it nonetheless
    assert drafted(results) == {"eagle"}
    assert change(hybrid, spec_decode="auto", num_speculative_tokens=3).status_code == 200


def texts_of(stream: str) -> Iterator[str]:
    lines = [line.removeprefix("data: ") for line in stream.splitlines() if line.startswith("data: {")]
    for line in lines:
        for choice in httpx.Response(200, text=line).json()["choices"]:
            yield choice["text"]


def test_speculation_metrics_are_the_values_that_the_policy_uses(hybrid: Live) -> None:
    policy = em.AcceptancePolicy(3, alpha=0.5, threshold=0.0)
    loaded = hybrid.service.loaded
    assert loaded is not None
    loaded.engine.use_policy(policy)
    assert hybrid.http.get(METRICS).json()["acceptance_rate_ema"] == 0.7
    complete(hybrid, max_tokens=80)
    summary = hybrid.http.get(METRICS).json()
    assert summary["acceptance_rate_ema"] == round(policy.acceptance, 4) != 0.7
    assert summary["adaptive_k_current"] in (1, 3)
    assert change(hybrid, spec_decode="none").json()["adaptive_k_current"] == 0
    assert change(hybrid, spec_decode="auto", spec_policy="throughput").json()["acceptance_rate_ema"] == 0.5
    assert change(hybrid, spec_policy="fixed", num_speculative_tokens=3).json()["acceptance_rate_ema"] is None


def test_threshold_acceptance_is_a_choice_and_marked_as_lossy(hybrid: Live, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO", "eagle_mlx.serve")
    sampled = {"temperature": 1.0, "seed": 1, "spec_decode": "eagle"}
    lossy = {"acceptance": "threshold", "acceptance_threshold": 1e-6}
    for more, lossless in ((sampled, True), (sampled | lossy, False), (lossy | {"temperature": 0}, True)):
        caplog.clear()
        counts = complete(hybrid, **more)["metrics"]["speculative_decoding"]
        assert counts["lossless"] == lossless
        assert (counts["draft_acceptance_rate"] == 1) == (not lossless)
        [line] = [message for message in caplog.messages if message.startswith("request ")]
        assert ("(lossy)" in line) == (not lossless)
    for wrong in ({"acceptance": "magic"}, {"acceptance_threshold": 0.3}, lossy | {"acceptance_threshold": 0}):
        refused = hybrid.http.post(COMPLETIONS, json=BODY | wrong)
        assert (refused.status_code, refused.json()["error"]["param"]) == (400, list(wrong)[-1])


def test_a_server_may_accept_by_threshold_by_default() -> None:
    with live(lambda: both(acceptance="threshold", least_probability=0.001)) as server:
        fields = {"temperature": 1.0, "spec_decode": "eagle"}
        for more, lossless in (({}, False), ({"acceptance": "auto"}, True), ({"acceptance_threshold": 0.9}, False)):
            assert complete(server, **fields, **more)["metrics"]["speculative_decoding"]["lossless"] == lossless


def test_all_fields_of_the_speculation_metrics_are_described(hybrid: Live) -> None:
    fields = hybrid.http.get("/openapi.json").json()["components"]["schemas"]["SpeculationSummary"]["properties"]
    guide = (ROOT / "docs/serving.md").read_text(encoding="utf-8")
    assert fields.keys() == hybrid.http.get(METRICS).json().keys()
    assert [name for name, field in fields.items() if not field.get("description") or f"`{name}`" not in guide] == []


@pytest.mark.parametrize(
    ("fields", "status", "param"),
    [
        ({"spec_decode": "mtp"}, 400, "spec_decode"),
        ({"spec_decode": "magic"}, 400, "spec_decode"),
        ({"num_speculative_tokens": 0}, 400, "num_speculative_tokens"),
        ({"spec_policy": "magic"}, 400, "spec_policy"),
        ({"depth": 2}, 400, "depth"),
        ({"model": "other"}, 404, "model"),
    ],
)
def test_changes_to_what_is_not_loaded_are_refused(
    hybrid: Live, fields: dict[str, Any], status: int, param: str
) -> None:
    before = hybrid.http.get(METRICS).json()
    refused = change(hybrid, **fields)
    assert (refused.status_code, refused.json()["error"]["param"]) == (status, param)
    assert hybrid.http.get(METRICS).json() == before
    assert hybrid.http.post(ADMIN, json={"model": NAME}, headers={"Authorization": ""}).status_code == 401


def test_a_server_without_a_proposer_or_chains_refuses_what_needs_them() -> None:
    def plain() -> Loaded:
        return Loaded(em.Engine(given_target()), "none", 0)

    with live(plain) as server:
        for fields in ({"num_speculative_tokens": 2}, {"spec_policy": "fixed"}, {"spec_decode": "ngram"}):
            assert change(server, **fields).json()["error"]["param"] == next(iter(fields))
        assert change(server, spec_decode="none").json()["spec_decode_enabled"] is False
        assert server.http.post("/admin/unload", json={"model": NAME}).status_code == 200
        assert change(server, spec_decode="none").status_code == 409
    with live(lambda: both(tree_nodes=8)) as server:
        error = change(server, spec_policy="acceptance-ema").json()["error"]
        assert (error["param"], "--draft-tree-nodes" in error["message"]) == ("spec_policy", True)


def test_settings_of_a_policy_are_back_when_it_is() -> None:
    started = Speculation(policy="acceptance-ema", threshold=0.5, num_tokens=2)
    other = started.with_policy("throughput", None)
    assert (other.policy, other.threshold, other.depth) == ("throughput", 0.3, 8)
    assert started.with_policy("acceptance-ema", 2) == started
