"""Tokenizers with chat templates, and what is learned of a conversation, in brackets."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

from mlx_lm.tokenizer_utils import TokenizerWrapper

from eagle_mlx.data_pipelines import Conversation
from eagle_mlx.data_pipelines.rendering import Sample, check_answer, examine
from eagle_mlx.data_pipelines.sources.rows import parse_row
from tests.fakes import plain_tokenizer

_SPECIAL = re.compile(r"<\|[^<>\s']+\|>|<\|[a-z]+>|<[a-z]+\|>|</?think>")


def template_tokenizer(template: str, ends: Sequence[str] = (), special: Sequence[str] = ()) -> TokenizerWrapper:
    """Return the embedded tokenizer with a chat template, whose tags are special tokens; `ends` end a turn."""
    inner = plain_tokenizer(template)
    inner.add_special_tokens(
        {"additional_special_tokens": [*dict.fromkeys([*_SPECIAL.findall(template), *ends, *special])]}
    )
    return TokenizerWrapper(inner, eos_token_ids=inner.convert_tokens_to_ids(list(ends)))


def render(tokenizer: TokenizerWrapper, conversation: Conversation) -> Sample:
    """Return the tokens and the loss mask of a conversation with an answer."""
    check_answer(conversation)
    return examine(tokenizer, conversation)[0]


def shown(tokenizer: TokenizerWrapper, row: dict[str, Any]) -> str:
    """Return a row's text with the learned parts in brackets."""
    tokens, mask, *_ = render(tokenizer, parse_row(row, "x:1"))
    out, inside = "", 0
    for token, learned in zip([*tokens, None], [*mask, 0], strict=True):
        if learned != inside:
            out, inside = out + ("⟦" if learned else "⟧"), learned
        out += tokenizer.decode([token]) if token is not None else ""
    return out
