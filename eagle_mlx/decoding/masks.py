"""The masks of grammars along the drafts of a round: found here, or elsewhere while the target reads the drafts."""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import takewhile
from time import monotonic

import mlx.core as mx

from eagle_mlx.request import Row
from eagle_mlx.sampling_params import AsyncGrammar, Grammar

PATIENCE = 0.05
"""Seconds that a batch waits for one row's masks: a pause that people hardly see in a stream."""

RowMasks = tuple[list[mx.array], int]
"""A row's masks, each [V] bool, and how many of its draft tokens can be judged by them, -1 where they are late."""


def ask(row: Row, draft: Sequence[int]) -> None:
    """Begin to find masks, where that is done elsewhere and none are on their way."""
    if row.finish_reason is None and row.asked is None and isinstance(row.grammar, AsyncGrammar):
        row.asked = _before_end(row, draft)
        try:
            row.grammar.ask(row.asked)
        except Exception as e:  # whatever a grammar raises is no other row's trouble
            row.fail_by_grammar(e)


def collect(rows: Sequence[Row], drafts: Sequence[list[int]], logits: mx.array, patience: float) -> list[RowMasks]:
    """The masks of some rows, for which those that were late before are not waited for again.

    logits: what the masks are for, which the device may be working on; patience: seconds.
    """
    if any(row.slow for row in rows):
        mx.eval(logits)
    until = monotonic() + patience
    return [
        _found(row, draft, 0.0 if row.slow and patience < math.inf else max(0.0, until - monotonic()))
        for row, draft in zip(rows, drafts, strict=True)
    ]


def may_decode(rows: Sequence[Row]) -> bool:
    """Whether some row does not wait for masks. Where all do, the first's are waited for a while."""
    if any(row.finish_reason or row.asked is None for row in rows):
        return True
    patience = PATIENCE
    for row in rows:
        assert isinstance(row.grammar, AsyncGrammar)
        try:
            if row.grammar.answer(patience) is not None:
                return True
        except Exception as e:
            row.fail_by_grammar(e)
            return True
        patience = 0.0
    return False


def _found(row: Row, draft: list[int], seconds: float) -> RowMasks:
    if row.grammar is None or row.finish_reason:
        return [], len(draft)
    text = _before_end(row, draft)
    try:
        if not isinstance(row.grammar, AsyncGrammar):
            return walk(row.grammar, text), len(draft)
        masks = row.grammar.answer(seconds)
    except Exception as e:
        row.fail_by_grammar(e)
        return [], len(draft)
    if masks is None:
        row.slow = True
        return [], -1
    asked, row.asked = row.asked or [], None
    if asked == text:
        row.slow = False
        return masks, len(draft)
    same = sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(asked, text, strict=False)))
    return masks, min(same, len(masks) - 1)  # they are of the draft of an earlier round


def _before_end(row: Row, draft: Sequence[int]) -> list[int]:
    """The draft up to a token that ends the text, which no grammar is given and behind which nothing counts."""
    return list(takewhile(lambda token: token not in row.stop_ids, draft))


def walk(grammar: Grammar, draft: Sequence[int]) -> list[mx.array]:
    """The masks, each [V] bool, at the positions of a draft up to its first illegal token, behind which none counts."""
    masks = [grammar.mask()]
    for token in draft:
        if not grammar.advance(token):
            break
        masks.append(grammar.mask())
    grammar.rollback(len(masks) - 1)
    return masks
