"""Settings that eagle-generate, eagle-bench and eagle-serve share."""

from __future__ import annotations

from dataclasses import dataclass

from eagle_mlx.engine.prefill import PREFILL_CHUNK
from eagle_mlx.sampling_params import SamplingParams
from eagle_mlx.setting import AT_LEAST_1, GIGABYTES, Group, setting


@dataclass(frozen=True)
class MemoryOptions(Group):
    """Memory for the KV cache, and the number of prompt tokens per forward."""

    prefill_chunk: int = setting(
        PREFILL_CHUNK,
        "prompt tokens to read in one forward, for all requests together; more tokens need more memory and delay "
        "requests that are decoding",
        AT_LEAST_1,
    )
    kv_gb: float | None = setting(
        None,
        "memory for KV caches; requests that do not fit wait (default: four fifths of the memory left after weights, "
        "or three fifths on a machine of up to 16 GB)",
        GIGABYTES,
        metavar="GB",
    )

    @property
    def kv_bytes(self) -> int | None:
        """Bytes for the KV cache; None for a share of the memory left after the weights."""
        return bytes_of(self.kv_gb)


@dataclass(frozen=True)
class SamplingOptions(Group):
    """How tokens are sampled, and when the text ends."""

    max_tokens: int = setting(SamplingParams.max_tokens, "maximum number of new tokens")
    temperature: float = setting(SamplingParams.temperature, "0 is greedy")
    top_k: int = setting(SamplingParams.top_k, "0 keeps all tokens")
    top_p: float = setting(SamplingParams.top_p, "1 keeps all tokens")
    min_p: float = setting(SamplingParams.min_p, "0 keeps all tokens")
    repetition_penalty: float = setting(SamplingParams.repetition_penalty, "1 for no penalty")
    presence_penalty: float = setting(SamplingParams.presence_penalty, "0 for no penalty")
    frequency_penalty: float = setting(SamplingParams.frequency_penalty, "0 for no penalty")
    stop: tuple[str, ...] = setting((), "stop before this text; repeatable", metavar="TEXT", repeat=True)
    seed: int | None = setting(None, "seed that makes sampled text repeatable")
    ignore_eos: bool = setting(False, "continue after the model's end-of-text token")

    def params(self) -> SamplingParams:
        """Return the parameters for the engine. Raises ConfigError for a value out of range."""
        return SamplingParams(**self.flat())


def bytes_of(gigabytes: float | None) -> int | None:
    return None if gigabytes is None else round(gigabytes * 1e9)
