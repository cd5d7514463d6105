"""Settings of memory that all decoding commands share."""

from __future__ import annotations

from dataclasses import dataclass

from eagle_mlx.late import late
from eagle_mlx.plan import PREFILL_CHUNK
from eagle_mlx.setting import AT_LEAST_1, Group, Limit, setting

IN_MEMORY = Limit(
    lambda gigabytes: gigabytes >= 1e-9 and late("eagle_mlx.memory:fits_machine")(gigabytes),
    "must be above 0 and at most this machine's memory, not {} GB",
)


@dataclass(frozen=True)
class MemoryOptions(Group):
    """The engine's memory for the KV cache, and its positions per forward."""

    prefill_chunk: int = setting(
        PREFILL_CHUNK,
        "prompt tokens per forward, for all requests together; more need more memory and delay decoding requests",
        AT_LEAST_1,
    )
    kv_gb: float | None = setting(
        None,
        "memory for KV caches; requests that do not fit wait (default: four fifths of the memory left after "
        "weights); on machines of up to 16 GB, three fifths",
        IN_MEMORY,
        metavar="GB",
    )
    exact: bool = setting(
        False,
        "read two positions in plain rounds, too, so that all rounds use the same kernels; eagle-doctor says whether "
        "your machine needs it",
    )

    @property
    def kv_bytes(self) -> int | None:
        """Bytes for the KV cache; None for a share of the memory left after the weights."""
        return bytes_of(self.kv_gb)


def bytes_of(gigabytes: float | None) -> int | None:
    return None if gigabytes is None else round(gigabytes * 1e9)
