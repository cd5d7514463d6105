"""Texts to tokens, for requests that may be cancelled while it is done."""

from __future__ import annotations

from collections.abc import Callable
from functools import cached_property
from threading import Event, Lock
from typing import Any

from mlx_lm.tokenizer_utils import TokenizerWrapper
from tokenizers import Tokenizer
from transformers import PreTrainedTokenizerFast

from ..processes import Process, ProcessEnded
from .encoder_process import EncoderProcess
from .errors import ApiError

_LOOK_SECONDS = 0.05
"""Between looks whether a request has been cancelled."""
_TOKENIZER_SECONDS = 60.0
"""As for grammars; it takes under a second."""
_OWN_WAYS = ("__call__", "encode", "_encode_plus", "_convert_encoding", "set_truncation_and_padding")
"""Methods with which a tokenizer's class may do more to a text than its backend does."""

Encode = Callable[[str, bool], list[int]]
"""A text, and whether the special tokens that begin or end one are added -> its token ids."""


class Encoder:
    """Encodes short texts here, and long ones in a process, which is killed when its request is cancelled.

    The process holds the tokenizer's backend (the `tokenizers` library) and nothing else. A tokenizer without one, or
    whose class does more than its backend, encodes long texts here too, and then nothing stops it. A text takes some
    200 bytes of memory for each of its own, so the limit of bodies bounds that too. Any thread may use this.
    """

    def __init__(self, tokenizer: TokenizerWrapper):
        self._tokenizer = tokenizer
        self._starting = Lock()
        self._process: Process | None = None
        """The first one, forked for each text; started at the first need."""

    def encode(self, text: str, add_special_tokens: bool, is_long: bool, cancelled: Event) -> list[int]:
        """The tokenizer's ids of a text. Raises ApiError, 499 once this is cancelled, 503 if the process is killed."""
        if cancelled.is_set():
            raise _gone()
        if not is_long or self._opening is None:
            return list(self._tokenizer.encode(text, add_special_tokens=add_special_tokens))
        try:
            answer = _asked(self._start().fork(), text, add_special_tokens, cancelled)
        except ProcessEnded as e:
            message = "the process that encodes long texts has been killed; there may be too little memory"
            raise ApiError(503, message, headers={"Retry-After": "5"}) from e
        tokens, reason = answer
        if reason:
            raise ApiError(400, f"the text cannot be encoded: {reason}")
        return tokens  # type: ignore[no-any-return]  # of `EncoderProcess.encode`

    @cached_property
    def _opening(self) -> tuple[str, str, bool] | None:
        """What the first process is told; None where long texts are encoded here."""
        tokenizer: Any = self._tokenizer._tokenizer  # transformers' own; mlx-lm's wrapper adds nothing to its `encode`
        backend = getattr(tokenizer, "backend_tokenizer", None)
        own = any(getattr(type(tokenizer), name) is not getattr(PreTrainedTokenizerFast, name) for name in _OWN_WAYS)
        if own or not isinstance(backend, Tokenizer):
            return None
        try:
            return "open", backend.to_str(), tokenizer.split_special_tokens
        except Exception:  # of no other kind, where a part of the backend is written in Python
            return None

    def _start(self) -> Process:
        """The first process, in place of one that somebody has killed. Raises ProcessEnded."""
        with self._starting:
            if self._process is None or not self._process.alive:
                process = Process.start(EncoderProcess)
                process.ask(*(self._opening or ()))
                if process.answer(_TOKENIZER_SECONDS) is None:
                    raise ProcessEnded
                self._process = process
            return self._process

    def end(self) -> None:
        """Kill all processes, whatever they are doing."""
        with self._starting:
            if self._process is not None:
                self._process.end()
                self._process = None


def _asked(process: Process, text: str, add_special_tokens: bool, cancelled: Event) -> tuple[Any, str]:
    """What a process answers, which ends with this. Raises ProcessEnded, and ApiError once this is cancelled."""
    try:
        process.ask("encode", text, add_special_tokens)
        while (answer := process.answer(_LOOK_SECONDS)) is None:
            if cancelled.is_set():
                raise _gone()
        return answer
    finally:
        process.end()


def _gone() -> ApiError:
    return ApiError(499, "the client has closed the connection")
