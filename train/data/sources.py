"""Load training data, evaluation prompts and the draft vocabulary from the data pipelines."""

from __future__ import annotations

import sys
from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import islice, zip_longest
from typing import Any, Literal

import mlx.core as mx
import numpy as np
from mlx_lm.tokenizer_utils import TokenizerWrapper
from numpy.typing import NDArray

from eagle_mlx.data_pipelines import (
    Conversation,
    DataConfig,
    ReadReport,
    Rendered,
    capture,
    capture_to_shards,
    prompt_tokens,
    read_conversations,
    render_all,
    shard_meta,
)
from eagle_mlx.errors import ConfigError, DataError, OutputError, ShardError, TargetError
from eagle_mlx.heads.base import DraftHead
from eagle_mlx.hidden_states import Example, read_states
from eagle_mlx.shards import ShardReader
from eagle_mlx.target import Target

from ..config import MOST_PROMPTS, TrainConfig
from ..kinds import aux_layers_of, resolved
from .batches import Rows
from .examples import Examples, InMemory, Joined, OnDisk
from .storage import IN_WORDS, Place, cache_folder, choose_states, data_config, sources_of


@dataclass(frozen=True)
class TrainData:
    samples: Examples
    aux_layers: tuple[int, ...]
    """Target layers in the samples' features, without the last layer."""
    kept: NDArray[np.int64] | None
    """[Vd] the draft vocabulary's ids in the target, ascending; None for all."""
    report: dict[str, Any]
    place: Place = "memory"
    """Where hidden states are kept. A resumed run must use the same place."""


def training_data(
    target: Target, config: TrainConfig, progress: bool = False, head: DraftHead | None = None, reserve: int = 0
) -> TrainData:
    """Load shards if given, else conversations, with captured hidden states if there is room for them.

    A `head` to continue from decides which layers to capture and the draft vocabulary. `reserve` is the additional
    memory that training needs, in bytes. Raises DataError, ShardError, OutputError or ConfigError if data cannot be
    used or stored.
    """
    config = resolved(config)
    if config.data.shards:
        return _from_shards(target, config, head)
    rendered, left_out = _render(target, config, progress)
    aux_layers = aux_layers_of(target, config, head)
    kept, vocabulary = draft_vocabulary(target, config, count_tokens(rendered, target.vocab_size), head)
    tokens = sum(len(one.tokens) for one in rendered)
    choice = choose_states(config, tokens, shard_meta(target, aux_layers, config.data.cache_bits), reserve)
    if progress:
        print(f"states: {choice.text}", file=sys.stderr)
    report = {
        "conversations": len(rendered),
        "left_out": left_out,
        "tokens": tokens,
        "loss_tokens": sum(sum(one.loss_mask) for one in rendered),
        "states": f"shards {cache_folder(config)}" if choice.place == "disk" else IN_WORDS[choice.place],
        **vocabulary,
    }
    samples = _samples(target, config, choice.place, aux_layers, rendered, progress)
    return TrainData(samples, aux_layers, kept, report, choice.place)


def _samples(
    target: Target,
    config: TrainConfig,
    place: Place,
    aux_layers: tuple[int, ...],
    rendered: list[Rendered],
    progress: bool,
) -> Examples:
    """Return the conversations, with hidden states if they are captured in advance."""
    if place == "online":
        return InMemory([Example.of(*one) for one in rendered])
    if place == "memory":
        return InMemory(list(capture(target, aux_layers, rendered, progress=progress)))
    folder = cache_folder(config)
    try:
        capture_to_shards(
            target, aux_layers, rendered, folder, progress=progress, bits=config.data.cache_bits, resume=True
        )
    except (ShardError, OutputError) as e:
        raise type(e)(f"{e}. Remove this cache, or choose another place with --cache-dir") from e
    return OnDisk(ShardReader(folder), None if aux_layers else ())


def heldout_prompts(target: Target, config: TrainConfig) -> list[list[int]]:
    """Return prompts to measure acceptance: held-out conversations up to the last answer, or beginnings of texts.

    They come from all sources in turn, or from the one in `eval_data`, which is used entirely if it is not trained on.
    Raises DataError if there are none.
    """
    learned, named = data_config(config), config.evaluation.data
    sources = (learned.sources[0] if config.prompts_are_heldout else named,) if named else learned.sources
    in_turn = zip_longest(*(_prompts_of(target, config, learned, source) for source in sources))
    found = (prompt for prompts in in_turn for prompt in prompts if prompt is not None)
    prompts = list(islice(found, config.evaluation.prompts or MOST_PROMPTS))
    if not prompts:
        raise DataError(
            f"{', '.join(sources)}: no held-out conversations to measure acceptance (one in 25 is held out); choose "
            "other prompts with --eval-data"
        )
    return prompts


def _prompts_of(target: Target, config: TrainConfig, learned: DataConfig, source: str) -> Iterator[list[int]]:
    wanted = learned.alone(source)
    [spec] = wanted.sources
    in_part = spec.startswith("builtin:") or spec in [source.spec for source in learned.parsed]
    split: Literal["heldout", "all"] = "heldout" if in_part else "all"
    for conversation in read_conversations(wanted, split, target.tokenizer):
        prompt = _prompt(target, conversation, config.evaluation.tokens)
        if prompt is not None:
            yield prompt


def _render(target: Target, config: TrainConfig, progress: bool) -> tuple[list[Rendered], int]:
    """Render the conversations and count those left out; with `progress`, print what the template drops."""
    if target.tokenizer is None:
        raise TargetError("the target has no tokenizer, so it cannot read conversations; train from shards instead")
    length = min(config.data.max_length, target.context_length)
    left_out = ReadReport()
    found = read_conversations(data_config(config), "train", target.tokenizer, left_out)
    rendered, report = render_all(target.tokenizer, found, length, config.data.filters.skip_bad)
    notes = report.notes(target.name)
    if not rendered:
        raise DataError(
            f"no usable conversations in {', '.join(sources_of(config))}; check the source, or raise --max-length"
            + "".join(f"\n  {note}" for note in notes)
        )
    for note in notes if progress else ():
        print(note, file=sys.stderr)
    return rendered, left_out.left_out + report.unusable + report.empty


def _from_shards(target: Target, config: TrainConfig, head: DraftHead | None) -> TrainData:
    readers = [ShardReader(folder) for folder in config.data.shards]
    for reader in readers:
        meta = reader.meta
        if (meta.hidden_size, meta.vocab_size) != (target.hidden_size, target.vocab_size):
            raise ShardError(
                f"{reader.folder} was captured from {meta.target or 'a target'} with hidden size {meta.hidden_size} "
                f"and vocabulary {meta.vocab_size}, but the target has {target.hidden_size} and {target.vocab_size}; "
                "capture again with this target"
            )
        _check_adapter(target, config, reader)
    aux_layers = aux_layers_of(target, config, head)
    if head is None and aux_layers:
        aux_layers = config.head.aux_layers or readers[0].meta.aux_layers
    for reader in readers:
        _check_layers(target, reader, aux_layers)
    parts = [OnDisk(reader, aux_layers, target.num_layers - 1) for reader in readers]
    return data_on_disk(target, config, parts, aux_layers, head)


def data_on_disk(
    target: Target, config: TrainConfig, parts: Sequence[OnDisk], aux_layers: tuple[int, ...], head: DraftHead | None
) -> TrainData:
    """Return samples on disk, with the draft vocabulary of `head`, or of a new head."""
    counts = sum((part.count_tokens(target.vocab_size) for part in parts), np.zeros(target.vocab_size, np.int64))
    samples = parts[0] if len(parts) == 1 else Joined(parts)
    kept, vocabulary = draft_vocabulary(target, config, counts, head)
    report = {
        "conversations": len(samples.lengths),
        "tokens": sum(samples.lengths),
        "loss_tokens": int(counts.sum()),
        "states": f"shards {', '.join(str(part.folder) for part in parts)}",
        **vocabulary,
    }
    return TrainData(samples, aux_layers, kept, report, "disk")


def _check_adapter(target: Target, config: TrainConfig, reader: ShardReader) -> None:
    """Raise ShardError if shards and target have different adapters."""
    captured = reader.meta.adapter
    now = "" if target.adapter is None else target.adapter.digest
    if captured == now:
        return
    had = f"with the adapters {captured}" if captured else "without adapters"
    has = f"has those of {config.loading.adapter_path} ({now})" if now else "has none"
    raise ShardError(
        f"{reader.folder} was captured {had}, but the target {has}; "
        + ("give them with --adapter-path" if captured else "leave --adapter-path out")
        + ", or capture again with this target"
    )


def _check_layers(target: Target, reader: ShardReader, aux_layers: tuple[int, ...]) -> None:
    """Raise ShardError if a layer is missing in the shards."""
    held = (*reader.meta.aux_layers, target.num_layers - 1)
    missing = [layer for layer in aux_layers if layer not in held]
    if missing:
        raise ShardError(
            f"{reader.folder} has the layers {', '.join(map(str, held))}, but the head reads "
            f"{', '.join(map(str, aux_layers))}; choose others with --aux-layers, or capture again with --aux-layers "
            f"{','.join(map(str, aux_layers))}"
        )


def _prompt(target: Target, conversation: Conversation, room: int) -> list[int] | None:
    """Return the prompt's tokens, or None if there are none or `room` more would not fit in the context."""
    tokenizer = target.tokenizer
    if tokenizer is None:
        raise TargetError("the target has no tokenizer, so it cannot decode held-out prompts")
    if conversation.text is not None:
        tokens = list(tokenizer.encode(conversation.text))
        tokens = tokens[: min(64, len(tokens) // 2)]
    else:
        asked = any(message.role != "assistant" for message in conversation.messages)
        tokens = prompt_tokens(tokenizer, conversation) if asked else []
    return tokens if tokens and len(tokens) + room <= target.context_length else None


def capture_rows(target: Target, aux_layers: Sequence[int], rows: Rows) -> mx.array:
    """Compute the hidden states [B, L, (n + 1) * H] of packed rows lazily: aux layers, then the last layer.

    The target reads each conversation separately, right-padded, so none attends to another.
    """
    tokens, places = unpack(rows)
    states = read_states(target, mx.array(tokens), aux_layers)
    return states.reshape(-1, states.shape[-1])[mx.array(places)]


def unpack(rows: Rows) -> tuple[NDArray[np.int32], NDArray[np.int32]]:
    """Unpack rows into conversations [N, T]; return them and each position's index [B, L] in the flattened N * T.

    Padding has index 0.
    """
    row, at = np.nonzero(rows.segments)
    segment = rows.segments[row, at]
    begins = np.concatenate([[True], (np.diff(row) != 0) | (np.diff(segment) != 0)]) if len(row) else np.zeros(0, bool)
    number = np.cumsum(begins) - 1
    starts = np.flatnonzero(begins)
    offset = np.arange(len(row)) - starts[number]
    tokens = np.zeros((len(starts), int(offset.max(initial=0)) + 1), np.int32)
    tokens[number, offset] = rows.tokens[row, at]
    places = np.zeros(rows.tokens.shape, np.int32)
    places[row, at] = number * tokens.shape[1] + offset
    return tokens, places


def count_tokens(samples: Iterable[tuple[Sequence[int], Sequence[int]]], vocab_size: int) -> NDArray[np.int64]:
    """Count each token id with loss mask 1 in pairs of tokens and mask: [V]."""
    counts = np.zeros(vocab_size, np.int64)
    for tokens, mask in samples:
        learned = np.asarray(tokens, np.int64)[np.asarray(mask, bool)]
        counts += np.bincount(learned, minlength=vocab_size)
    return counts


def choose_draft_vocab(counts: NDArray[np.int64], size: int, always: Collection[int] = ()) -> NDArray[np.int64]:
    """Return the `size` most frequent token ids of counts [V], ascending, including `always` (special tokens).

    Ties go to the lower id, so the result is reproducible. Raises ConfigError if `size` is larger than the vocabulary
    or smaller than `always`.
    """
    vocab_size = len(counts)
    if not 0 < size <= vocab_size:
        raise ConfigError(f"draft vocabulary of {size}: it must be between 1 and the target's {vocab_size}")
    kept = np.array(sorted({i for i in always if 0 <= i < vocab_size}), np.int64)
    if len(kept) > size:
        raise ConfigError(f"draft vocabulary of {size}: the target's {len(kept)} special tokens alone need more")
    order = np.argsort(-counts, kind="stable")
    rest = order[~np.isin(order, kept)][: size - len(kept)]
    return np.sort(np.concatenate([kept, rest]))


def coverage(counts: NDArray[np.int64], kept: NDArray[np.int64]) -> float:
    """Return the share of counted tokens that are in the draft vocabulary; 1.0 if there are none."""
    total = int(counts.sum())
    return float(counts[kept].sum() / total) if total else 1.0


def special_token_ids(tokenizer: TokenizerWrapper) -> frozenset[int]:
    """Return the ids that every draft vocabulary has: end of turn and other special tokens."""
    return frozenset(tokenizer.eos_token_ids) | frozenset(tokenizer.all_special_ids)


def draft_vocabulary(
    target: Target, config: TrainConfig, counts: NDArray[np.int64], head: DraftHead | None
) -> tuple[NDArray[np.int64] | None, dict[str, Any]]:
    """Return the kept ids (None for all), and their number and coverage for the run's report."""
    kept: NDArray[np.int64] | None = None
    if head is not None:
        kept = None if head.token_ids is None else np.array(head.token_ids, np.int64)
    elif 0 < config.head.draft_vocab < target.vocab_size:
        always = special_token_ids(target.tokenizer) if target.tokenizer is not None else frozenset[int]()
        kept = choose_draft_vocab(counts, config.head.draft_vocab, always)
    if kept is None:
        return None, {"draft_vocab": target.vocab_size, "draft_vocab_coverage": 1.0}
    return kept, {"draft_vocab": len(kept), "draft_vocab_coverage": coverage(counts, kept)}
