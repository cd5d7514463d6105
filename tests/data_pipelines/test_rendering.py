"""The loss mask in handmade cases: the parts to learn are between ⟦ and ⟧."""

from __future__ import annotations

import string
from functools import cache

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from mlx_lm.tokenizer_utils import TokenizerWrapper

from eagle_mlx.data_pipelines import Conversation, Message, render_all
from eagle_mlx.errors import DataError
from tests.data_pipelines.templates import render
from tests.fakes import embedded_tokenizer, plain_tokenizer
from tests.full import some

CHATML = None  # the embedded tokenizer's own

TAGGED = (
    "{% for m in messages %}{% if m['role'] == 'assistant' %}<|im_start|>assistant\n"
    "{% generation %}{{ m['content'] }}{% endgeneration %}<|im_end|>\n"
    "{% else %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}<|im_end|>\n{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
"""The end-of-turn token is outside the tags, as in many published templates."""

THINKING = (
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n"
    "{% if m['role'] == 'assistant' and not loop.last and '</think>' in m['content'] %}"
    "{{ m['content'].split('</think>')[-1] | trim }}"
    "{% else %}{{ m['content'] }}{% endif %}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
"""Earlier turns lose their reasoning once a later turn follows."""

FORCED_THINKING = THINKING.replace("assistant\n{% endif %}", "assistant\n<think>\n{% endif %}")

QWEN3 = (
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n"
    "{% if m['role'] == 'assistant' and loop.last %}<think>\n\n</think>\n\n{% endif %}"
    "{{ m['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
"""The last turn gets empty reasoning, and loses it once another follows."""

SYSTEM_LAST = (
    "{% set system = messages[0]['content'] if messages[0]['role'] == 'system' else '' %}"
    "{% for m in messages if m['role'] != 'system' %}"
    "{% if m['role'] == 'user' %}[{% if loop.last or loop.index0 + 2 == loop.length %}{{ system }} {% endif %}"
    "{{ m['content'] }}]{% else %}{{ m['content'] }}<|im_end|>{% endif %}{% endfor %}"
)
"""The system prompt moves to the last user message."""

PLAIN = "{% for m in messages %}{{ m['role'] | upper }}: {{ m['content'] | trim }}\n\n{% endfor %}" + (
    "{% if add_generation_prompt %}ASSISTANT: {% endif %}"
)
"""No special tokens."""

CLOSED = (
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% else %}<|endoftext|>{% endif %}"
)
"""A further token closes the whole conversation."""

STRICT = "{% if messages[-1]['role'] != 'assistant' %}{{ raise_exception('no answer') }}{% endif %}" + (
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}<|im_end|>\n{% endfor %}"
)
"""Refuses a conversation that does not end with an answer."""

HIDING = "{% for m in messages %}<|im_start|>{{ m['content'] | length }}<|im_end|>{% endfor %}"

U, A, S = "user", "assistant", "system"


@cache
def base() -> TokenizerWrapper:
    return embedded_tokenizer()


def tokenizer(template: str | None) -> TokenizerWrapper:
    if template is None:
        return base()
    return TokenizerWrapper(plain_tokenizer(template))


def conversation(*turns: tuple[str, str]) -> Conversation:
    return Conversation(tuple(Message(role, content) for role, content in turns), origin="chats.jsonl:7")


def shown(template: str | None, *turns: tuple[str, str]) -> str:
    """Return the rendered text with the learned parts in brackets."""
    t = tokenizer(template)
    tokens, mask, *_ = render(t, conversation(*turns))
    assert len(tokens) == len(mask)
    assert tokens == t.encode(t.apply_chat_template(conversation(*turns).as_row()["messages"], tokenize=False))
    out, inside = "", 0
    for token, learned in zip([*tokens, None], [*mask, 0], strict=True):
        if learned != inside:
            out, inside = out + ("⟦" if learned else "⟧"), learned
        out += t.decode([token]) if token is not None else ""
    return out


@pytest.mark.parametrize(
    ("template", "turns", "expected"),
    [
        (CHATML, [(U, "Hi"), (A, "Yo")], "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n⟦Yo<|im_end|>⟧\n"),
        (
            CHATML,
            [(S, "Be brief"), (U, "a"), (A, "b"), (U, "c"), (A, "d")],
            "<|im_start|>system\nBe brief<|im_end|>\n"
            "<|im_start|>user\na<|im_end|>\n<|im_start|>assistant\n⟦b<|im_end|>⟧\n"
            "<|im_start|>user\nc<|im_end|>\n<|im_start|>assistant\n⟦d<|im_end|>⟧\n",
        ),
        (
            TAGGED,
            [(S, "Be brief"), (U, "a"), (A, "b"), (U, "c"), (A, "d")],
            "<|im_start|>system\nBe brief<|im_end|>\n"
            "<|im_start|>user\na<|im_end|>\n<|im_start|>assistant\n⟦b<|im_end|>⟧\n"
            "<|im_start|>user\nc<|im_end|>\n<|im_start|>assistant\n⟦d<|im_end|>⟧\n",
        ),
        (
            THINKING,
            [(U, "a"), (A, "<think>x</think>\n\nb"), (U, "c"), (A, "<think>y</think>\n\nd")],
            "<|im_start|>user\na<|im_end|>\n<|im_start|>assistant\n⟦b<|im_end|>⟧\n"
            "<|im_start|>user\nc<|im_end|>\n<|im_start|>assistant\n⟦<think>y</think>\n\nd<|im_end|>⟧\n",
        ),
        (
            FORCED_THINKING,
            [(U, "a"), (A, "b"), (U, "c"), (A, "d")],
            "<|im_start|>user\na<|im_end|>\n<|im_start|>assistant\n⟦b<|im_end|>⟧\n"
            "<|im_start|>user\nc<|im_end|>\n<|im_start|>assistant\n⟦d<|im_end|>⟧\n",
        ),
        (
            SYSTEM_LAST,
            [(S, "brief"), (U, "a"), (A, "b"), (U, "c"), (A, "d")],
            "[a]⟦b<|im_end|>⟧[brief c]⟦d<|im_end|>⟧",
        ),
        (
            PLAIN,
            [(U, "a"), (A, "b."), (U, "c"), (A, "d.")],
            "USER: a\n\nASSISTANT:⟦ b.⟧\n\nUSER: c\n\nASSISTANT:⟦ d.⟧\n\n",
        ),
        (
            CLOSED,
            [(U, "a"), (A, "b"), (U, "c"), (A, "d")],
            "<|im_start|>user\na<|im_end|>\n<|im_start|>assistant\n⟦b<|im_end|>⟧\n"
            "<|im_start|>user\nc<|im_end|>\n<|im_start|>assistant\n⟦d<|im_end|>⟧\n<|endoftext|>",
        ),
        (
            STRICT,
            [(U, "a"), (A, "b"), (U, "c"), (A, "d")],
            "<|im_start|>user\na<|im_end|>\n<|im_start|>assistant\n⟦b<|im_end|>⟧\n"
            "<|im_start|>user\nc<|im_end|>\n<|im_start|>assistant\n⟦d<|im_end|>⟧\n",
        ),
        (
            CHATML,
            [(A, "Hello!"), (U, "same"), (A, "same")],
            "<|im_start|>assistant\n⟦Hello!<|im_end|>⟧\n"
            "<|im_start|>user\nsame<|im_end|>\n<|im_start|>assistant\n⟦same<|im_end|>⟧\n",
        ),
        (
            QWEN3,
            [(U, "a"), (A, ""), (U, "c"), (A, "d")],
            "<|im_start|>user\na<|im_end|>\n<|im_start|>assistant\n<|im_end|>\n"
            "<|im_start|>user\nc<|im_end|>\n<|im_start|>assistant\n⟦<think>\n\n</think>\n\nd<|im_end|>⟧\n",
        ),
        (
            CHATML,
            [(U, "a"), (A, ""), (U, "c"), (A, "d")],
            "<|im_start|>user\na<|im_end|>\n<|im_start|>assistant\n<|im_end|>\n"
            "<|im_start|>user\nc<|im_end|>\n<|im_start|>assistant\n⟦d<|im_end|>⟧\n",
        ),
    ],
    ids=["one turn", "system and turns", "tags", "thinking", "forced thinking", "system last", "no special tokens",
         "closing token", "strict", "greeting and repetition", "empty turn of Qwen3", "empty turn"],
)  # fmt: skip
def test_the_mask_covers_what_the_assistant_says(
    template: str | None, turns: list[tuple[str, str]], expected: str
) -> None:
    assert shown(template, *turns) == expected


words = st.text(string.ascii_letters + string.digits + " \n.,(){}<>|é漢🙂", min_size=1, max_size=30).filter(str.strip)


@settings(max_examples=some(40), deadline=None)
@given(st.lists(st.tuples(words, words), min_size=1, max_size=4), st.none() | words)
@example([("a", "é"), ("b", "x🙂")], None)
def test_prefixes_and_tags_agree(turns: list[tuple[str, str]], system: str | None) -> None:
    messages = [(S, system)] if system else []
    for question, answer in turns:
        messages += [(U, question), (A, answer)]
    untagged = TAGGED.replace("{% generation %}", "").replace("{% endgeneration %}", "")
    assert render(tokenizer(TAGGED), conversation(*messages)) == render(tokenizer(untagged), conversation(*messages))


@settings(max_examples=some(40), deadline=None)
@given(st.lists(st.tuples(words, words), min_size=1, max_size=4))
def test_the_learned_tokens_spell_the_answers(turns: list[tuple[str, str]]) -> None:
    t = tokenizer(CHATML)
    tokens, mask, *_ = render(t, conversation(*((role, text) for q, a in turns for role, text in ((U, q), (A, a)))))
    learned = t.decode([token for token, m in zip(tokens, mask, strict=True) if m])
    assert learned == "".join(f"{answer}<|im_end|>" for _, answer in turns)


def test_a_template_that_changes_the_answer_is_followed() -> None:
    loud = TAGGED.replace("{% generation %}{{ m['content'] }}{% endgeneration %}", "{{ m['content'] | upper }}")
    expected = "<|im_start|>user\na<|im_end|>\n<|im_start|>assistant\n⟦YES<|im_end|>⟧\n"
    assert shown(loud, (U, "a"), (A, "yes")) == expected


def test_text_is_learned_from_end_to_end() -> None:
    tokens, mask, *_ = render(base(), Conversation(text="import os\nimport sys"))
    assert tokens == base().encode("import os\nimport sys")
    assert mask == [1] * len(tokens)


def test_a_conversation_without_an_answer_is_refused() -> None:
    with pytest.raises(DataError, match="chats.jsonl:7: no assistant turn"):
        render(base(), conversation((U, "Hi")))


def test_a_template_that_hides_the_answer_is_refused() -> None:
    with pytest.raises(DataError, match=r"chats.jsonl:7: message 2 cannot be found"):
        render(tokenizer(HIDING), conversation((U, "a"), (A, "b"), (U, "c"), (A, "d")))


def test_a_template_that_refuses_the_conversation_is_named() -> None:
    with pytest.raises(DataError, match="chats.jsonl:7: the chat template refuses this conversation: no answer"):
        render(tokenizer(STRICT), conversation((A, "b"), (U, "a")))


def test_without_a_template_only_text_can_be_rendered() -> None:
    bare = TokenizerWrapper(plain_tokenizer())
    with pytest.raises(DataError, match="no chat template: give --chat-template"):
        render(bare, conversation((U, "a"), (A, "b")))
    assert render(bare, Conversation(text="a")).loss_mask == [1]


def test_cutting_and_dropping_are_counted() -> None:
    short, long = conversation((U, "a"), (A, "b")), conversation((U, "word " * 50), (A, "b"))
    partly = conversation((U, "a"), (A, "word " * 50))
    kept, report = render_all(base(), [short, long, partly], max_length=30)
    assert (report.conversations, report.cut, report.dropped) == (2, 2, 1)
    assert [len(r.tokens) for r in kept] == [len(render(base(), short).tokens), 30]
    assert report.tokens == sum(len(r.tokens) for r in kept)
    assert report.loss_tokens == sum(sum(r.loss_mask) for r in kept)
    assert render(base(), partly).tokens[:30] == kept[1].tokens
