"""What a measurement comes to: the figures of a mode, over all prompts and by category."""

from __future__ import annotations

from dataclasses import asdict, dataclass


@dataclass(frozen=True)
class Category:
    """The figures of one mode over the prompts of one category; None where all of them loop."""

    name: str
    prompts: int
    left_out_looping: int
    tokens_per_second: float | None
    ratio_to_mlx_lm: float | None
    acceptance_length: float | None


@dataclass(frozen=True)
class Run:
    """The figures of one mode, over the prompts that do not loop."""

    mode: str
    batch: int
    depth: int
    nodes: int
    """Tokens of a draft tree; 0 for chains."""
    policy: str
    """How many of `depth` tokens are drafted: `fixed` for all."""
    temperature: float
    tokens_per_second: float
    """Generated tokens over wall time, reading the prompts included; median over the repeats."""
    decode_tokens_per_second: float
    """The same without the time to the first token and without that token."""
    ratio_to_mlx_lm: float | None
    """Of tokens_per_second, repeat by repeat, then the median; None where mlx-lm was not measured."""
    ratio_to_mlx_lm_batch: float | None
    """The same against mlx-lm's batches of this size."""
    ratio_to_plain: float | None
    """The same against the engine's own plain decoding at this batch size."""
    acceptance_length: float
    acceptance_by_position: list[float]
    identical: bool | None
    """No difference from the reference that rounding does not excuse; None for mlx-lm's own sampling and batches."""
    identical_count: int | None
    excused: int | None
    prompts: int
    """Prompts that the figures are taken over; identity is judged on those left out, too."""
    left_out_looping: int
    tokens: int
    """Generated in one repeat."""
    seconds: float
    """Of one repeat; median."""
    by_category: tuple[Category, ...] = ()
    """The same figures category by category, where the prompts have categories."""
    model: str = ""
    """The model that decoded, and by what it was loaded if that is not EAGLE-MLX."""
    dtype: str = ""
    """The type in which that model computes."""
    reference: str = ""
    """What the texts were compared with: mode, model and type."""

    def to_json(self) -> dict[str, object]:
        return asdict(self)
