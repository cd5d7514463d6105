"""The target's hidden states of conversations, computed or kept from making them, one by one or in shards."""

from __future__ import annotations

import hashlib
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from itertools import chain, islice
from pathlib import Path
from typing import Any, NamedTuple, NoReturn

import mlx.core as mx
import numpy as np
from safetensors import SafetensorError, safe_open
from tqdm import tqdm

from eagle_mlx.blas import one_blas_thread
from eagle_mlx.cpu import default_streams, make_streams
from eagle_mlx.errors import OutputError, TargetError
from eagle_mlx.files import check_free, locked, swap, write_whole
from eagle_mlx.hidden_states import Bits, Example, HiddenStates, in_16_bits, read_states, widened
from eagle_mlx.memory import FreedBuffers
from eagle_mlx.progress import progress_bar
from eagle_mlx.shards import (
    MANIFEST,
    UNFINISHED,
    Manifest,
    ShardFile,
    ShardMeta,
    ShardReader,
    ShardWriter,
    decode,
    encode,
    shard_name,
    unfinished_folder,
)
from eagle_mlx.target import Target, fingerprint

from .rendering import Sample

TokensAndMask = tuple[Sequence[int], Sequence[int]] | Sample
"""Tokens and loss mask of one conversation, and the key of its prompt if it is known."""

TOKENS_PER_SHARD = 4096
WINDOW = 512
"""Number of conversations that are sorted by length at a time."""


def capture(
    target: Target,
    aux_layers: Sequence[int],
    samples: Iterable[TokensAndMask],
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
    target: Target, aux_layers: Sequence[int], batches: Iterable[list[TokensAndMask]], bar: tqdm[NoReturn]
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
            yield replace(Example.of(*sample), states=HiddenStates.split(aux_layers, states))


def make_batches(samples: Iterable[TokensAndMask], batch_tokens: int) -> Iterator[list[TokensAndMask]]:
    """Yield batches of similar length. Each has at most `batch_tokens` tokens with padding, or one conversation."""
    remaining = iter(samples)
    while window := sorted(islice(remaining, WINDOW), key=lambda s: len(s[0])):
        batch: list[TokensAndMask] = []
        for sample in window:
            if batch and (len(batch) + 1) * len(sample[0]) > batch_tokens:
                yield batch
                batch = []
            batch.append(sample)
        yield batch


def _hidden_states(
    target: Target, aux_layers: Sequence[int], group: Sequence[list[TokensAndMask]], streams: Sequence[mx.Stream]
) -> list[Bits]:
    """Return 16-bit hidden states, [B, L, (n + 1) * H], for each batch. Each batch runs on its own stream."""
    states = []
    for batch, stream in zip(group, streams, strict=False):
        padded = np.zeros((len(batch), max(len(sample[0]) for sample in batch)), np.int32)
        for row, sample in enumerate(batch):
            padded[row, : len(sample[0])] = sample[0]
        with mx.stream(stream):
            states.append(in_16_bits(read_states(target, mx.array(padded), aux_layers)))
    with one_blas_thread(len(streams) > 1):
        mx.eval(states)
    copies = [np.array(state) for state in states]
    del states
    FreedBuffers().after_chunk()
    return copies


class ShardCapture:
    """A capture into shards of whole batches, in a folder that appears once it is complete. The same call continues it.

    Order and contents depend only on the samples' lengths and the sizes given here, so any shard can be captured alone.
    """

    def __init__(
        self,
        target: Target,
        aux_layers: Sequence[int],
        samples: Sequence[TokensAndMask],
        bits: int = 16,
        batch_tokens: int = 2048,
        tokens_per_shard: int = TOKENS_PER_SHARD,
    ):
        self.target = target
        self.aux_layers = tuple(aux_layers)
        self.meta = shard_meta(target, aux_layers, bits)
        self._shards: list[list[list[TokensAndMask]]] = []
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


def capture_to_shards(
    target: Target,
    aux_layers: Sequence[int],
    samples: Sequence[TokensAndMask],
    folder: str | Path,
    progress: bool = False,
    bits: int = 16,
    resume: bool = False,
) -> None:
    """Capture into a folder of shards, as ShardCapture does. Raises OutputError if it exists or cannot be written."""
    plan = ShardCapture(target, aux_layers, samples, bits)
    with plan.open(folder, resume=resume) as shards:
        plan.run(shards, progress)


def _bar(total: int | None, progress: bool, done: int = 0) -> tqdm[NoReturn]:
    return progress_bar(total=total, initial=done, desc="capture", unit="token", unit_scale=True, disable=not progress)


def shard_meta(target: Target, aux_layers: Sequence[int], bits: int = 16) -> ShardMeta:
    adapter = "" if target.adapter is None else target.adapter.digest
    return ShardMeta(target.name, target.hidden_size, target.vocab_size, tuple(aux_layers), bits, adapter)


def _conversations(samples: Sequence[TokensAndMask]) -> str:
    digest, count = hashlib.sha256(), 0
    for sample in samples:
        tokens, mask, *key = sample
        digest.update(np.array([len(tokens), *key], "<u8").tobytes())
        digest.update(np.array(tokens, "<i4").tobytes() + np.array(mask, np.uint8).tobytes())
        count += len(tokens)
    return f"{len(samples):,} of {count:,} tokens ({digest.hexdigest()[:16]})"


class ShardPlace(NamedTuple):
    folder: Path
    meta: ShardMeta
    overwrite: bool = False


class MadeShards:
    """The hidden states of conversations while they are made: a shard for each, in an unfinished folder."""

    def __init__(self, place: ShardPlace, made_from: Mapping[str, str]):
        self._place, self._made_from = place, made_from
        self._part = unfinished_folder(place.folder)

    def holds(self, number: int) -> bool:
        try:
            with safe_open(str(self._file(number)), "numpy"):
                return True
        except (OSError, SafetensorError):
            return False

    def keep(self, number: int, example: Example) -> None:
        """Write an example, on disk when this returns. Raises OutputError if that fails."""
        path = self._file(number)
        try:
            write_whole(path, encode([example], self._place.meta))
        except OSError as e:
            raise OutputError(
                f"{path} could not be written: {e.strerror or e}; finished rows are kept, so make room and run "
                "the same command again"
            ) from e

    def finish(self, numbers: Sequence[int]) -> None:
        """Turn the examples with these numbers, in this order, into a folder of shards, and delete the others."""
        meta, files = self._place.meta, {number: self._file(number) for number in numbers}
        entries = [ShardFile.of(n, file.read_bytes(), [decode(file, slice(None), meta)]) for n, file in files.items()]
        for path in set(self._part.iterdir()).difference(files.values()):
            path.unlink()
        write_whole(self._part / MANIFEST, Manifest(meta, tuple(entries), self._made_from).to_json())
        swap(self._part, self._place.folder.absolute())

    def _file(self, number: int) -> Path:
        return self._part / shard_name(number)


@contextmanager
def open_shards(
    place: ShardPlace, settings: Mapping[str, Any], wanted: Mapping[str, int]
) -> Iterator[MadeShards | None]:
    """Yield the shards, or None if they are complete and only the file of conversations is not.

    Raises OutputError if the folder exists, or if an interrupted capture for it is of something else.
    """
    layers = ", ".join(map(str, place.meta.aux_layers))
    made_from = {name: str(value) for name, value in settings.items()}
    made_from |= {"wanted": str(wanted), "layers": layers, "bits": str(place.meta.bits)}
    if (place.folder / MANIFEST).exists() and ShardReader(place.folder).manifest.made_from == made_from:
        yield None
        return
    check_free(place.folder, place.overwrite)
    part = unfinished_folder(place.folder)
    part.mkdir(parents=True, exist_ok=True)
    with locked(part):
        note = part / UNFINISHED
        if note.exists() and (wrong := Manifest.read(note).differences(made_from)):
            if not place.overwrite:
                raise OutputError(
                    f"{part} has a capture of something else ({wrong}); use the original options, or replace it with "
                    "--overwrite"
                )
            for path in part.iterdir():
                path.unlink()
        write_whole(note, Manifest(place.meta, made_from=made_from).to_json())
        yield MadeShards(place, made_from)
