"""Prompts from messages: what templates get, what is refused and where, and how a tokenizer's format is detected."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import pytest
from mlx_lm.tokenizer_utils import TokenizerWrapper
from transformers import PreTrainedTokenizerFast

import eagle_mlx as em
from eagle_mlx.errors import ConfigError, PromptError
from eagle_mlx.serve.chat import AnswerParser, ChatFormat, ToolOffer
from tests.fakes import tiny_target
from tests.serve.chat.formats import CLOCK, HELLO, WEATHER, format_of, format_with_template


def written(name: str, messages: Any, tools: Any = (), tool_choice: Any = None, **kwargs: Any) -> str:
    chat = format_of(name).chat(messages, ToolOffer.of(tools, tool_choice).tools, kwargs)
    return str(chat.tokenizer.decode(chat.tokens()))


def called(arguments: Any = '{"city": "Oslo"}', **call: Any) -> dict[str, Any]:
    function = {"name": "get_weather", "arguments": arguments}
    return {"role": "assistant", "content": None, "tool_calls": [{"id": "call_1", "function": function, **call}]}


@pytest.mark.parametrize(
    ("name", "template", "tools", "thinking"),
    [
        ("plain", True, False, False),
        ("qwen", True, True, False),
        ("thinking", True, True, True),
        ("llama", True, False, False),
        ("mistral", True, True, False),
    ],
)
def test_a_format_knows_the_abilities_of_its_model(name: str, template: bool, tools: bool, thinking: bool) -> None:
    format = format_of(name)
    has_tools, has_thoughts = format.calls is not None, bool(format.thoughts.think_start)
    assert (format.tokenizer.has_chat_template, has_tools, has_thoughts) == (template, tools, thinking)


def test_a_target_without_a_tokenizer_has_no_format() -> None:
    with pytest.raises(ConfigError, match="no tokenizer"):
        ChatFormat.of(tiny_target(layers=2))


def test_messages_are_rendered_by_the_template() -> None:
    messages = [
        {"role": "developer", "content": "Be brief."},
        {"role": "user", "content": "hello", "name": None},
        {"role": "assistant", "content": "hi", "tool_calls": [], "reasoning": "greet"},
        {"role": "user", "content": "bye"},
    ]
    assert written("thinking", messages, enable_thinking=True) == (
        "<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\nhello<|im_end|>\n"
        "<|im_start|>assistant\n<think>\ngreet\n</think>\n\nhi<|im_end|>\n"
        "<|im_start|>user\nbye<|im_end|>\n<|im_start|>assistant\n<think>\n"
    )


def test_a_prompt_equals_the_engines_own_for_plain_messages() -> None:
    target = em.Target(tiny_target(tokenizer=True).model, format_of("plain").tokenizer, name="plain")
    assert target.tokenizer is not None
    expected = target.tokenizer.apply_chat_template(HELLO, add_generation_prompt=True, tokenize=True)
    assert ChatFormat.of(target).chat(HELLO).tokens() == list(expected)


class OfItsOwn(PreTrainedTokenizerFast):
    """A tokenizer with its own way to encode chats."""

    def apply_chat_template(self, *args: Any, tokenize: bool = True, **kwargs: Any) -> Any:
        text = super().apply_chat_template(*args, tokenize=False, **kwargs)
        return self.encode(text)[::-1] if tokenize else text


@pytest.mark.parametrize("name", ["plain", "qwen", "thinking", "llama", "joined", "mistral"])
@pytest.mark.parametrize("own", [False, True])
def test_a_chat_has_the_same_tokens_with_any_encoder(name: str, own: bool) -> None:
    tokenizer = format_of(name).tokenizer
    assert tokenizer is not None
    if own:
        kind = OfItsOwn(tokenizer_object=tokenizer.backend_tokenizer, chat_template=tokenizer.chat_template)
        tokenizer = TokenizerWrapper(kind)
    format, texts = replace(format_of(name), tokenizer=tokenizer), []

    def encode(text: str, add_special_tokens: bool) -> list[int]:
        texts.append(text)
        return list(tokenizer.encode(text, add_special_tokens=add_special_tokens))

    assert format.chat(HELLO).tokens(encode) == format.chat(HELLO).tokens()
    assert len(texts) == (not own)


def test_the_template_gets_the_arguments_of_the_request() -> None:
    assert written("thinking", HELLO, enable_thinking=False).endswith("assistant\n")
    assert written("thinking", HELLO, add_generation_prompt=False).endswith("hello<|im_end|>\n")


@pytest.mark.parametrize("name", ["qwen", "thinking"])
@pytest.mark.parametrize("thinks", [True, False])
def test_whether_a_prompt_ends_in_an_open_thought(name: str, thinks: bool) -> None:
    format = format_of(name)
    about_tags = [{"role": "user", "content": "what is <think> good for?"}]
    prompt = format.chat(about_tags, template_kwargs={"enable_thinking": thinks}).tokens()
    assert format.starts_in_reasoning(prompt) == (thinks and name == "thinking")


def test_templates_that_say_thinking_instead_of_enable_thinking_hear_it_too() -> None:
    """Those of Kimi, Granite and DeepSeek do."""
    chats = format_with_template("{{ messages[0].content }}{{ '<think>' if thinking is defined and thinking }}")
    for kwargs, ends in [
        ({}, "hello"),
        ({"enable_thinking": True}, "hello<think>"),
        ({"enable_thinking": False}, "hello"),
        ({"enable_thinking": False, "thinking": True}, "hello<think>"),
    ]:
        assert chats.chat(HELLO, template_kwargs=kwargs).text == ends


def test_calls_and_results_are_written_in_the_templates_form() -> None:
    messages = [*HELLO, called(), {"role": "tool", "tool_call_id": "call_1", "content": "rain"}]
    text = written("qwen", messages, [WEATHER])
    assert '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Oslo"}}\n</tool_call>' in text
    assert "tool\nrain<|im_end|>" in text
    assert json.dumps(WEATHER) in text


def test_templates_that_join_arguments_to_text_get_text() -> None:
    text = written("joined", [*HELLO, called('{"city":  "Zürich"}')], [WEATHER])
    assert text.endswith('calls get_weather {"city": "Zürich"}\n')


def test_with_tool_choice_none_the_model_sees_no_tools() -> None:
    assert written("qwen", HELLO, [WEATHER], "none") == written("qwen", HELLO)
    assert written("plain", HELLO, [WEATHER], "none") == written("plain", HELLO)
    for choice in ("auto", "required", {"type": "function", "function": {"name": "clock"}}, None):
        assert "get_weather" in written("qwen", HELLO, [WEATHER, CLOCK], choice)


@pytest.mark.parametrize(
    ("messages", "place"),
    [
        ([*HELLO, {"role": "user"}], r"messages\[1\]\.content"),
        ([*HELLO, {"role": "user", "content": None}], r"messages\[1\]\.content"),
        ([{"role": "user", "content": "x", "tool_calls": [{}]}], r"messages\[0\]: 'tool_calls'"),
        ([*HELLO, {"role": "tool", "content": "x"}], r"messages\[1\]\.tool_call_id"),
        ([*HELLO, {"role": "tool", "content": "x", "tool_call_id": "7"}], r"messages\[1\]\.tool_call_id"),
    ],
)
def test_a_bad_message_is_named(messages: Any, place: str) -> None:
    with pytest.raises(PromptError, match=f"^{place}(:| )"):
        format_of("qwen").chat(messages).tokens()


def function(**fields: Any) -> dict[str, Any]:
    return {"type": "function", "function": {"name": "f", **fields}}


@pytest.mark.parametrize(
    ("tools", "choice", "place"),
    [
        ([function(), function()], None, "tools"),
        ([], "required", "tool_choice"),
        ([], {"type": "function", "function": {"name": "f"}}, "tool_choice"),
        ([function()], {"type": "function", "function": {"name": "g"}}, "tool_choice"),
    ],
)
def test_bad_tools_and_choices_are_named(tools: Any, choice: Any, place: str) -> None:
    with pytest.raises(PromptError, match=f"^{place}: "):
        ToolOffer.of(tools, choice)


def test_tools_and_calls_that_the_template_ignores_are_refused() -> None:
    with pytest.raises(PromptError, match="no parser for this model's tool calls"):
        format_of("llama").chat(HELLO, [WEATHER]).tokens()
    silent = format_of("qwen").calls
    plain = ChatFormat(format_of("plain").tokenizer, format_of("plain").thoughts, silent)
    with pytest.raises(PromptError, match="^tools: .*ignores tools"):
        plain.chat(HELLO, [WEATHER]).tokens()
    with pytest.raises(PromptError, match=r"^messages\[1\]\.tool_calls: .*ignores tool calls"):
        plain.chat([*HELLO, called()]).tokens()


CALLING = [
    {"role": "system", "content": "Be brief."},
    *HELLO,
    {**called(), "reasoning_content": "hm", "content": "I look."},
    {"role": "tool", "tool_call_id": "call_1", "content": "sunny"},
    {"role": "user", "content": "Thanks."},
]


@pytest.mark.parametrize(("name", "roles"), [("gemma", ["user"]), ("deepseek", ["system", "user"])])
def test_tools_and_calls_are_text_if_the_template_ignores_or_refuses_them(name: str, roles: list[str]) -> None:
    format = format_of(name)
    chat = format.chat(CALLING, [WEATHER, CLOCK])
    assert [message["role"] for message in chat.messages] == [*roles, "assistant", "user"]
    told, answer, result = "\n\n".join(message["content"] for message in chat.messages[:-2]), *chat.messages[-2:]
    assert '"name": "clock"' in told
    assert told.index("write only this") < told.index("Be brief.") < told.index("hello")
    assert result["content"] == "Result of get_weather:\nsunny\n\nThanks."
    reader = AnswerParser(format, ToolOffer.of([WEATHER]))
    deltas = [*reader.push(answer["content"]), *reader.finish()]
    assert deltas[0].content == "I look."
    assert deltas[1].tool_call is not None
    assert deltas[1].tool_call.arguments == '{"city": "Oslo"}'
    assert not any("You have access" in message["content"] for message in format.chat(HELLO).messages)


def test_a_tool_without_a_description_gets_an_empty_one_if_the_template_needs_it() -> None:
    template = "<|channel|>commentary{% for t in tools or [] %}{{ '// ' + t.function.description }}"
    template += "{{ t.function.name + ':' }}{{ t.function.parameters | tojson }}{% endfor %}{{ messages[0].content }}"
    bare = {"type": "function", "function": {"name": "clock"}}
    text = format_with_template(template).chat(HELLO, [WEATHER, bare]).text
    assert text.startswith(f"<|channel|>commentary// {WEATHER['function']['description']}get_weather:")
    assert text.endswith('// clock:{"type": "object", "properties": {}}hello')
    assert "description" not in written("qwen", HELLO, [bare])


def test_templates_that_take_one_call_per_message_get_one() -> None:
    both = called()
    both["tool_calls"] += called('{"city": "Rome"}', id="call_2")["tool_calls"]
    results = [{"role": "tool", "tool_call_id": f"call_{n}", "content": word} for n, word in ((1, "rain"), (2, "sun"))]
    text = written("llama3", [*HELLO, both, *results], [WEATHER])
    words = ("Oslo", "rain", "Rome", "sun")
    assert [text.rindex(word) for word in words] == sorted(text.rindex(word) for word in words)


def test_gpt_oss_gets_its_reasoning_before_calls_back() -> None:
    text = written("gpt-oss", CALLING[1:], [WEATHER])
    assert "<|channel|>analysis<|message|>hm\n\nI look.<|end|><|start|>assistant to=functions.get_weather" in text


def test_late_instructions_become_user_messages_if_the_template_allows_no_others() -> None:
    late = [*HELLO, {"role": "assistant", "content": "hi"}, {"role": "system", "content": "Be brief."}]
    as_user = [*late[:2], {"role": "user", "content": "Be brief."}]
    assert written("mistral", late) == written("mistral", as_user)
    assert written("qwen", late) != written("qwen", as_user)


def test_errors_of_a_template_are_prompt_errors() -> None:
    result = {"role": "tool", "tool_call_id": "call_1", "content": "rain"}
    with pytest.raises(PromptError, match="only user and assistant may speak, not tool"):
        format_of("mistral").chat([*HELLO, called(), result]).tokens()


@pytest.mark.parametrize("name", ["chat_template", "tokenize", "tools", "messages", "continue_final_message"])
def test_requests_cannot_set_arguments_of_the_rendering(name: str) -> None:
    with pytest.raises(PromptError, match=f"^chat_template_kwargs: '{name}'"):
        format_of("qwen").chat(HELLO, template_kwargs={name: "x"}).tokens()


def test_add_generation_prompt_must_be_a_boolean() -> None:
    with pytest.raises(PromptError, match="add_generation_prompt"):
        format_of("qwen").chat(HELLO, template_kwargs={"add_generation_prompt": 1}).tokens()
