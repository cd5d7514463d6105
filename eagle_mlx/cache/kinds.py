"""The ragged counterparts of mlx-lm's caches, and the models that cannot use them."""

from __future__ import annotations

from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx_lm.models.cache import (
    ArraysCache,
    CacheList,
    ChunkedKVCache,
    KVCache,
    RotatingKVCache,
    make_prompt_cache,
)

from eagle_mlx.cache.full import RaggedChunked, RaggedGrouped, RaggedKV
from eagle_mlx.cache.lengths import RowLengths
from eagle_mlx.cache.quantized import RaggedQuantized
from eagle_mlx.cache.recurrent import MASKED, RaggedList, RecurrentState
from eagle_mlx.cache.window import RaggedWindow
from eagle_mlx.errors import TargetError

ONE_ROW = {
    "afm7": "its layers that share keys take their positions from the number of keys",
    "gpt_bigcode": "its learned positions are counted for one sequence",
    "llama4": "its chunk masks and attention scales are those of one sequence",
    "minimax_m3_vl": "it chooses blocks of keys by their place in one sequence",
    "recurrent_gemma": "its first token is read differently from every other",
}
"""mlx-lm model files that cannot decode rows of different lengths together, and why."""

OWN_POSITIONS = {
    "gpt2": "its learned positions follow one another",
    "ministral3": "it scales its queries by positions of its own",
    "mistral4": "it scales its queries by positions of its own",
}
"""mlx-lm model files that use positions outside their RoPE modules and therefore cannot read draft trees."""

REFUSED = {
    "kimi_k3": "its layers add to sums that they share, so that none can be called twice",
    "longcat_flash_ngram": "its embedding keeps the last tokens, which are no layer's to roll back",
    "phi3small": "its block-sparse layers show a token what comes after it wherever several are read at once",
    "plamo3": "a prompt's tokens see one position further back than later ones, so that no verify reads like decoding",
}
"""mlx-lm model files for which speculative decoding cannot be exact, and why."""

GROUPED = frozenset({"gemma2"})
"""mlx-lm model files whose attention groups the query heads itself."""


def ragged(cache: Any, lengths: RowLengths, model: nn.Module, kv_bits: int | None = None) -> Any:
    """Return the ragged counterpart of one of mlx-lm's caches.

    kv_bits quantizes full attention only: windows, chunks and states are small. Raises TargetError if there is none.
    """
    kind = type(cache)
    if kind is KVCache and kv_bits is not None:
        return RaggedQuantized(lengths, kv_bits)
    if kind is KVCache:
        return RaggedGrouped(lengths) if model_file(model) in GROUPED else RaggedKV(lengths)
    if kind is RotatingKVCache and cache.keep == 0:
        return RaggedWindow(lengths, cache.max_size)
    if kind is ChunkedKVCache:
        return RaggedChunked(lengths, cache.chunk_size)
    if kind is ArraysCache:
        return RecurrentState(lengths, len(cache.cache), masked=masks_padding(model))
    if kind is CacheList:
        return RaggedList([ragged(part, lengths, model, kv_bits) for part in cache.caches])
    raise TargetError(
        f"this model keeps a {kind.__name__}, which cannot be rolled back row by row; "
        "decode it with mlx_lm, or choose a model of docs/architectures.md"
    )


def check_cacheable(model: nn.Module, rows: int = 1, kv_bits: int | None = None) -> None:
    """Raise TargetError if this model cannot decode `rows` rows together exactly, or not with `kv_bits`."""
    file = model_file(model)
    if file in REFUSED:
        raise TargetError(f"models of type {file} cannot be sped up: {REFUSED[file]}; decode them with mlx_lm")
    if rows > 1 and file in ONE_ROW:
        raise TargetError(f"models of type {file} decode one row at a time: {ONE_ROW[file]}; give max_batch=1")
    for index, cache in enumerate(make_prompt_cache(model)):
        try:
            ragged(cache, RowLengths(rows), model)
        except TargetError as e:
            raise TargetError(f"layer {index} of {file}: {e}") from e
    if kv_bits is not None:
        _check_quantizable(model, kv_bits)


def _check_quantizable(model: nn.Module, kv_bits: int) -> None:
    """Raise TargetError if this model's attention cannot use quantized keys. Only shapes and types are computed."""
    lengths = RowLengths(1)
    caches = [ragged(cache, lengths, model, kv_bits) for cache in make_prompt_cache(model)]
    if not any(isinstance(cache, RaggedQuantized) for cache in caches):
        raise TargetError(f"models of type {model_file(model)} keep nothing that kv_bits could quantise; leave it out")
    try:
        model(mx.zeros((1, 1), mx.int32), cache=caches)
    except Exception as e:  # the model knows nothing of such a cache, so any error is possible
        raise TargetError(f"this model cannot decode with quantised keys and values ({e}); leave kv_bits out") from e


def may_pad(model: nn.Module) -> bool:
    """Return whether prompts of different lengths may share a forward: no recurrent state reads padding."""
    caches = make_prompt_cache(model)
    parts = [part for cache in caches for part in (cache.caches if isinstance(cache, CacheList) else (cache,))]
    return masks_padding(model) or not any(isinstance(part, ArraysCache) for part in parts)


def masks_padding(model: nn.Module) -> bool:
    """Return whether this model's recurrent layers respect the lengths of rows."""
    return all({base.__module__.rsplit(".", 1)[-1] for base in type(x).__mro__} & MASKED for x in model.layers)


def model_file(model: nn.Module) -> str:
    """Return the name of the mlx-lm file that defines a model, which is its model type."""
    return type(model).__module__.rsplit(".", 1)[-1]
