"""OpenAI API answers: whole and streamed, one and several, with the same text as from the engine."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator, Sequence
from itertools import chain
from typing import Any

import openai
import pytest
from openai.types import Completion
from openai.types.chat import ChatCompletion, ChatCompletionChunk

import eagle_mlx as em
from eagle_mlx.request import Output
from eagle_mlx.serve.api.model import Loaded
from eagle_mlx.text import IncrementalText
from tests.full import diagonal
from tests.serve.api.given import TARGET
from tests.serve.api.live import DEPTH, NAME, Live, engine, live, wide

PROMPT = "def f(x):\n    return x"
ENDLESS = {"ignore_eos": True}
"""For answers with a fixed number of tokens: a trained model would end earlier."""
MESSAGES: Any = [{"role": "user", "content": "def f(x):"}]


@pytest.fixture(scope="module")
def reference() -> em.Engine:
    """The same model, decoded plainly without a server."""
    return engine("none")


@pytest.fixture(scope="module")
def headed() -> Iterator[Live]:
    with live(lambda: Loaded(engine("eagle"), "eagle", DEPTH)) as running:
        yield running


def expected(reference: em.Engine, prompt: Any = PROMPT, **params: Any) -> Output:
    return reference.generate([prompt], em.SamplingParams(**params))[0]


def test_a_completion_is_the_engines(server: Live, reference: em.Engine) -> None:
    answer = server.openai.completions.create(
        model=NAME, prompt=PROMPT, max_tokens=40, temperature=0, extra_body=ENDLESS
    )
    plain = expected(reference, max_tokens=40, **ENDLESS)
    assert answer.choices[0].text == plain.text
    assert answer.choices[0].finish_reason == "length"
    assert answer.usage is not None
    assert (answer.usage.prompt_tokens, answer.usage.completion_tokens) == (plain.prompt_tokens, 40)
    assert answer.usage.total_tokens == plain.prompt_tokens + 40
    timings = answer.timings  # type: ignore[attr-defined]
    speculation = answer.metrics["speculative_decoding"]  # type: ignore[attr-defined]
    assert timings["draft_n"] == speculation["num_draft_tokens"] > 0
    assert timings["draft_n_accepted"] == speculation["num_accepted_draft_tokens"] <= timings["draft_n"]
    assert TARGET is not None or timings["draft_n_accepted"] > 0  # only a random model is sure to repeat itself
    histogram = {int(length): count for length, count in speculation["acceptance_histogram"].items()}
    assert sum(histogram.values()) == speculation["num_spec_steps"]
    assert sum(length * count for length, count in histogram.items()) == speculation["num_accepted_draft_tokens"]
    assert speculation["mean_acceptance_length"] == pytest.approx(
        1 + speculation["num_accepted_draft_tokens"] / speculation["num_spec_steps"], abs=1e-4
    )


@pytest.mark.parametrize(
    ("more", "sampling"),
    diagonal(
        [{}, {"spec_decode": "none"}, {"num_speculative_tokens": 1}, {"top_k": 40}],
        [
            {"temperature": 1.3, "seed": 8, "top_p": 0.9, "frequency_penalty": 0.5, "presence_penalty": 0.2},
            {"temperature": 0.0},
            {"temperature": 0.9, "seed": 7},
        ],
    ),
)
def test_text_is_the_same_with_and_without_speculation(
    headed: Live, server: Live, reference: em.Engine, sampling: dict[str, Any], more: dict[str, Any]
) -> None:
    plain = expected(reference, max_tokens=24, **sampling, **({"top_k": 40} if "top_k" in more else {}))
    for running in (headed, server):
        answer = running.openai.completions.create(
            model=NAME, prompt=PROMPT, max_tokens=24, extra_body=more, **sampling
        )
        assert answer.choices[0].text == plain.text
        if more.get("spec_decode") == "none":
            assert answer.timings["draft_n"] == 0  # type: ignore[attr-defined]


def test_chat_is_the_engines(server: Live, reference: em.Engine) -> None:
    answer = server.openai.chat.completions.create(model=NAME, messages=MESSAGES, max_tokens=20, temperature=0)
    plain = expected(reference, MESSAGES, max_tokens=20)
    assert answer.choices[0].message.content == plain.text
    assert answer.choices[0].message.role == "assistant"
    assert answer.usage is not None
    assert answer.usage.prompt_tokens == plain.prompt_tokens


@pytest.mark.parametrize("sampling", [{"temperature": 0}, {"temperature": 1.0, "seed": 3}])
def test_streamed_pieces_make_up_the_answer(server: Live, sampling: dict[str, Any]) -> None:
    fields: dict[str, Any] = {"model": NAME, "messages": MESSAGES, "max_completion_tokens": 30, "n": 2, **sampling}
    whole = server.openai.chat.completions.create(**fields)
    chunks = list(server.openai.chat.completions.create(**fields, stream=True, stream_options={"include_usage": True}))
    assert len({chunk.id for chunk in chunks}) == 1
    assert [chunk.choices[0].delta.role for chunk in chunks[:2]] == ["assistant", "assistant"]
    for choice in whole.choices:
        pieces = [c.choices[0] for c in chunks if c.choices and c.choices[0].index == choice.index]
        assert "".join(piece.delta.content or "" for piece in pieces) == choice.message.content
        assert [piece.finish_reason for piece in pieces if piece.finish_reason] == [choice.finish_reason]
        assert pieces[-1].finish_reason
    assert chunks[-1].choices == []
    assert all(chunk.usage is None for chunk in chunks[:-1])
    assert whole.usage is not None
    assert chunks[-1].usage is not None
    assert chunks[-1].usage.model_dump() == whole.usage.model_dump()
    assert chunks[-1].timings["draft_n_accepted"] == whole.timings["draft_n_accepted"]  # type: ignore[attr-defined]


@pytest.mark.parametrize(
    ("path", "case"),
    diagonal(["chat/completions", "completions"], [(False, False, 1), (True, False, 2), (True, True, 1)]),
)
def test_a_stream_has_a_chunk_for_each_token_on_request(server: Live, path: str, case: tuple[bool, bool, int]) -> None:
    marks, logprobs, n = case
    prompt = {"messages": MESSAGES, "logprobs": logprobs} if path.startswith("chat") else {"prompt": PROMPT}
    body = {**prompt, "max_tokens": 40, "temperature": 0, "n": n, "ignore_eos": True}
    whole = server.http.post(f"/v1/{path}", json=body).json()
    options = {"per_token": True, "include_usage": True, **({"include_draft_n_accepted": True} if marks else {})}
    text = server.http.post(f"/v1/{path}", json={**body, "stream": True, "stream_options": options}).text
    chunks = [json.loads(event.removeprefix("data: ")) for event in text.split("\n\n")[:-2]]
    last = chunks.pop()
    for choice in whole["choices"]:
        pieces = [chunk["choices"][0] for chunk in chunks if chunk["choices"][0]["index"] == choice["index"]]
        tokens = [piece for piece in pieces if piece["finish_reason"] is None and "role" not in piece.get("delta", {})]
        assert len(tokens) == 40
        read = "".join(piece["text"] if "text" in piece else piece["delta"]["content"] for piece in tokens)
        assert read == (choice["text"] if "text" in choice else choice["message"]["content"])
        assert not logprobs or path == "completions" or all(len(piece["logprobs"]["content"]) == 1 for piece in tokens)
    if marks:
        assert {chunk["draft_n_accepted"] for chunk in chunks} == {0, 1}
        assert sum(chunk["draft_n_accepted"] for chunk in chunks) == last["timings"]["draft_n_accepted"] > 0


def test_a_server_may_stream_an_event_for_each_token_in_all_apis() -> None:
    def events(path: str, kind: str, **more: Any) -> int:
        return server.http.post(f"/v1/{path}", json={"temperature": 0, "stream": True, **more}).text.count(kind)

    with live(settings=wide(stream_per_token=True)) as server:
        messages = events("messages", '"text_delta"', messages=MESSAGES, max_tokens=30)
        fields = {"input": MESSAGES, "max_output_tokens": 30}
        response = events("responses", "event: response.output_text.delta", **fields)
        rounds = {"stream_options": {"per_token": False}}
        fewer = events("responses", "event: response.output_text.delta", **fields, **rounds)
        assert messages == response > fewer
        text = {"prompt": PROMPT, "max_tokens": 30, "ignore_eos": True}
        assert events("completions", '"text":', **text) == 31 > events("completions", '"text":', **text, **rounds)


@pytest.mark.parametrize(
    ("path", "more"),
    [("chat/completions", {"n": 2}), ("chat/completions", {"logprobs": True}), ("completions", {"logprobs": 1})],
)
def test_chunks_count_accepted_draft_tokens_on_request(server: Live, path: str, more: dict[str, Any]) -> None:
    body = {"messages": MESSAGES} if path.startswith("chat") else {"prompt": PROMPT}
    body |= {"max_tokens": 40, "temperature": 0, **more}
    whole = server.http.post(f"/v1/{path}", json=body).json()
    options = {"include_draft_n_accepted": True, "include_usage": True}
    text = server.http.post(f"/v1/{path}", json={**body, "stream": True, "stream_options": options}).text
    *chunks, last = [json.loads(event.removeprefix("data: ")) for event in text.split("\n\n")[:-2]]
    assert sum(chunk["draft_n_accepted"] for chunk in chunks) == last["timings"]["draft_n_accepted"]
    assert last["timings"]["draft_n_accepted"] == whole["timings"]["draft_n_accepted"] > 0
    for choice in whole["choices"]:
        pieces = [chunk["choices"][0] for chunk in chunks if chunk["choices"][0]["index"] == choice["index"]]
        read = "".join(piece["text"] if "text" in piece else piece["delta"].get("content", "") for piece in pieces)
        assert read == (choice["text"] if "text" in choice else choice["message"]["content"])
    plain = server.http.post(f"/v1/{path}", json={**body, "stream": True}).text
    assert not any("draft_n_accepted" in json.loads(event[6:]) for event in plain.split("\n\n")[:-2])


def test_the_wire_form_of_a_stream(server: Live) -> None:
    body = {"prompt": "x", "max_tokens": 3, "stream": True, "temperature": 0}
    with server.http.stream("POST", "/v1/completions", json=body) as answer:
        assert answer.headers["content-type"].startswith("text/event-stream")
        events = answer.read().decode().split("\n\n")
    assert events[-2:] == ["data: [DONE]", ""]
    assert all(event.startswith("data: {") for event in events[:-2])
    last = json.loads(events[-3].removeprefix("data: "))
    assert last["choices"][0]["finish_reason"] == "length"
    assert last["timings"]["predicted_n"] == 3
    assert "usage" not in last


def test_answers_match_openais_types(server: Live) -> None:
    chat = {"messages": MESSAGES, "max_tokens": 5, "n": 2, "logprobs": True, "top_logprobs": 2}
    text = {"prompt": PROMPT, "max_tokens": 5, "logprobs": 2}
    whole = {"/v1/chat/completions": (chat, ChatCompletion), "/v1/completions": (text, Completion)}
    for path, (body, kind) in whole.items():
        kind.model_validate(server.http.post(path, json=body).json(), strict=True)
    pieces = {"/v1/chat/completions": (chat, ChatCompletionChunk), "/v1/completions": (text, None)}
    for path, (body, piece) in pieces.items():
        body = {**body, "stream": True, "stream_options": {"include_usage": True}}
        events = server.http.post(path, json=body).text.split("\n\n")[:-2]
        for event in map(json.loads, (event.removeprefix("data: ") for event in events)):
            if piece is not None:
                piece.model_validate(event, strict=True)
            assert {"id", "object", "created", "model", "choices", "usage"} <= set(event)


def test_seeds_count_up_over_the_answers(server: Live, reference: em.Engine) -> None:
    answer = server.openai.completions.create(
        model=NAME, prompt=["def", "class"], max_tokens=12, temperature=1.0, seed=11, n=3
    )
    wanted = [
        expected(reference, prompt, max_tokens=12, temperature=1.0, seed=11 + i).text
        for prompt in ("def", "class")
        for i in range(3)
    ]
    assert [choice.text for choice in answer.choices] == wanted
    assert [choice.index for choice in answer.choices] == list(range(6))


def test_prompts_as_tokens(server: Live, reference: em.Engine) -> None:
    assert reference.target.tokenizer is not None
    tokens = reference.target.tokenizer.encode(PROMPT)
    text = expected(reference, max_tokens=8).text
    for prompt in (tokens, [tokens, tokens]):
        answer = server.openai.completions.create(model=NAME, prompt=prompt, max_tokens=8, temperature=0)
        assert {choice.text for choice in answer.choices} == {text}
        assert len(answer.choices) == (1 if prompt is tokens else 2)


@pytest.mark.parametrize("stream", [False, True])
def test_stop_strings_end_the_text(server: Live, reference: em.Engine, stream: bool) -> None:
    whole = expected(reference, max_tokens=40, **ENDLESS).text
    stop = whole[len(whole) // 2 :][:5]
    fields: dict[str, Any] = {
        "model": NAME,
        "prompt": PROMPT,
        "max_tokens": 40,
        "temperature": 0,
        "stop": [stop, "nay"],
    }
    fields["extra_body"] = ENDLESS
    if stream:
        chunks = list(server.openai.completions.create(**fields, stream=True))
        text, reason = "".join(c.choices[0].text for c in chunks), chunks[-1].choices[0].finish_reason
    else:
        choice = server.openai.completions.create(**fields).choices[0]
        text, reason = choice.text, choice.finish_reason
    assert text == whole[: whole.find(stop)]
    assert reason == "stop"


def test_chat_logprobs_are_the_targets(server: Live, reference: em.Engine) -> None:
    plain = expected(reference, MESSAGES, max_tokens=10, logprobs=True, top_logprobs=2, **ENDLESS)
    fields: dict[str, Any] = {
        "model": NAME,
        "messages": MESSAGES,
        "max_tokens": 10,
        "temperature": 0,
        "logprobs": True,
        "top_logprobs": 2,
        "extra_body": ENDLESS,
    }
    whole = server.openai.chat.completions.create(**fields).choices[0].logprobs
    assert whole is not None
    assert whole.content is not None
    assert plain.logprobs is not None
    assert [token.logprob for token in whole.content] == pytest.approx([p.logprob for p in plain.logprobs], abs=1e-3)
    for token in whole.content:
        assert bytes(token.bytes or []).decode() == token.token
        assert len(token.top_logprobs) == 2
        assert token.top_logprobs[0].token == token.token  # greedy
    assert "".join(token.token for token in whole.content) == plain.text
    pieces = [
        entry
        for chunk in server.openai.chat.completions.create(**fields, stream=True)
        if chunk.choices[0].logprobs is not None
        for entry in chunk.choices[0].logprobs.content or []
    ]
    assert [piece.token for piece in pieces] == [token.token for token in whole.content]
    assert [piece.logprob for piece in pieces] == pytest.approx([token.logprob for token in whole.content], abs=1e-3)


@pytest.mark.parametrize("stream", [False, True])
def test_completions_logprobs_with_the_prompt(server: Live, reference: em.Engine, stream: bool) -> None:
    fields: dict[str, Any] = {
        "model": NAME,
        "prompt": PROMPT,
        "max_tokens": 6,
        "temperature": 0,
        "logprobs": 1,
        "echo": True,
        "extra_body": ENDLESS,
    }
    if stream:
        choices = [c.choices[0] for c in server.openai.completions.create(**fields, stream=True)]
        text = "".join(choice.text for choice in choices)
        listed = [choice.logprobs for choice in choices if choice.logprobs is not None]
        tokens = [token for chunk in listed for token in chunk.tokens or []]
        logprobs = [value for chunk in listed for value in chunk.token_logprobs or []]
        offsets = [offset for chunk in listed for offset in chunk.text_offset or []]
    else:
        choice = server.openai.completions.create(**fields).choices[0]
        assert choice.logprobs is not None
        text, tokens = choice.text, choice.logprobs.tokens or []
        logprobs, offsets = choice.logprobs.token_logprobs or [], choice.logprobs.text_offset or []
    plain = expected(reference, max_tokens=6, logprobs=True, **ENDLESS)
    assert text == PROMPT + plain.text == "".join(tokens)
    assert [text[a:b] for a, b in zip(offsets, [*offsets[1:], len(text)], strict=True)] == tokens
    assert logprobs[0] is None
    assert plain.logprobs is not None
    assert logprobs[-6:] == pytest.approx([token.logprob for token in plain.logprobs], abs=1e-3)
    # The prompt's log probabilities equal those that the engine gives when forced to generate these tokens.
    assert reference.target.tokenizer is not None
    ids = reference.target.tokenizer.encode(PROMPT)
    for place in range(1, len(ids)):
        output = expected(reference, ids[:place], max_tokens=1, logprobs=True, logit_bias={ids[place]: 1e4})
        assert output.tokens == [ids[place]]
        assert output.logprobs is not None
        assert logprobs[place] == pytest.approx(output.logprobs[0].logprob, abs=1e-3)


@pytest.mark.parametrize("stop", [[], ["no such text"]])
@pytest.mark.parametrize("path", ["chat/completions", "completions"])
def test_a_streamed_answer_is_decoded_once(
    server: Live, path: str, stop: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """By the engine for stop strings, or for its stream and the offsets of its log probabilities."""
    prompt = {"messages": MESSAGES, "logprobs": True} if path.startswith("chat") else {"prompt": PROMPT, "logprobs": 1}
    body = {**prompt, "max_tokens": 12, "temperature": 0, "stop": stop, **ENDLESS}
    whole = server.http.post(f"/v1/{path}", json=body).json()["choices"][0]
    decoded, add = list[int](), IncrementalText.add

    def counted(text: IncrementalText, tokens: Sequence[int]) -> tuple[str, str]:
        decoded.extend(tokens)
        return add(text, tokens)

    monkeypatch.setattr(IncrementalText, "add", counted)
    events = server.http.post(f"/v1/{path}", json={**body, "stream": True}).text.split("\n\n")[:-2]
    choices = [json.loads(event.removeprefix("data: "))["choices"][0] for event in events]
    assert len(decoded) <= 12
    if path == "completions":
        assert "".join(choice["text"] for choice in choices) == whole["text"]
        lists = [choice["logprobs"]["text_offset"] for choice in choices if choice["logprobs"]]
        assert list(chain(*lists)) == whole["logprobs"]["text_offset"]
    else:
        assert "".join(choice["delta"].get("content", "") for choice in choices) == whole["message"]["content"]


def test_an_echo_alone_decodes_nothing(server: Live) -> None:
    for stream in (False, True):
        body = {"prompt": PROMPT, "max_tokens": 0, "echo": True, "logprobs": 0, "stream": stream}
        answer = server.http.post("/v1/completions", json=body)
        text = answer.text if not stream else answer.text.split("\n\n")[0].removeprefix("data: ")
        choice = json.loads(text)["choices"][0]
        assert choice["text"] == PROMPT
        assert len(choice["logprobs"]["token_logprobs"]) == len(choice["logprobs"]["tokens"]) > 3


def test_an_answer_that_must_be_json_is(server: Live) -> None:
    schema = {
        "type": "object",
        "properties": {"yes": {"type": "boolean"}, "n": {"enum": [1, 2, 3]}},
        "required": ["yes", "n"],
        "additionalProperties": False,
    }
    form: Any = {"type": "json_schema", "json_schema": {"name": "answer", "schema": schema, "strict": True}}
    fields: dict[str, Any] = {"model": NAME, "messages": MESSAGES, "max_tokens": 60, "response_format": form, "seed": 1}
    answer = server.openai.chat.completions.create(**fields, temperature=1.0)
    text = answer.choices[0].message.content or ""
    read = json.loads(text)
    assert set(read) == {"yes", "n"}
    assert answer.choices[0].finish_reason == "stop"
    chunks = server.openai.chat.completions.create(**fields, temperature=1.0, stream=True)
    assert "".join(c.choices[0].delta.content or "" for c in chunks) == text


def test_many_at_once_by_the_async_client(server: Live, reference: em.Engine) -> None:
    prompts = ["def", "class", "import os", "x =", "for", "with open", "return"]
    wanted = [expected(reference, prompt, max_tokens=16).text for prompt in prompts]

    async def ask() -> list[str]:
        async with openai.AsyncOpenAI(base_url=f"{server.base}/v1", api_key="none") as client:

            async def one(index: int, prompt: str) -> str:
                fields: dict[str, Any] = {"model": NAME, "prompt": prompt, "max_tokens": 16, "temperature": 0}
                if index % 2:
                    return (await client.completions.create(**fields)).choices[0].text
                stream = await client.completions.create(**fields, stream=True)
                return "".join([chunk.choices[0].text async for chunk in stream])

            return await asyncio.gather(*(one(index, prompt) for index, prompt in enumerate(prompts)))

    assert asyncio.run(ask()) == wanted


def test_a_conversation_goes_on_from_the_prefix_cache() -> None:
    def load() -> Loaded:
        return Loaded(engine(prefix_cache_bytes=1 << 24), "ngram", DEPTH)

    with live(load) as running:
        tokens = list(range(50, 90))
        fields: dict[str, Any] = {"model": NAME, "prompt": tokens, "max_tokens": 8, "temperature": 0}
        first = running.openai.completions.create(**fields)
        second = running.openai.completions.create(**fields)
    assert first.choices[0].text == second.choices[0].text
    assert first.usage is not None
    assert second.usage is not None
    assert first.usage.prompt_tokens_details is not None
    assert second.usage.prompt_tokens_details is not None
    assert first.usage.prompt_tokens_details.cached_tokens == 0
    assert (second.usage.prompt_tokens_details.cached_tokens or 0) > 20
