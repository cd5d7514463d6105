"""The target's hidden states of conversations, one by one or in shards."""

from __future__ import annotations

import hashlib
import json
import sys
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import chain, islice
from pathlib import Path
from typing import NoReturn

import mlx.core as mx
import numpy as np
from tqdm import tqdm

from eagle_mlx.blas import one_blas_thread
from eagle_mlx.cpu import default_streams, make_streams
from eagle_mlx.engine.batch import Batch
from eagle_mlx.engine.collector import Collector
from eagle_mlx.engine.prefill import Prefill
from eagle_mlx.errors import TargetError
from eagle_mlx.hidden_states import Bits, Example, HiddenStates, in_16_bits, read_states, widened
from eagle_mlx.plan import PREFILL_CHUNK
from eagle_mlx.progress import progress_bar
from eagle_mlx.request import make_request
from eagle_mlx.request_state import RequestState
from eagle_mlx.sampling_params import SamplingParams
from eagle_mlx.shards import ShardMeta, ShardWriter
from eagle_mlx.target import Target, fingerprint
from eagle_mlx.text import template_args
from eagle_mlx.vision.spans import ImagePrompt, ImageSpan

from .rendering import Sample

TOKENS_PER_SHARD = 4096
WINDOW = 512
"""Number of conversations that are sorted by length at a time."""


def capture(
    target: Target,
    aux_layers: Sequence[int],
    samples: Iterable[Sample],
    batch_tokens: int = 2048,
    progress: bool = False,
) -> Iterator[Example]:
    """Yield each conversation with the outputs, bfloat16, of `aux_layers` and the last layer (before the final norm).

    Conversations of similar length form a right-padded batch of up to `batch_tokens` tokens, so the order is not kept.
    """
    total = sum(len(sample[0]) for sample in samples) if isinstance(samples, Sequence) else None
    with _bar(total, progress) as bar:
        yield from capture_batches(target, aux_layers, make_batches(samples, batch_tokens), bar)


def capture_batches(
    target: Target, aux_layers: Sequence[int], batches: Iterable[list[Sample]], bar: tqdm[NoReturn]
) -> Iterator[Example]:
    """Capture batches in order, each independent of the others; `bar` counts tokens. Raises TargetError for NaN."""
    streams = make_streams(default_streams())
    remaining = iter(batches)
    while group := list(islice(remaining, len(streams))):
        hidden = _hidden_states(target, aux_layers, group, streams)
        for sample, states in zip(chain.from_iterable(group), chain.from_iterable(hidden), strict=True):
            count = len(sample[0])
            states = states[:count]
            if not np.isfinite(widened(states)).all():
                raise TargetError(
                    f"{target.name} gives hidden states that are NaN or infinite for a conversation of {count:,} "
                    "tokens; its weights are damaged, or its dtype is too narrow: load it in float32"
                )
            bar.update(count)
            yield replace(Example.of(*sample[:3]), states=HiddenStates.split(aux_layers, states))


def make_batches(samples: Iterable[Sample], batch_tokens: int) -> Iterator[list[Sample]]:
    """Yield batches of similar length. Each has at most `batch_tokens` tokens with padding, or one conversation.

    A conversation with images is alone.
    """
    remaining = iter(samples)
    while window := sorted(islice(remaining, WINDOW), key=lambda s: len(s[0])):
        batch: list[Sample] = []
        for sample in window:
            is_full = (len(batch) + 1) * len(sample[0]) > batch_tokens
            if batch and (is_full or _images(sample) or _images(batch[-1])):
                yield batch
                batch = []
            batch.append(sample)
        yield batch


def _hidden_states(
    target: Target, aux_layers: Sequence[int], group: Sequence[list[Sample]], streams: Sequence[mx.Stream]
) -> list[Bits]:
    """Return 16-bit hidden states, [B, L, (n + 1) * H], for each batch. Each batch runs on its own stream."""
    states = []
    for batch, stream in zip(group, streams, strict=False):
        padded = np.zeros((len(batch), max(len(sample[0]) for sample in batch)), np.int32)
        for row, sample in enumerate(batch):
            padded[row, : len(sample[0])] = sample[0]
        if images := _images(batch[0]):
            states.append(mx.array(_states_of_prompt(target, aux_layers, batch[0][0], images)[None]))
            continue
        with mx.stream(stream):
            states.append(in_16_bits(read_states(target, mx.array(padded), aux_layers)))
    with one_blas_thread(len(streams) > 1):
        mx.eval(states)
    copies = [np.array(state) for state in states]
    del states
    mx.clear_cache()  # the next batch has another size
    return copies


def _images(sample: Sample) -> Sequence[ImageSpan]:
    """Return a conversation's images, none if it is a plain tuple."""
    return sample.images if isinstance(sample, Sample) else ()


def _states_of_prompt(
    target: Target, aux_layers: Sequence[int], tokens: Sequence[int], images: Sequence[ImageSpan]
) -> Bits:
    """Return 16-bit hidden states [L, (n + 1) * H] of a conversation with images, which is read as the engine reads a
    prompt: in chunks, without the last token, of which the states are 0."""
    spans = tuple(ImageSpan(span.start, replace(span.image)) for span in images)  # copies: features end with them
    prompt = ImagePrompt(list(tokens[:-1]), spans)
    request = RequestState(make_request(target, prompt, SamplingParams(max_tokens=1)), tokens=tokens[-1:])
    collector = Collector(aux_layers, target.num_layers - 1, sys.maxsize, context=len(tokens), most=len(tokens))
    prefill = Prefill(Batch(target, None, [request], collector=collector))
    while prefill.left:
        prefill.step(PREFILL_CHUNK)
    collector.ended(request)
    [example] = collector.take()
    assert example.states is not None
    return example.states.whole


class ShardCapture:
    """A capture into shards of whole batches, in a folder that appears once it is complete. The same call continues it.

    Order and contents depend only on the samples' lengths and the sizes given here, so any shard can be captured alone.
    """

    def __init__(
        self,
        target: Target,
        aux_layers: Sequence[int],
        samples: Sequence[Sample],
        bits: int = 16,
        batch_tokens: int = 2048,
        tokens_per_shard: int = TOKENS_PER_SHARD,
    ):
        self.target = target
        self.aux_layers = tuple(aux_layers)
        self.meta = shard_meta(target, aux_layers, bits)
        self._shards: list[list[list[Sample]]] = []
        for batch in make_batches(samples, batch_tokens):
            if not self._shards or self.tokens([len(self) - 1]) >= tokens_per_shard:
                self._shards.append([])
            self._shards[-1].append(batch)
        self.made_from: Mapping[str, str] = {
            "target": f"{target.num_layers} layers of {target.hidden_size} ({fingerprint(target)})",
            "conversations": _conversations(samples),
            "layers": ", ".join(map(str, (*self.aux_layers, f"the last of {target.num_layers}"))),
            "bits": str(bits),
            "order": f"by length in windows of {WINDOW}, {batch_tokens} tokens a batch, {tokens_per_shard} a shard of "
            "whole batches",
        }

    def open(self, folder: str | Path, overwrite: bool = False, resume: bool = False) -> ShardWriter:
        """Return a writer, which lists complete shards. With `resume`, a finished folder may have damaged shards."""
        return ShardWriter(folder, self.meta, self.made_from, overwrite, resume)

    def __len__(self) -> int:
        return len(self._shards)

    def missing(self, shards: ShardWriter) -> list[int]:
        return [index for index in range(len(self)) if index not in shards.files]

    def tokens(self, shards: Collection[int]) -> int:
        return sum(len(sample[0]) for index in shards for batch in self._shards[index] for sample in batch)

    def write(self, folder: str | Path, progress: bool = False, resume: bool = False) -> None:
        """Capture into a folder. Raises OutputError if it exists or cannot be written."""
        with self.open(folder, resume=resume) as shards:
            self.run(shards, progress)

    def run(self, shards: ShardWriter, progress: bool = False) -> None:
        """Capture the missing shards. Raises OutputError if writing fails; shards already written are kept."""
        missing, total = self.missing(shards), self.tokens(range(len(self)))
        if not missing:
            return
        batches = chain.from_iterable(self._shards[index] for index in missing)
        with _bar(total, progress, total - self.tokens(missing)) as bar:
            captured = capture_batches(self.target, self.aux_layers, batches, bar)
            for index in missing:
                shards.write(index, list(islice(captured, sum(map(len, self._shards[index])))))


def _bar(total: int | None, progress: bool, done: int = 0) -> tqdm[NoReturn]:
    return progress_bar(total=total, initial=done, desc="capture", unit="token", unit_scale=True, disable=not progress)


def shard_meta(target: Target, aux_layers: Sequence[int], bits: int = 16) -> ShardMeta:
    adapter, template = "" if target.adapter is None else target.adapter.digest, ""
    if (tokenizer := target.tokenizer) is not None:
        rendering = json.dumps([str(tokenizer.chat_template), dict(template_args(tokenizer))], sort_keys=True)
        template = hashlib.blake2s(rendering.encode(errors="replace")).hexdigest()[:16]
    return ShardMeta(target.name, target.hidden_size, target.vocab_size, tuple(aux_layers), bits, adapter, template)


def _conversations(samples: Sequence[Sample]) -> str:
    digest, count = hashlib.sha256(), 0
    for sample in samples:
        tokens, mask, *key = sample[:3]
        digest.update(np.array([len(tokens), *key], "<u8").tobytes())
        digest.update(np.array(tokens, "<i4").tobytes() + np.array(mask, np.uint8).tobytes())
        digest.update(b"".join(span.image.digest for span in _images(sample)))
        count += len(tokens)
    return f"{len(samples):,} of {count:,} tokens ({digest.hexdigest()[:16]})"
