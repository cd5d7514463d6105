"""Changes to the target's logits that rows request: penalties, bias, logits processors and grammars.

Every position of a verify is treated as in plain decoding: with the text so far, including the draft tokens before it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from itertools import takewhile
from typing import cast

import mlx.core as mx
import numpy as np

from eagle_mlx.decoding.draft import Draft
from eagle_mlx.decoding.verify import Verdict
from eagle_mlx.request_state import RequestState
from eagle_mlx.sampling_params import Grammar


class Processors:
    """The processors of one batch, for its current order of rows."""

    def __init__(self, requests: Sequence[RequestState], vocab: int):
        penalized = [index for index, request in enumerate(requests) if request.params.penalizes]
        self.penalties = Penalties(requests, penalized, vocab) if penalized else None
        self.biased, self.bias = _dense_bias(requests, vocab)
        self._on_host = [i for i, x in enumerate(requests) if x.params.logits_processors or x.grammar is not None]
        self._requests = list(requests)
        self.on_device = self.penalties is not None or self.biased.size > 0
        """Whether any row has penalties or biases, which drafts follow too."""
        self._count = len(requests)

    @classmethod
    def of(cls, requests: Sequence[RequestState], vocab: int) -> Processors | None:
        """Return the batch's processors; None if no row requests any."""
        processors = cls(requests, vocab)
        return processors if processors._on_host or processors.on_device else None

    @property
    def on_host(self) -> list[int]:
        """Rows whose processors run on the host in the next round, and must read their drafts."""
        return [index for index in self._on_host if self._requests[index].needs_host]

    def apply(self, logits: mx.array, draft: Draft) -> tuple[mx.array, mx.array | None]:
        """Return the logits with every row's changes, [B, n+1, V] float32, and where callables turned numbers into NaN,
        [B, n+1] bool, None if no row has callables. logits: [B, n+1, V]."""
        if not (places := self.on_host):
            return self._on_device(logits, draft.tokens), None
        rows, drafts = [self._requests[place] for place in places], self._read(draft, logits, places)
        before = self._on_device(logits, draft.tokens)
        masks = [_masks(row, drafted, logits.shape[-1]) for row, drafted in zip(rows, drafts, strict=True)]
        logits = self._on(mx.array(places), before, lambda x: _on_host(x, rows, drafts, masks))
        if not any(row.params.logits_processors for row in rows):
            return logits, None
        return logits, mx.any(mx.isnan(logits) & ~mx.isnan(before), axis=-1)

    def change_draft(self, logits: mx.array, drafted: Sequence[mx.array], token_ids: mx.array | None) -> mx.array:
        """Return a proposer's logits with the rows' penalties and biases, [B, 1, Vd] float32. logits: [B, 1, Vd], after
        the draft tokens so far, each [B, 1] int32; token_ids: [Vd] int32, the target's ids, None if they are equal."""
        tokens = mx.concatenate(list(drafted), axis=1) if drafted else mx.zeros((self._count, 0), mx.int32)
        return self._on_device(logits, tokens, token_ids)

    def _on_device(self, logits: mx.array, drafts: mx.array, token_ids: mx.array | None = None) -> mx.array:
        """Apply penalties and biases to logits [B, p, V] at the last p of a draft's n+1 positions."""
        logits = logits.astype(mx.float32)
        if self.penalties is not None:
            penalties, tokens = self.penalties, drafts[self.penalties.rows]
            logits = self._on(penalties.rows, logits, lambda x: penalties.apply(x, tokens, token_ids))
        if self.biased.size:
            bias = self.bias if token_ids is None else self.bias[..., token_ids]
            logits = self._on(self.biased, logits, lambda x: x + bias)
        return logits

    def _read(self, draft: Draft, logits: mx.array, places: list[int]) -> list[list[int]]:
        """Return the drafts of some rows; the device runs the target's forward while the host works on them."""
        rows = mx.concatenate([draft.lengths[:, None], draft.tokens], axis=1)[mx.array(places)]
        mx.async_eval(rows)
        mx.async_eval(logits)
        return [tokens[:length] for length, *tokens in cast(list[list[int]], rows.tolist())]

    def commit(self, verdict: Verdict) -> None:
        if self.penalties is not None:
            rows = self.penalties.rows
            self.penalties.add(verdict.tokens[rows], verdict.accepted[rows])

    def save(self) -> mx.array | None:
        return None if self.penalties is None else self.penalties.counts

    def restore(self, saved: mx.array | None) -> None:
        if self.penalties is not None and saved is not None:
            self.penalties.counts = saved

    def _on(self, rows: mx.array, logits: mx.array, change: Callable[[mx.array], mx.array]) -> mx.array:
        if rows.size == self._count:
            return change(logits)
        out = logits + 0  # a copy to write to
        out[rows] = change(logits[rows])
        return out


class Penalties:
    """Repetition, presence and frequency penalties of the rows that have any, from counts on the device."""

    def __init__(self, requests: Sequence[RequestState], places: list[int], vocab: int):
        rows = [requests[index] for index in places]
        strengths = [
            [row.params.repetition_penalty, row.params.presence_penalty, row.params.frequency_penalty] for row in rows
        ]
        prompts = [np.bincount(row.prompt, minlength=vocab) > 0 for row in rows]
        counts = [np.bincount(row.tokens, minlength=vocab).astype(np.int32) for row in rows]
        self.rows = mx.array(places, mx.int32)  # [M]
        self.strengths = mx.array(strengths, mx.float32).T[:, :, None, None]  # [3, M, 1, 1]
        self.prompts = mx.array(np.stack(prompts))  # [M, V] bool, the tokens of the prompts
        self.counts = mx.array(np.stack(counts))  # [M, V] int32, the count of each token in the generated text

    def apply(self, logits: mx.array, drafts: mx.array, token_ids: mx.array | None = None) -> mx.array:
        """Apply the penalties to logits [M, p, V] float32 at the last p of the n+1 positions of drafts [M, n] int32.

        token_ids: [V] int32, if V is not the target's vocabulary. Repetition: Keskar et al. 2019 (CTRL), equation 2, as
        in vLLM; presence and frequency: OpenAI's API.
        """
        counts, prompts = self.counts[:, None], self.prompts[:, None]
        if token_ids is not None:
            counts, prompts = counts[..., token_ids], prompts[..., token_ids]
        if drafts.shape[1]:
            ids = mx.arange(counts.shape[-1]) if token_ids is None else token_ids
            drafted = mx.cumsum((drafts[..., None] == ids).astype(mx.int32), axis=1)
            counts = mx.concatenate([counts, counts + drafted], axis=1)[:, -logits.shape[1] :]
        written, (repetition, presence, frequency) = counts > 0, self.strengths
        scaled = mx.where(logits > 0, logits / repetition, logits * repetition)
        logits = mx.where(written | prompts, scaled, logits)
        return logits - frequency * counts - presence * written

    def add(self, tokens: mx.array, accepted: mx.array) -> None:
        """Count the emitted tokens[m, : accepted[m] + 1]. tokens: [M, n+1] int32; accepted: [M] int32."""
        emitted = mx.arange(tokens.shape[1]) <= accepted[:, None]
        self.counts = self.counts.at[mx.arange(tokens.shape[0])[:, None], tokens].add(emitted.astype(mx.int32))


def _dense_bias(requests: Sequence[RequestState], vocab: int) -> tuple[mx.array, mx.array]:
    """Return the indices [M] int32 of the rows with a bias, and their biases [M, 1, V] float32."""
    places = [index for index, request in enumerate(requests) if request.params.logit_bias]
    bias = np.zeros((len(places), 1, vocab), np.float32)
    for index, place in enumerate(places):
        bias[index, 0, list(requests[place].params.logit_bias)] = list(requests[place].params.logit_bias.values())
    return mx.array(places, mx.int32), mx.array(bias)


def _on_host(
    logits: mx.array, requests: Sequence[RequestState], drafts: Sequence[list[int]], masks: Sequence[list[mx.array]]
) -> mx.array:
    """Apply logits processors and grammars row by row. logits: [M, n+1, V] float32; drafts: at most n tokens each."""
    out = []
    for x, request, draft, allowed in zip(logits, requests, drafts, masks, strict=True):
        if request.params.logits_processors:
            x = _called(x, request, draft)
        if allowed:
            allowed = [*allowed, *[allowed[-1]] * (len(x) - len(allowed))]
            x = mx.where(mx.stack(allowed), x, -math.inf)
        out.append(x)
    return mx.stack(out)


def _called(logits: mx.array, request: RequestState, draft: list[int]) -> mx.array:
    """Apply a row's logits processors at every position of its draft. logits: [n+1, V] float32."""
    parts, text = [], request.text
    try:
        for position in range(len(draft) + 1):
            part = logits[position : position + 1]
            for processor in request.params.logits_processors:
                part = processor(text, part)
                if not isinstance(part, mx.array) or part.shape != (1, logits.shape[-1]):
                    name = getattr(processor, "__name__", repr(processor))
                    raise ValueError(f"{name} returned {said(part)}; return [1, {logits.shape[-1]}]")
            parts.append(part.astype(mx.float32))
            text += draft[position : position + 1]
        return mx.concatenate([*parts, logits[len(parts) :]])
    except Exception as e:  # a request's own processor may raise anything, which must not affect other rows
        request.fail(f"a logits processor failed: {e}")
        return logits


def _masks(request: RequestState, draft: Sequence[int], vocab: int) -> list[mx.array]:
    """Return a grammar's masks along a row's draft; none without a grammar, or if it fails and ends the request."""
    if request.grammar is None or request.finish_reason:
        return []
    # Grammars do not get a stop token, after which nothing matters.
    text = takewhile(lambda token: token not in request.request.stop_ids, draft)
    try:
        masks = walk(request.grammar, text)
        for mask in masks:
            if not isinstance(mask, mx.array) or mask.shape != (vocab,):
                raise ValueError(f"mask() returned {said(mask)} as a mask; return [{vocab}] bool, True if allowed")
        return masks
    except Exception as e:  # a grammar may raise anything, and other rows must go on
        request.fail_by_grammar(e)
        return []


def said(value: object) -> str:
    if isinstance(value, mx.array):
        return f"{list(value.shape)} {str(value.dtype).removeprefix('mlx.core.')}"
    return " ".join(repr(value).split())[:80]


def walk(grammar: Grammar, draft: Iterable[int]) -> list[mx.array]:
    """Return the masks, each [V] bool, at the positions of a draft up to its first illegal token. If `mask` raises
    after a draft token, nothing is allowed there: it raises again if the text takes that token."""
    masks, taken = [grammar.mask()], 0
    for token in draft:
        if not grammar.advance(token):
            break
        taken += 1
        try:
            masks.append(grammar.mask())
        except Exception:
            masks.append(mx.zeros_like(masks[0]))
            break
    grammar.rollback(taken)
    return masks
