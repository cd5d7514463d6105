"""Top-k, top-p and min-p: keep all tokens from some logit on, which is found without sorting the vocabulary.

A token is kept if the number (top-k) or the total mass (top-p) of the tokens above it is less than the limit: k, or
top_p times the total mass. So the tokens kept are those from some logit on; tied tokens are kept or removed together.

There are two ways to find that logit, chosen by the row's own parameters, so that no bit of the result depends on other
rows. A top_k up to MOST_CANDIDATES reads the logits twice, including top_p. Otherwise we bisect the representable
numbers: 16 steps for 16 bits, 32 for 32, each with one sum over the vocabulary.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial, wraps

import mlx.core as mx

from eagle_mlx.cpu import use_shortcuts
from eagle_mlx.sampling_params import SamplingParams

MOST_CANDIDATES = 64
"""The largest top_k that sorts candidates. It is the largest default of a model family (Gemma 3; Qwen3 uses 20)."""

_OFF = 2**31 - 1


def fused(function: Callable[..., mx.array], shapeless: bool = True) -> Callable[..., mx.array]:
    """Compile a function with MLX; `shapeless`: for all shapes at once, if it is elementwise. On a CPU the function
    stays as it is: MLX would compile it with g++, which takes seconds and gains nothing there."""
    compiled = mx.compile(function, shapeless=shapeless)

    @wraps(function)
    def call(*arrays: mx.array) -> mx.array:
        return function(*arrays) if use_shortcuts() else compiled(*arrays)

    return call


@dataclass(frozen=True)
class Filters:
    """The filters of B requests. Greedy requests have none."""

    top_k: mx.array  # [B] int32, 2^31 - 1 if off
    top_p: mx.array  # [B] float32, infinite if off
    min_p: mx.array  # [B] float32, 0 if off
    few: mx.array  # [R] int32, the rows with a top_k of at most MOST_CANDIDATES
    many: mx.array  # [S] int32, the other rows with top_k or top_p
    any_top_k: bool  # whether any of `many` has top_k
    any_top_p: bool  # whether any of `many` has top_p
    any_min_p: bool

    @classmethod
    def of(cls, params: Sequence[SamplingParams]) -> Filters:
        rows = [None if row.rule == "greedy" else row for row in params]
        top_k = [row.top_k if row and row.top_k else _OFF for row in rows]
        top_p = [row.top_p if row and row.top_p < 1 else math.inf for row in rows]
        min_p = [float(row.min_p) if row else 0.0 for row in rows]
        few = [index for index, k in enumerate(top_k) if k <= MOST_CANDIDATES]
        limited = zip(top_k, top_p, strict=True)
        many = [index for index, (k, p) in enumerate(limited) if MOST_CANDIDATES < k < _OFF or (k == _OFF and p < 1)]
        return cls(
            top_k=mx.array(top_k, mx.int32),
            top_p=mx.array(top_p, mx.float32),
            min_p=mx.array(min_p, mx.float32),
            few=mx.array(few, mx.int32),
            many=mx.array(many, mx.int32),
            any_top_k=any(top_k[index] < _OFF for index in many),
            any_top_p=any(top_p[index] < 1 for index in many),
            any_min_p=any(min_p),
        )

    @property
    def any(self) -> bool:
        return bool(self.few.size or self.many.size or self.any_min_p)

    def apply(self, logits: mx.array, divisor: mx.array) -> mx.array:
        """Return float32 logits with minus infinity for removed tokens; each row keeps at least one.

        logits: [B, n, V]; divisor: [B, 1, 1] float32, the temperatures. The order is temperature, top_k, top_p of what
        top_k kept, min_p.
        """
        x = logits.astype(mx.float32)
        return mx.where(x >= self._least(x, divisor, logits.dtype), x, -math.inf)

    def _least(self, x: mx.array, divisor: mx.array, dtype: mx.Dtype) -> mx.array:
        """Return the least logit that each row keeps, [B, n, 1]; minus infinity if it keeps all."""
        rows, width, _ = x.shape
        least = mx.full((rows, width, 1), -math.inf)
        top_k, top_p = self.top_k[:, None, None], self.top_p[:, None, None]
        for group, find in ((self.few, self._least_of_few), (self.many, self._least_of_many)):
            if group.size == rows:
                least = find(x, divisor, top_k, top_p, dtype)
            elif group.size:
                least[group] = find(x[group], divisor[group], top_k[group], top_p[group], dtype)
        if not self.any_min_p:
            return least
        return mx.maximum(least, mx.max(x, axis=-1, keepdims=True) + divisor * mx.log(self.min_p)[:, None, None])

    def _least_of_few(
        self, x: mx.array, divisor: mx.array, top_k: mx.array, top_p: mx.array, dtype: mx.Dtype
    ) -> mx.array:
        """Sort the MOST_CANDIDATES largest logits, the same number for every row so that all sums are rounded alike."""
        count = min(MOST_CANDIDATES, x.shape[-1])
        ordered = mx.sort(largest(x, count)[0], axis=-1)[..., ::-1]
        last = mx.broadcast_to(mx.minimum(top_k, count) - 1, (*x.shape[:-1], 1))
        kept = mx.arange(count) <= last
        kth = mx.take_along_axis(ordered, last, axis=-1)
        ties = mx.sum(x >= kth, axis=-1, keepdims=True) - (last + 1)  # beyond the top k, but kept with the last of them
        masses = mx.where(kept, mx.exp((ordered - ordered[..., :1]) / divisor), 0.0)
        whole = mx.sum(masses, axis=-1, keepdims=True) + ties * mx.take_along_axis(masses, last, axis=-1)
        likelier = mx.cumsum(masses, axis=-1, inclusive=False)
        nucleus = mx.where(kept & (likelier < top_p * whole), ordered, math.inf)
        return mx.minimum(mx.min(nucleus, axis=-1, keepdims=True), ordered[..., :1])

    def _least_of_many(
        self, x: mx.array, divisor: mx.array, top_k: mx.array, top_p: mx.array, dtype: mx.Dtype
    ) -> mx.array:
        greatest = mx.max(x, axis=-1, keepdims=True)
        start = greatest.astype(dtype)  # in the dtype that the logits had before
        least = _kth(x, top_k, start) if self.any_top_k else mx.full(greatest.shape, -math.inf)
        if not self.any_top_p:
            return least
        masses = mx.exp((x - greatest) / divisor) * (x >= least)
        limit = top_p * mx.sum(masses, axis=-1, keepdims=True)
        return mx.maximum(least, _nucleus(x, masses, limit, start))


@partial(fused, shapeless=False)
def _kth(x: mx.array, top_k: mx.array, greatest: mx.array) -> mx.array:
    return bisect(lambda t: mx.sum(x > t, axis=-1, keepdims=True) < top_k, greatest)


@partial(fused, shapeless=False)
def _nucleus(x: mx.array, masses: mx.array, limit: mx.array, greatest: mx.array) -> mx.array:
    return bisect(lambda t: mx.sum(masses * (x > t), axis=-1, keepdims=True) < limit, greatest)


def bisect(holds: Callable[[mx.array], mx.array], greatest: mx.array) -> mx.array:
    """Return the least number t, in the dtype of `greatest`, for which `holds(t)`; it must hold from some t on.

    It is assumed to hold at `greatest`, so that something is always kept. The result is exact, because we halve the
    number of representable values in between. `holds` may compare a sum of masses with a limit: rounding is monotonic,
    so a sum in the same order cannot grow when some masses become 0.

    greatest: float32 or a 16-bit type. `holds` takes float32 and returns bool; all shapes equal that of `greatest`.
    """
    integer, sign = (mx.int16, 0x7FFF) if greatest.dtype.size == 2 else (mx.int32, 0x7FFFFFFF)

    def flipped(bits: mx.array) -> mx.array:
        return mx.where(bits < 0, bits ^ sign, bits)

    def rank(x: mx.array) -> mx.array:
        return flipped(x.view(integer).astype(mx.int32))

    def number(rank: mx.array) -> mx.array:
        return flipped(rank).astype(integer).view(greatest.dtype).astype(mx.float32)

    low, high = rank(mx.full(greatest.shape, -math.inf, greatest.dtype)), rank(greatest)
    for _ in range(8 * greatest.dtype.size):
        middle = (low & high) + ((low ^ high) >> 1)  # the mean, rounded down, without overflow
        true = holds(number(middle))
        low, high = mx.where(true, low, middle), mx.where(true, middle, high)
    return number(high)


_HEIGHT = 64
"""Maximum height of a column. Vocabularies are padded to multiples of 64 or more."""


def largest(x: mx.array, count: int) -> tuple[mx.array, mx.array]:
    """Return the `count` largest entries along the last axis and their indices, both [..., count], in any order.

    The `count` columns with the largest maxima contain the `count` largest entries, so only these are partitioned; all
    of x is if it cannot be cut into enough short columns. `count` is at most the axis.
    """
    size = x.shape[-1]
    height = math.gcd(size, _HEIGHT)
    width = size // height
    if height == 1 or width < 2 * count:  # few of the columns could be skipped
        return _partitioned(x, count)
    tops = mx.max(x.reshape(*x.shape[:-1], height, width), axis=-2)
    best = mx.argpartition(tops, width - count, axis=-1)[..., width - count :]
    rows = mx.arange(0, size, width, dtype=mx.uint32)[:, None]
    places = (best[..., None, :] + rows).reshape(*x.shape[:-1], height * count)
    values, at = _partitioned(mx.take_along_axis(x, places, axis=-1), count)
    return values, mx.take_along_axis(places, at, axis=-1)


def _partitioned(x: mx.array, count: int) -> tuple[mx.array, mx.array]:
    size = x.shape[-1]
    if count == size:
        return x, mx.broadcast_to(mx.arange(size, dtype=mx.uint32), x.shape)
    places = mx.argpartition(x, size - count, axis=-1)[..., size - count :]
    return mx.take_along_axis(x, places, axis=-1), places
