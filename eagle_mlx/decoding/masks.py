"""Grammar masks along a round's drafts, computed here or asynchronously while the target reads the drafts."""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import takewhile
from time import monotonic

import mlx.core as mx

from eagle_mlx.request_state import RequestState
from eagle_mlx.sampling_params import AsyncGrammar, Grammar

PATIENCE = 0.05
"""Seconds that a batch waits for one row's masks: a pause that is barely visible in a stream."""

RequestMasks = tuple[list[mx.array], int]
"""A row's masks, each [V] bool, and how many draft tokens they can verify; -1 if they are late."""


def ask(request: RequestState, draft: Sequence[int]) -> None:
    """Ask an asynchronous grammar for masks, unless some are pending."""
    if request.finish_reason is None and request.asked is None and isinstance(request.grammar, AsyncGrammar):
        request.ask_grammar(_before_end(request, draft))


def collect(
    requests: Sequence[RequestState], drafts: Sequence[list[int]], logits: mx.array, patience: float
) -> list[RequestMasks]:
    """Return the masks of some requests; requests that were late before are not waited for.

    logits: what the masks apply to, which the device may still compute; patience: seconds.
    """
    if any(request.slow for request in requests):
        mx.eval(logits)
    until = monotonic() + patience
    vocab = logits.shape[-1]
    return [
        _found(request, draft, vocab, 0.0 if request.slow and patience < math.inf else max(0.0, until - monotonic()))
        for request, draft in zip(requests, drafts, strict=True)
    ]


def may_decode(requests: Sequence[RequestState], patience: float = PATIENCE) -> bool:
    """Return whether some row need not wait for masks. If all must, wait up to `patience` seconds for the first."""
    if any(request.finish_reason or request.asked is None for request in requests):
        return True
    for request in requests:
        assert isinstance(request.grammar, AsyncGrammar)
        try:
            if request.grammar.answer(patience) is not None:
                return True
        except Exception as e:
            request.fail_by_grammar(e)
            return True
        patience = 0.0
    return False


def _found(request: RequestState, draft: list[int], vocab: int, seconds: float) -> RequestMasks:
    if request.grammar is None or request.finish_reason:
        return [], len(draft)
    text = _before_end(request, draft)
    try:
        if not isinstance(request.grammar, AsyncGrammar):
            masks = walk(request.grammar, text)
            _check(masks, "mask()", vocab)
            return masks, len(draft)
        answer = request.grammar.answer(seconds)
        if answer is not None:
            _check(answer, "answer()", vocab)
    except Exception as e:
        request.fail_by_grammar(e)
        return [], len(draft)
    if answer is None:
        request.masks_are_late()
        return [], -1
    asked = request.masks_came(text)
    if asked == text:
        return answer, len(draft)
    same = sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(asked, text, strict=False)))
    return answer, min(same, len(answer) - 1)  # they belong to an earlier round's draft


def _check(masks: object, by: str, vocab: int) -> None:
    """Raise ValueError unless these are masks, at least one; with none, the row would be decoded without masks."""
    if not isinstance(masks, list) or not masks:
        raise ValueError(f"{by} returned {said(masks)}; return a list of masks, one per draft position")
    for mask in masks:
        if not isinstance(mask, mx.array) or mask.shape != (vocab,):
            raise ValueError(f"{by} returned {said(mask)} as a mask; return [{vocab}] bool, the tokens allowed next")


def said(value: object) -> str:
    """Describe a value for an error message."""
    if isinstance(value, mx.array):
        return f"{list(value.shape)} {str(value.dtype).removeprefix('mlx.core.')}"
    return f"{value!r:.80}"


def _before_end(request: RequestState, draft: Sequence[int]) -> list[int]:
    """Return the draft up to a stop token, which grammars do not get and after which nothing matters."""
    return list(takewhile(lambda token: token not in request.request.stop_ids, draft))


def walk(grammar: Grammar, draft: Sequence[int]) -> list[mx.array]:
    """Return the masks, each [V] bool, at the positions of a draft up to its first illegal token."""
    masks = [grammar.mask()]
    for token in draft:
        if not grammar.advance(token):
            break
        masks.append(grammar.mask())
    grammar.rollback(len(masks) - 1)
    return masks
