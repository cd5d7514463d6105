"""A head's cache of bounded size: drafts see the first and the newest entries of the text, and their own ancestors."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import mlx.core as mx

from eagle_mlx.cache.full import STEP, Mask, RaggedKV, gathered
from eagle_mlx.cache.lengths import RowLengths
from eagle_mlx.cache.ragged import RaggedCache


@dataclass(frozen=True)
class DraftWindow:
    """The entries of the text that a head sees: the first `sink` and the newest `size`.

    The window ends at the position that a head reads. For all steps of a draft, it ends at the newest entry of the
    text. Source: Xiao et al. 2023, "Efficient Streaming Language Models with Attention Sinks", arXiv 2309.17453.
    """

    size: int
    sink: int = 0
    slack: int = STEP
    """Older entries that a row may have. Half of them are then dropped together; a prefix snapshot may need others."""

    @property
    def entries(self) -> int:
        return self.sink + self.size

    @property
    def most(self) -> int:
        """The number of entries above which a row's older ones are dropped."""
        return self.entries + self.slack

    @property
    def kept(self) -> int:
        """The number of entries that a row then keeps."""
        return self.entries + self.slack // 2

    def cache(self, layers: int, rows: int) -> RaggedCache:
        return RaggedCache([lambda lengths: WindowedKV(lengths, self)] * layers, rows)


class WindowedKV(RaggedKV):
    """Keys and values of one layer, without the entries between sink and window.

    Entries are stored without gaps, so a slot is not a position: those after the sink are `lengths.dropped` later.
    """

    def __init__(self, lengths: RowLengths, window: DraftWindow):
        super().__init__(lengths)
        self.window = window

    @property
    def offset(self) -> int | mx.array:
        dropped, slots = self.lengths.dropped, super().offset
        if len(set(dropped)) <= 1:
            return slots + max(dropped, default=0)
        before = mx.array(dropped, mx.int32)
        return slots + (before[:, None] if isinstance(slots, mx.array) and slots.ndim == 2 else before)

    def seen(self, count: int) -> mx.array | None:
        """Return a mask [B, 1, 1 or count, upper + count] bool, or None if all entries are in the window."""
        lengths, size = self.lengths, self.window.size
        if lengths.upper + count <= self.window.entries:
            return None
        newest = lengths.places(count)[..., None]
        if lengths.drafted is not None:
            newest = lengths.offset[:, None, None] - (lengths.drafted + 1)
        slots = mx.arange(lengths.upper + count)
        return ((slots < self.window.sink) | (slots > newest - size))[:, None]

    def make_mask(self, count: int, return_array: bool = False, window_size: int | None = None) -> Mask:
        seen = self.seen(count)
        mask = super().make_mask(count, return_array or seen is not None, window_size)
        return mask if seen is None or not isinstance(mask, mx.array) else mask & seen

    @property
    def most(self) -> int:
        return self.window.most

    def drop(self, counts: Sequence[int]) -> None:
        """Remove `counts` entries of each row after its sink, before `lengths` counts them (`RaggedCache.drop`)."""
        longest = max(bound - count for bound, count in zip(self.lengths.bounds, counts, strict=True))
        slots = mx.arange(longest)
        old = slots + mx.where(slots >= self.window.sink, mx.array(list(counts), mx.int32)[:, None], 0)
        if self.keys is not None and self.values is not None:
            self.keys, self.values = (gathered(x, old) for x in (self.keys, self.values))
