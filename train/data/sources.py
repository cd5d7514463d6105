"""Load training data and evaluation prompts from the data pipelines."""

from __future__ import annotations

import math
import sys
from collections.abc import Collection, Iterator
from dataclasses import dataclass
from itertools import zip_longest
from typing import Any

import numpy as np
from numpy.typing import NDArray

from eagle_mlx.data_pipelines import (
    Conversation,
    DataConfig,
    Message,
    ReadReport,
    Sample,
    ShardCapture,
    Split,
    capture,
    prompt_tokens,
    read_conversations,
    render_all,
    shard_meta,
)
from eagle_mlx.errors import DataError, OutputError, ShardError, TargetError
from eagle_mlx.heads.base import DraftHead
from eagle_mlx.hidden_states import Example
from eagle_mlx.shards import ShardReader
from eagle_mlx.target import Target

from ..config import MOST_PROMPTS, TrainSettings
from ..kinds import aux_layers_of
from .examples import Examples, InMemory, OnDisk, draft_vocabulary
from .storage import Place, cache_folder, choose_states, data_config, learned_side, no_prompts, of_replay, prompt_config


@dataclass(frozen=True)
class TrainData:
    samples: Examples
    aux_layers: tuple[int, ...]  # target layers in the samples' features, without the last layer
    kept: NDArray[np.int64] | None  # [Vd] the draft vocabulary's ids in the target, ascending; None for all
    report: dict[str, Any]
    place: Place = "memory"  # where hidden states are kept. A resumed run must use the same place


def training_data(
    target: Target,
    config: TrainSettings,
    progress: bool = False,
    head: DraftHead | None = None,
    reserve: int = 0,
    most: float = math.inf,
) -> TrainData:
    """Load shards if given, else conversations, with captured hidden states if there is room for them.

    A `head` to continue from decides which layers to capture and the draft vocabulary. `reserve`: additional bytes that
    training needs. `most`: as in `choose_states`. Raises DataError, ShardError, OutputError or ConfigError if data
    cannot be used or stored.
    """
    if config.data.shards:
        return _from_shards(target, config, head)
    rendered, left_out = _render(target, config, progress)
    replayed: list[Sample] = []
    if config.head.adapt and not config.data.is_self:
        replayed = _replayed(target, config, sum(len(sample.tokens) for sample in rendered))
        rendered += replayed
    aux_layers = aux_layers_of(target, config, head)
    examples = [Example.of(*sample[:3]) for sample in rendered]
    samples: Examples = (texts := InMemory(examples))
    meta = shard_meta(target, aux_layers, config.data.cache_bits)
    choice = choose_states(config, sum(texts.lengths), meta, reserve, most=most)
    if progress:
        print(f"states: {choice.text}", file=sys.stderr)
    states = choice.states
    if choice.place == "memory":
        samples = InMemory(list(capture(target, aux_layers, rendered, progress=progress)))
    elif choice.place == "disk":
        folder, bits = cache_folder(config), config.data.cache_bits
        try:
            ShardCapture(target, aux_layers, rendered, bits).write(folder, progress=progress, resume=True)
        except (ShardError, OutputError) as e:
            raise type(e)(f"{e}. Remove this cache, or choose another place with --cache-dir") from e
        samples = OnDisk(ShardReader(folder))
        states = samples.about
    kept, vocabulary = draft_vocabulary(target, config, texts.count_tokens(target.vocab_size), head)
    report = {**amount(texts), "left_out": left_out, "states": states, **vocabulary}
    if replayed:
        report["replayed_tokens"] = sum(len(sample.tokens) for sample in replayed)
    return TrainData(samples, aux_layers, kept, report, choice.place)


def amount(samples: Examples) -> dict[str, int]:
    """Return the report's facts about the number of conversations and tokens."""
    lengths = samples.lengths
    return {"conversations": len(lengths), "tokens": sum(lengths), "loss_tokens": samples.loss_tokens}


@dataclass(frozen=True)
class EvalPrompts:
    tokens: list[list[int]]
    keys: frozenset[int]  # the keys of the conversations, which must not be trained on
    left_out: int  # conversations that were left out because they are trained on

    def facts(self, trained: Collection[int]) -> dict[str, Any]:
        """Return the report's facts. `trained`: the keys of all conversations that are trained on, 0 if unknown."""
        held_out = 0 not in trained and self.keys.isdisjoint(trained)
        return {"prompts_held_out": held_out, "prompts_left_out": self.left_out}


def heldout_prompts(target: Target, config: TrainSettings, trained: Collection[int] = (), most: int = 0) -> EvalPrompts:
    """Return prompts to measure acceptance: held-out conversations up to the last answer, or beginnings of texts.

    Prompts that the target answers for the run end before the first answer. They come from all sources in turn, or from
    the one in `eval_data`. Conversations whose keys are in `trained` are left out. `most`: return at most this many, by
    default as many as configured. Raises DataError if there are none.
    """
    learned, named = prompt_config(config), config.evaluation.data
    sources = (learned.sources[0] if config.prompts_are_heldout else named,) if named else learned.sources
    in_turn = zip_longest(*(_prompts_of(target, config, learned, source, trained) for source in sources))
    pairs = (pair for of_sources in in_turn for pair in of_sources if pair is not None)
    prompts: list[tuple[int, list[int]]] = []
    left_out = 0
    most = most or config.evaluation.prompts or MOST_PROMPTS
    while len(prompts) < most and (pair := next(pairs, None)) is not None:
        if pair[1]:
            prompts.append(pair)
        left_out += not pair[1]
    if not prompts:
        reason = f"all {left_out:,} are trained on" if left_out else "none of them fits the context"
        raise no_prompts(sources, reason)
    return EvalPrompts([tokens for _, tokens in prompts], frozenset(key for key, _ in prompts), left_out)


def questions_of(target: Target, config: TrainSettings) -> dict[int, tuple[str, str]]:
    """Return the system prompt (or "") and the first user turn of each conversation in `data`, by the turn's key.

    Raises DataError if none is shorter than `max_length`, TargetError without a chat template.
    """
    tokenizer = target.tokenizer
    if tokenizer is None or not tokenizer.has_chat_template:
        raise TargetError(f"{target.name} has no chat template, so it cannot answer the questions of --data")
    questions: dict[int, tuple[str, str]] = {}
    for conversation in read_conversations(data_config(config), "all", tokenizer):
        first = next((message for message in conversation.messages if message.role == "user"), Message("user", ""))
        system = next((message.content for message in conversation.messages[:1] if message.role == "system"), "")
        question = (*([Message("system", system)] if system else []), first)
        most = min(config.data.max_length, target.context_length)
        if first.content.strip() and len(prompt_tokens(tokenizer, Conversation(question))) < most:
            questions.setdefault(Conversation((first,)).prompt_key(), (system, first.content))
    if not questions:
        raise DataError(
            f"{', '.join(config.data.sources)}: no user turns; with --hours, the target answers the first user turn of "
            "each conversation. Learn texts first in a run of their own, and continue its head with --init-from"
        )
    return questions


def _prompts_of(
    target: Target, config: TrainSettings, learned: DataConfig, source: str, trained: Collection[int]
) -> Iterator[tuple[int, list[int]]]:
    """Yield keys and prompts; no tokens if the conversation is trained on."""
    wanted = learned.alone(source)
    [spec] = wanted.sources
    in_part = spec.startswith("builtin:") or spec in [source.spec for source in learned.parsed]
    split: Split = "heldout" if in_part else "all"
    for conversation in read_conversations(wanted, split, target.tokenizer):
        key = conversation.prompt_key()
        part = conversation.opening() if source in config.data.prompts else conversation
        prompt = [] if key in trained else _prompt(target, part, config.evaluation.tokens)
        if prompt is not None:
            yield key, prompt


def _render(target: Target, config: TrainSettings, progress: bool) -> tuple[list[Sample], int]:
    """Render the conversations and count those left out; with `progress`, print what the template drops."""
    if target.tokenizer is None:
        raise TargetError("the target has no tokenizer, so it cannot read conversations; train from shards instead")
    length = min(config.data.max_length, target.context_length)
    data, read = data_config(config), ReadReport()
    conversations = read_conversations(data, learned_side(config), target.tokenizer, read)
    rendered, report = render_all(target.tokenizer, conversations, length, config.data.filters.skip_bad)
    notes = report.notes(target.name)
    if not rendered:
        raise DataError(
            f"no usable conversations in {', '.join(data.sources)}; check the source, or raise --max-length"
            + "".join(f"\n  {note}" for note in notes)
        )
    for note in notes if progress else ():
        print(note, file=sys.stderr)
    return rendered, read.left_out.total() + report.unusable + report.empty


def _from_shards(target: Target, config: TrainSettings, head: DraftHead | None) -> TrainData:
    readers = [ShardReader(folder) for folder in config.data.shards]
    for reader in readers:
        _check_shards(target, config, reader)
    aux_layers = aux_layers_of(target, config, head)
    if head is None and aux_layers:
        aux_layers = config.head.aux_layers or readers[0].meta.aux_layers
    read = ", ".join(map(str, aux_layers))
    for reader in readers:
        held = (*reader.meta.aux_layers, target.num_layers - 1)
        if not set(aux_layers) <= set(held):
            raise ShardError(
                f"{reader.folder} has the layers {', '.join(map(str, held))}, but the head reads {read}; choose others "
                f"with --aux-layers, or capture again with --aux-layers {read.replace(' ', '')}"
            )
    samples = OnDisk(*readers, layers=aux_layers, last_layer=target.num_layers - 1)
    return data_on_disk(target, config, samples, aux_layers, head)


def data_on_disk(
    target: Target, config: TrainSettings, samples: OnDisk, aux_layers: tuple[int, ...], head: DraftHead | None
) -> TrainData:
    """Return samples on disk, with the draft vocabulary of `head`, or of a new head."""
    kept, vocabulary = draft_vocabulary(target, config, samples.count_tokens(target.vocab_size), head)
    report = {**amount(samples), "states": samples.about, **vocabulary}
    return TrainData(samples, aux_layers, kept, report, "disk")


def _check_shards(target: Target, config: TrainSettings, reader: ShardReader) -> None:
    meta, now = reader.meta, "" if target.adapter is None else target.adapter.digest
    if (meta.hidden_size, meta.vocab_size) != (target.hidden_size, target.vocab_size):
        raise ShardError(
            f"{reader.folder} was captured from {meta.target or 'a target'} with hidden size {meta.hidden_size} "
            f"and vocabulary {meta.vocab_size}, but the target has {target.hidden_size} and {target.vocab_size}; "
            "capture again with this target"
        )
    if meta.adapter != now:
        had = f"with the adapters {meta.adapter}" if meta.adapter else "without adapters"
        has = f"has those of {config.loading.adapter_path} ({now})" if now else "has none"
        remedy = "give them with --adapter-path" if meta.adapter else "leave --adapter-path out"
        raise ShardError(
            f"{reader.folder} was captured {had}, but the target {has}; {remedy}, or capture again with this target"
        )
    if meta.template and meta.template != shard_meta(target, ()).template:
        raise ShardError(
            f"{reader.folder} was captured with another chat template; give the same --chat-template and "
            "--chat-template-args, or capture again"
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
        is_question = any(message.role != "assistant" for message in conversation.messages)
        tokens = prompt_tokens(tokenizer, conversation) if is_question else []
    return tokens if tokens and len(tokens) + room <= target.context_length else None


def _replayed(target: Target, config: TrainSettings, most: int) -> list[Sample]:
    """Return older conversations of at least `most` tokens together, if there are as many."""
    tokenizer: Any = target.tokenizer
    length, samples, tokens = min(config.data.max_length, target.context_length), list[Sample](), 0
    for conversation in read_conversations(data_config(of_replay(config)), "train", tokenizer):
        rendered, _ = render_all(tokenizer, [conversation], length, config.data.filters.skip_bad)
        samples += rendered
        tokens += sum(len(sample.tokens) for sample in rendered)
        if tokens >= most:
            break
    return samples
