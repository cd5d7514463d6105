"""The published schema is true: no request, valid or not, breaks the server, and answers are as it or clients say.

For the long run with over 5,000 cases: `SCHEMA_CASES=330 pytest -s tests/serve/api/test_openapi.py`. It prints the
status codes for each route.
"""

from __future__ import annotations

import json
import os
from collections import Counter
from collections.abc import Iterator
from typing import Any

import httpx
import openai
import pytest
import schemathesis
from anthropic.types import Message, MessageTokensCount, ModelInfo
from hypothesis import HealthCheck, Phase, given, settings
from openai.types import Completion
from openai.types.chat import ChatCompletion
from pydantic import BaseModel
from schemathesis.checks import (
    content_type_conformance,
    negative_data_rejection,
    not_a_server_error,
    response_schema_conformance,
    status_code_conformance,
)

from eagle_mlx.serve.api.model import Loaded
from tests.full import in_full
from tests.serve.api.given import PATIENCE
from tests.serve.api.live import DEPTH, ELSEWHERE, NAME, Live, another_client, engine, live, wide

LONG = "SCHEMA_CASES" in os.environ
CASES = int(os.environ.get("SCHEMA_CASES", in_full("30", "4")))
"""Cases for each route and kind, and for conversations."""
ENOUGH = 5000
STEPS = 6
"""Steps of a conversation: a response, its continuations, and uses after it is deleted."""
CHECKS = [not_a_server_error, status_code_conformance, content_type_conformance, response_schema_conformance]
BODIES = (
    "/v1/chat/completions",
    "/v1/completions",
    "/v1/responses",
    "/v1/responses/input_tokens",
    "/v1/messages",
    "/v1/messages/count_tokens",
    "/tokenize",
    "/detokenize",
    "/admin/load",
    "/admin/unload",
    "/admin/speculation",
)
READS = (
    "/health",
    "/version",
    "/v1/models",
    "/v1/models/{model}",
    "/v1/responses/{id}",
    "/metrics",
    "/v1/spec_decode/metrics",
)
Mode = schemathesis.GenerationMode
sent: Counter[tuple[str, str, int]] = Counter()
"""Cases by route, kind and status."""


@pytest.fixture(scope="module")
def short() -> Iterator[Live]:
    """A server whose answers are short for any request."""
    with live(lambda: Loaded(engine(context=40), "ngram", DEPTH), wide()) as running:
        yield running


def published(server: Live) -> dict[str, Any]:
    """Return the schema with the model's name, so that requests reach the model."""
    schema: dict[str, Any] = server.http.get("/openapi.json").json()
    for path in BODIES:
        body = schema["paths"][path]["post"]["requestBody"]["content"]["application/json"]["schema"]["$ref"]
        properties = schema["components"]["schemas"][body.rpartition("/")[2]]["properties"]
        properties["model"] = {"enum": [NAME] if path.startswith("/admin") else [NAME, None]}
    return schema


def checked_schema(server: Live, schema: dict[str, Any]) -> Any:
    loaded = schemathesis.openapi.from_dict(schema)
    loaded.config.update(base_url=server.base)
    return loaded


def tell(route: str, kind: str) -> None:
    """Print the status codes of the cases, for the long run."""
    statuses = {status: count for (*key, status), count in sorted(sent.items()) if key == [route, kind]}
    print(f"\n{route}, {kind}: {sum(statuses.values())} {statuses}; {sent.total()} so far")


@pytest.fixture(scope="module")
def checked(short: Live) -> Any:
    return checked_schema(short, published(short))


@pytest.mark.parametrize("mode", [Mode.POSITIVE, Mode.NEGATIVE])
@pytest.mark.parametrize("path", BODIES)
def test_all_that_can_be_sent(short: Live, checked: Any, path: str, mode: Mode) -> None:
    operation = checked[path]["POST"]
    checks = [*CHECKS, negative_data_rejection] if mode is Mode.NEGATIVE else CHECKS

    @settings(
        max_examples=CASES,
        phases=[Phase.generate],
        suppress_health_check=list(HealthCheck),
        deadline=None,
        database=None,
    )
    @given(operation.as_strategy(generation_mode=mode))
    def send(case: Any) -> None:
        answer = case.call_and_validate(checks=checks, timeout=PATIENCE)
        sent[path, mode.value, answer.status_code] += 1
        assert answer.status_code == 200 or answer.json()["error"].keys() >= {"type", "message"}

    send()
    tell(path, mode.value)
    assert short.http.get("/health").status_code == 200
    answered = short.service.totals.requests["finished"]
    assert short.http.post("/v1/completions", json={"prompt": "a", "max_tokens": 2}).status_code == 200
    assert short.service.totals.requests["finished"] == answered + 1


def test_all_that_can_be_done_with_responses(short: Live) -> None:
    """Read, continued and deleted in any order, and repeatedly."""
    schema = published(short)
    paths, by_id = schema["paths"], {"parameters": {"id": "$response.body#/id"}}
    go_on = {"input": "Go on.", "previous_response_id": "$response.body#/id"}
    paths["/v1/responses"]["post"]["responses"]["200"]["links"] = {
        "read": {"operationId": paths["/v1/responses/{id}"]["get"]["operationId"], **by_id},
        "forget": {"operationId": paths["/v1/responses/{id}"]["delete"]["operationId"], **by_id},
        "go on": {"operationId": paths["/v1/responses"]["post"]["operationId"], "requestBody": go_on},
    }
    routes = checked_schema(short, schema).include(path_regex="^/v1/responses")

    class Conversation(routes.as_state_machine()):  # type: ignore[misc]
        def get_call_kwargs(self, case: Any) -> dict[str, Any]:
            return {"timeout": PATIENCE}

        def validate_response(self, response: Any, case: Any, **_: Any) -> None:
            case.validate_response(response, checks=CHECKS)
            sent[f"{case.method} {case.path}", "conversations", response.status_code] += 1

    Conversation.run(
        settings=settings(
            max_examples=max(3, CASES // 3),
            stateful_step_count=STEPS,
            phases=[Phase.generate],
            suppress_health_check=list(HealthCheck),
            deadline=None,
            database=None,
        )
    )
    for route in sorted({route for route, kind, _ in sent if kind == "conversations"}):
        tell(route, "conversations")
    made = {(route, status) for route, kind, status in sent if kind == "conversations"}
    assert not LONG or made >= {(f"{method} /v1/responses/{{id}}", 200) for method in ("GET", "DELETE")}


@pytest.mark.skipif(not LONG, reason="SCHEMA_CASES says how many")
def test_so_many_were_sent_and_none_was_an_error_of_the_server() -> None:
    assert not [key for key in sent if key[-1] >= 500]
    assert sent.total() >= ENOUGH


@pytest.mark.parametrize("path", READS)
def test_all_that_can_be_read(checked: Any, path: str) -> None:
    operation = checked[path]["GET"]
    parameter = "id" if "{id}" in path else "model"
    operation.Case(path_parameters={parameter: NAME}).call_and_validate(checks=CHECKS)
    operation.Case(path_parameters={parameter: "a/b%20"}).call_and_validate(checks=CHECKS)


def test_every_route_is_published(short: Live) -> None:
    paths = short.http.get("/openapi.json").json()["paths"]
    assert set(paths) == {*BODIES, *READS}
    for path in BODIES:
        assert "requestBody" in paths[path]["post"]
        assert {"400", "413", "500", "503"} <= set(paths[path]["post"]["responses"])


def answers_are_as_the_clients_declare_them(http: httpx.Client) -> None:
    """Validate answers with the types of OpenAI's and Anthropic's own clients."""
    messages, limits = {"messages": [{"role": "user", "content": "x"}]}, {"max_tokens": 4, "n": 2}
    answers: list[tuple[str, dict[str, Any], type[BaseModel]]] = [
        ("/v1/completions", {**limits, "prompt": ["x", "y"], "logprobs": 2}, Completion),
        ("/v1/completions", {**limits, "prompt": "x", "echo": True}, Completion),
        ("/v1/chat/completions", {**limits, **messages, "logprobs": True, "top_logprobs": 1}, ChatCompletion),
        ("/v1/messages", {**messages, "max_tokens": 4}, Message),
        ("/v1/messages/count_tokens", messages, MessageTokensCount),
        ("/v1/responses/input_tokens", {"input": "x"}, openai.types.responses.InputTokenCountResponse),
        ("/v1/responses", {"input": "x", "max_output_tokens": 4}, openai.types.responses.Response),
    ]
    for path, body, declared in answers:
        answer = http.post(path, json=body)
        assert answer.status_code == 200
        declared.model_validate(json.loads(answer.text))
    for header, listed in (({}, openai.types.Model), ({"anthropic-version": "2023-06-01"}, ModelInfo)):
        for model in http.get("/v1/models", headers=header).json()["data"]:
            listed.model_validate(model)


def test_answers_of_all_kinds_are_as_the_clients_declare_them(short: Live) -> None:
    answers_are_as_the_clients_declare_them(short.http)


@ELSEWHERE
def test_answers_are_as_declared_while_another_client_holds_every_row() -> None:
    endless = {"messages": [{"role": "user", "content": "x"}], "n": 8, "ignore_eos": True, "stream": True}
    with (
        live(lambda: Loaded(engine(context=2048), "ngram", DEPTH), wide()) as server,
        another_client(server) as other,
        other.stream("POST", "/v1/chat/completions", json=endless),
    ):
        server.until(lambda: server.service.running == 4)
        answers_are_as_the_clients_declare_them(server.http)
        assert server.service.loaded is not None
        assert server.service.loaded.engine.pauses >= 1
        assert server.service.running + server.service.waiting == 8  # none of them has ended
