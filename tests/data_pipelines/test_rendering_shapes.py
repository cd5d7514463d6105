"""The loss mask over templates of the shapes that published models have: what is learned is between ⟦ and ⟧."""

from __future__ import annotations

from typing import Any

import pytest
from mlx_lm.tokenizer_utils import TokenizerWrapper

from eagle_mlx.data_pipelines.rendering import examine
from eagle_mlx.data_pipelines.sources.rows import parse_row
from tests.data_pipelines.templates import shown, template_tokenizer

CALL = {"type": "function", "function": {"name": "weather", "arguments": {"city": "Paris", "days": 2}}}
TOOLS = [{"type": "function", "function": {"name": "weather", "parameters": {"type": "object"}}}]
TALK: dict[str, Any] = {
    "messages": [
        {"role": "user", "content": "Hi"},
        {"role": "assistant", "content": "Yo"},
        {"role": "user", "content": "Warm?"},
        {"role": "assistant", "content": "", "reasoning_content": "Look", "tool_calls": [CALL]},
        {"role": "tool", "content": "21"},
        {"role": "assistant", "content": "Yes", "reasoning_content": "So warm"},
    ],
    "tools": TOOLS,
}
"""A conversation with everything that an assistant writes."""
SHORT: dict[str, Any] = {
    **TALK,
    "messages": [{key: text for key, text in m.items() if key != "reasoning_content"} for m in TALK["messages"]],
}
"""The same without reasoning."""
ARGUMENTS = "{% for k, v in c['function']['arguments'].items() %}<{{ k }}>{{ v }}</{{ k }}>{% endfor %}"
CALLS = "{% for c in m.get('tool_calls') or [] %}<call>{{ c['function']['name'] }}" + ARGUMENTS + "</call>{% endfor %}"

STRICT_TOOLS = (
    "{% for m in messages %}{% if m['role'] == 'assistant' %}]b]ai\n"
    "{% if m.get('reasoning_content') and loop.index0 > 2 %}<think>\n{{ m['reasoning_content'] }}\n</think>\n\n"
    "{% endif %}"
    "{{ m['content'] }}" + CALLS + "[e[\n"
    "{% elif m['role'] == 'tool' %}{% if not messages[loop.index0 - 1].get('tool_calls') %}"
    "{{ raise_exception('no call before the result') }}{% endif %}]b]tool\n{{ m['content'] }}[e[\n"
    "{% else %}]b]{{ m['role'] }}\n{{ m['content'] }}[e[\n{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}]b]ai\n<think>\n{% endif %}"
)
"""As MiniMax-M2: a result needs a call before it, and a prompt begins reasoning that the history may lack."""

COUNTED = (
    "{% for m in messages %}{% if m['role'] == 'user' %}<|User|>{{ m['content'] }}"
    "{% elif m['role'] == 'assistant' %}{% if messages[loop.index0 - 1]['role'] != 'tool' %}<|Assistant|>{% endif %}"
    "<think>{{ m.get('reasoning_content') or '' }}</think>{{ m['content'] }}" + CALLS + "<|end|>"
    "{% else %}{{ '<results>' if messages[loop.index0 - 1]['tool_calls'] | length }}{{ m['content'] }}</results>"
    "{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}{% if messages[-1]['role'] == 'user' %}<|Assistant|>{% endif %}<think>{% endif %}"
)
"""As DeepSeek-V3.2: results depend on the calls before them."""

NO_END = (
    "{% for m in messages %}{% if m['role'] == 'tool' %}<|begin|>system\n<results>{{ m['content'] }}</results><|end|>"
    "{% else %}<|begin|>{{ m['role'] }}\n{{ m['content'] }}{% if m.get('tool_calls') %}Action:" + CALLS + "{{ '\n' }}"
    "{% else %}<|end|>{% endif %}{% endif %}{% endfor %}<|begin|>system\nWrite an action.<|end|>"
    "{% if add_generation_prompt %}<|begin|>assistant\n{% endif %}"
)
"""As Command R+: calls have no end token, and an instruction follows the conversation."""

AROUND = (
    "{% for m in messages %}<|begin|>{{ m['role'] }}\n{% if m.get('tool_calls') %}<|action|>" + CALLS + "<|/action|>"
    "{% else %}<|text|>{{ m['content'] }}<|/text|>{% endif %}{{ '\n' }}<|end|>\n{% endfor %}"
    "<|begin|>assistant{{ '\n' }}"
)
"""As Command R7B, Cohere2MoE and Nemotron-Nano-v2: tags and a line break between answer and end token.

As Command R7B, it always ends with the header of an answer.
"""

INSIDE = (
    "{% for m in messages if m['role'] != 'tool' %}"
    "{% if m['role'] == 'user' %}<|turn>user\n{{ m['content'] }}<turn|>\n{% else %}"
    "{% if not loop.previtem or loop.previtem['role'] == 'user' %}<|turn>model\n{% endif %}"
    "{% for c in m.get('tool_calls') or [] %}<|call>{{ c['function']['name'] }}" + ARGUMENTS + "<call|>"
    "{% for r in messages if r['role'] == 'tool' %}<|response>{{ c['function']['name'] }}:{{ r['content'] }}<response|>"
    "{% endfor %}{% endfor %}{{ m['content'] }}{% if m['content'] %}<turn|>\n{% endif %}{% endif %}{% endfor %}"
    "{% if add_generation_prompt and messages[-1]['role'] == 'user' %}<|turn>model\n{% endif %}"
)
"""As Gemma 4: results stand inside the model's turn, before the rest of the message that made the call."""

CHANNELS = (
    "{% for m in messages %}{% if m['role'] == 'assistant' %}<|start|>assistant"
    "{% if m.get('tool_calls') %}{% if m.get('thinking') %}<|channel|>analysis<|message|>{{ m['thinking'] }}<|end|>"
    "<|start|>assistant{% endif %} to=" + CALLS + "<|call|>"
    "{% else %}<|channel|>final<|message|>{{ m['content'] }}{{ '<|return|>' if loop.last else '<|end|>' }}{% endif %}"
    "{% else %}<|start|>{{ m['role'] }}<|message|>{{ m['content'] }}<|end|>{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<|start|>assistant{% endif %}"
)
"""As gpt-oss: answers in the history end with another token than the last one."""

NEXT_ROLE = (
    "{% for m in messages %}<|{{ m['role'] }}|>\n{{ m['content'] }}" + CALLS + "{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>\n{% endif %}"
)
"""As GLM: the next role's token ends a turn."""

PARIS = "<call>weather<city>Paris</city><days>2</days></call>"


@pytest.mark.parametrize(
    ("template", "ends", "expected"),
    [
        (
            STRICT_TOOLS,
            ["[e["],
            "]b]user\nHi[e[\n]b]ai\n⟦Yo[e[⟧\n]b]user\nWarm?[e[\n"
            f"]b]ai\n<think>\n⟦Look\n</think>\n\n{PARIS}[e[⟧\n]b]tool\n21[e[\n"
            "]b]ai\n<think>\n⟦So warm\n</think>\n\nYes[e[⟧\n",
        ),
        (
            COUNTED,
            ["<|end|>"],
            "<|User|>Hi<|Assistant|><think>⟦</think>Yo<|end|>⟧<|User|>Warm?<|Assistant|><think>⟦Look</think>"
            f"{PARIS}<|end|>⟧<results>21</results><think>⟦So warm</think>Yes<|end|>⟧",
        ),
        (
            NO_END,
            ["<|end|>"],
            "<|begin|>user\nHi<|end|><|begin|>assistant\n⟦Yo<|end|>⟧<|begin|>user\nWarm?<|end|><|begin|>assistant\n"
            f"⟦Action:{PARIS}\n⟧<|begin|>system\n<results>21</results><|end|>"
            "<|begin|>assistant\n⟦Yes<|end|>⟧<|begin|>system\nWrite an action.<|end|>",
        ),
        (
            AROUND,
            ["<|end|>"],
            "<|begin|>user\n<|text|>Hi<|/text|>\n<|end|>\n<|begin|>assistant\n⟦<|text|>Yo<|/text|>\n<|end|>⟧\n"
            "<|begin|>user\n<|text|>Warm?<|/text|>\n<|end|>\n"
            f"<|begin|>assistant\n⟦<|action|>{PARIS}<|/action|>\n<|end|>⟧\n"
            "<|begin|>tool\n<|text|>21<|/text|>\n<|end|>\n<|begin|>assistant\n⟦<|text|>Yes<|/text|>\n<|end|>⟧\n"
            "<|begin|>assistant\n",
        ),
        (
            INSIDE,
            ["<turn|>", "<|response>"],
            "<|turn>user\nHi<turn|>\n<|turn>model\n⟦Yo<turn|>⟧\n<|turn>user\nWarm?<turn|>\n<|turn>model\n"
            "⟦<|call>weather<city>Paris</city><days>2</days><call|><|response>⟧weather:21<response|>⟦Yes<turn|>⟧\n",
        ),
        (
            CHANNELS,
            ["<|return|>", "<|call|>"],
            "<|start|>user<|message|>Hi<|end|><|start|>assistant⟦<|channel|>final<|message|>Yo<|end|>⟧"
            "<|start|>user<|message|>Warm?<|end|><|start|>assistant⟦<|channel|>analysis<|message|>Look<|end|>"
            f"<|start|>assistant to={PARIS}<|call|>⟧<|start|>tool<|message|>21<|end|>"
            "<|start|>assistant⟦<|channel|>final<|message|>Yes<|return|>⟧",
        ),
        (
            NEXT_ROLE,
            ["<|user|>", "<|tool|>"],
            f"<|user|>\nHi<|assistant|>\n⟦Yo<|user|>⟧\nWarm?<|assistant|>\n⟦{PARIS}<|tool|>⟧\n21<|assistant|>\n⟦Yes⟧",
        ),
    ],
    ids=["MiniMax-M2", "DeepSeek-V3.2", "Command R+", "Command R7B", "Gemma 4", "gpt-oss", "GLM"],
)
def test_the_mask_covers_exactly_what_the_assistant_writes_with_its_end_token(
    template: str, ends: list[str], expected: str
) -> None:
    tokenizer = template_tokenizer(template, ends, ["<|end|>", "<|start|>"] if template is CHANNELS else [])
    assert shown(tokenizer, TALK) == expected


@pytest.mark.parametrize(
    ("template", "call"),
    [
        (STRICT_TOOLS, f"\n⟦{PARIS}[e[⟧\n]b]tool"),
        (COUNTED, f"<think>⟦</think>{PARIS}<|end|>⟧<results>"),
        (INSIDE, "⟦<|call>weather<city>Paris</city><days>2</days><call|><|response>⟧weather:21<response|>⟦Yes"),
    ],
    ids=["MiniMax-M2", "DeepSeek-V3.2", "Gemma 4"],
)
def test_a_call_without_reasoning_is_learned_where_the_history_is_not_a_prompt_continued(
    template: str, call: str
) -> None:
    assert call in shown(template_tokenizer(template, ["[e[", "<|end|>", "<turn|>", "<|response>"]), SHORT)


def test_text_after_tool_results_is_learned_with_its_message() -> None:
    row = {**TALK, "messages": [{**m, "content": m["content"] or "Let me see."} for m in TALK["messages"]]}
    text = shown(template_tokenizer(INSIDE, ["<turn|>", "<|response>"]), row)
    assert "<call|><|response>⟧weather:21<response|>⟦Let me see.<turn|>⟧\n⟦Yes<turn|>⟧" in text


def test_without_an_end_token_a_call_is_learned_with_its_closing_tag() -> None:
    text = shown(template_tokenizer(INSIDE, []), TALK)
    assert "⟦<|call>weather<city>Paris</city><days>2</days><call|>⟧<|response>weather:21" in text


BOUNDED = (
    "{% for m in messages %}{% if m['role'] == 'assistant' %}{% if BEFORE %}<|im_start|>assistant\n{% endif %}"
    "{% if m.get('reasoning_content') %}<think>{{ m['reasoning_content'] }}</think>{% endif %}"
    "{% generation %}{{ m['content'] }}{% endgeneration %}" + CALLS + "{{ '\n' }}<|im_end|>\n"
    "{% else %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}<|im_end|>\n{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
"""Tags around the answer alone."""


def notes(tokenizer: TokenizerWrapper, row: dict[str, Any]) -> tuple[str, ...]:
    return examine(tokenizer, parse_row(row, "x:1"))[1].parts


def test_generation_tags_that_cover_less_than_the_turn_are_followed_and_what_they_leave_out_is_named() -> None:
    tokenizer = template_tokenizer(BOUNDED.replace("BEFORE", "true"), ["<|im_end|>"])
    assert shown(tokenizer, TALK) == (
        "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n⟦Yo\n<|im_end|>⟧\n"
        "<|im_start|>user\nWarm?<|im_end|>\n"
        f"<|im_start|>assistant\n<think>Look</think>{PARIS}\n<|im_end|>\n<|im_start|>tool\n21<|im_end|>\n"
        "<|im_start|>assistant\n<think>So warm</think>⟦Yes\n<|im_end|>⟧\n"
    )
    assert notes(tokenizer, TALK) == ("mark reasoning for learning", "mark tool calls for learning", "render tools")


def test_a_tagged_answer_may_begin_the_text() -> None:
    tokenizer = template_tokenizer(BOUNDED.replace("BEFORE", "false"), ["<|im_end|>"])
    row = {"messages": [{"role": "assistant", "content": "Hello"}, *TALK["messages"][:2]]}
    assert shown(tokenizer, row) == "⟦Hello\n<|im_end|>⟧\n<|im_start|>user\nHi<|im_end|>\n⟦Yo\n<|im_end|>⟧\n"


def test_templates_that_end_no_answer_are_named() -> None:
    assert notes(template_tokenizer(NEXT_ROLE), {"prompt": "a", "completion": "b"}) == (
        "end answers with an end token",
    )
    assert notes(template_tokenizer(AROUND, ["<|end|>"]), {"prompt": "a", "completion": "b"}) == ()
