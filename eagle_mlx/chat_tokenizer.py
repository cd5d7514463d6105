"""A tokenizer whose chat template takes arguments: whoever renders a chat with it has them, and none need know."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from mlx_lm.tokenizer_utils import TokenizerWrapper


class ChatTokenizer(TokenizerWrapper):
    """mlx-lm's tokenizer, with what its chat template takes beside messages unless a call says otherwise."""

    def __init__(self, tokenizer: TokenizerWrapper, template_args: Mapping[str, Any]):
        """`tokenizer` is given away: the two share all that they know."""
        vars(self).update(vars(tokenizer))
        self._template_args = dict(template_args)

    def apply_chat_template(self, *args: Any, **kwargs: Any) -> Any:
        """As in mlx-lm: messages, `tokenize`, and what the template takes; text, or token ids."""
        return super().apply_chat_template(*args, **{**self._template_args, **kwargs})


def template_args(tokenizer: TokenizerWrapper | None) -> Mapping[str, Any]:
    """What a tokenizer's chat template takes beside messages; empty where nothing was said."""
    return tokenizer._template_args if isinstance(tokenizer, ChatTokenizer) else {}
