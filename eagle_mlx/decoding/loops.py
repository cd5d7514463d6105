"""Telling a continuation that loops from one that does not: loops flatter every figure of speculative decoding."""

from __future__ import annotations

from collections.abc import Sequence

LEAST_DISTINCT = 0.6
"""A continuation with a smaller share of distinct 4-grams counts as looping."""


def distinct_ratio(tokens: Sequence[int], n: int = 4) -> float:
    """Distinct n-grams per n-gram of a continuation; 1.0 where it is too short to repeat one."""
    grams = [tuple(tokens[i : i + n]) for i in range(len(tokens) - n + 1)]
    return len(set(grams)) / len(grams) if grams else 1.0


def is_loop(tokens: Sequence[int], least: float = LEAST_DISTINCT) -> bool:
    """Whether a continuation repeats itself too much to be measured."""
    return distinct_ratio(tokens) < least
