"""The warm-up: text that a head learns from before the run's own conversations. The target only reads it."""

from __future__ import annotations

from itertools import islice

from eagle_mlx.data_pipelines import DataConfig, read_conversations, render_all
from eagle_mlx.errors import DataError, TargetError
from eagle_mlx.hidden_states import Example
from eagle_mlx.target import Target

from ..config import TrainConfig
from ..distributed import SINGLE_PROCESS, World
from .examples import InMemory
from .sources import TrainData


def reading_share(most: float, reading: float, writing: float) -> float:
    """Return the share of a time limit for the warm-up, between 0 and `most`.

    `reading` and `writing`: tokens per second of text, and of the target's own conversations, including learning. The
    share s maximizes a weighted mean of logarithms, as τ grows with the logarithm of the tokens: `most` of it counts
    all tokens, s * reading + (1 - s) * writing, and the rest only conversations, (1 - s) * writing.
    """
    return 0.0 if reading <= writing else max(0.0, most - (1 - most) * writing / (reading - writing))


def tokens_to_read(config: TrainConfig, own: int, rate: float, processes: int = 1) -> int:
    """Return the tokens of text that the warm-up of a run can use.

    `own`: tokens of the run's own data. `rate`: tokens of text per second that are read and learned.
    """
    how, share = config.optimization, config.data.warmup_share
    if how.hours or how.minutes:
        return round(share * (3600 * how.hours or 60 * how.minutes) * rate * processes)
    if how.max_steps:
        return round(share * how.max_steps) * how.rows * how.length * processes
    return round(share / (1 - share) * how.epochs * own)


def with_warmup_tokens(config: TrainConfig, own: int, rate: float, world: World = SINGLE_PROCESS) -> TrainConfig:
    """Return the settings with `warmup_tokens` as in `tokens_to_read`, so that a resumed run reads the same text."""
    if not config.data.warmup_data or config.data.warmup_tokens:
        return config
    return config.changed(warmup_tokens=world.broadcast(tokens_to_read(config, own, rate, world.size)))


def _reading(config: TrainConfig) -> DataConfig:
    data, filters = config.data, config.data.filters
    return DataConfig(data.warmup_data, seed=config.run.seed, stream=filters.stream, skip_bad=filters.skip_bad)


def check_warmup(target: Target, config: TrainConfig) -> None:
    """Raise the errors of reading the warm-up's text, if there is one, before hours of other work."""
    if not config.data.warmup_data:
        return
    if target.tokenizer is None:
        raise TargetError("the target has no tokenizer, so it cannot read text; leave out --warmup-data")
    if next(read_conversations(_reading(config), "train", target.tokenizer), None) is None:
        raise DataError(f"no text in {', '.join(config.data.warmup_data)}; check --warmup-data")


def warmup_data(target: Target, config: TrainConfig, own: TrainData) -> TrainData | None:
    """Return about `config.data.warmup_tokens` tokens of text for a head with the layers and vocabulary of `own`.

    Return None without a warm-up. Hidden states are captured for each batch, since most text is read once. Raises
    DataError if nothing is usable.
    """
    tokenizer = target.tokenizer
    if not config.data.warmup_data or tokenizer is None:
        return None
    length = min(config.data.max_length, target.context_length)
    found = read_conversations(_reading(config), "train", tokenizer)
    examples: list[Example] = []
    tokens = 0
    while tokens < config.data.warmup_tokens and (block := list(islice(found, 256))):
        rendered, _ = render_all(tokenizer, block, length, config.data.filters.skip_bad)
        examples += [Example.of(*one) for one in rendered]
        tokens += sum(len(one.tokens) for one in rendered)
    if not examples:
        raise DataError(f"no usable text in {', '.join(config.data.warmup_data)}; check --warmup-data")
    report = {"warmup_conversations": len(examples), "warmup_tokens": tokens}
    return TrainData(InMemory(examples), own.aux_layers, own.kept, report, "online")
