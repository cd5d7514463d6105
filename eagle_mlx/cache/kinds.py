"""The ragged counterparts of mlx-lm's caches, and the models that cannot use them."""

from __future__ import annotations

from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx_lm.models.cache import ArraysCache, CacheList, ChunkedKVCache, KVCache, RotatingKVCache, make_prompt_cache

from eagle_mlx.cache.full import RaggedChunked, RaggedGrouped, RaggedKV, RaggedList, RaggedQuantized
from eagle_mlx.cache.lengths import RowLengths
from eagle_mlx.cache.recurrent import MASKED, RecurrentState
from eagle_mlx.cache.window import RaggedWindow
from eagle_mlx.errors import TargetError

ONE_ROW = {
    "afm7": "its layers with shared keys take positions from the number of keys",
    "gpt_bigcode": "it counts its learned positions for a single sequence",
    "llama4": "it computes chunk masks and attention scales for a single sequence",
    "minimax_m3_vl": "it selects blocks of keys by their position in a single sequence",
    "recurrent_gemma": "it treats the first token differently",
}
"""mlx-lm model files that cannot decode rows of different lengths together, and why."""

OWN_POSITIONS = {
    "gpt2": "its learned positions are always consecutive",
    "ministral3": "it scales queries by positions that it counts itself",
    "mistral4": "it scales queries by positions that it counts itself",
}
"""mlx-lm model files that use positions outside their RoPE modules and therefore cannot read draft trees."""

REFUSED = {
    "kimi_k3": "its layers add to shared sums, so no layer can be called twice",
    "longcat_flash_ngram": "its embedding remembers the last tokens, which cannot be rolled back",
    "phi3small": "its block-sparse attention lets a token see later ones if several are read at once",
    "plamo3": "prompt tokens attend one position further back than later tokens, so a verify differs from decoding",
}
"""mlx-lm model files for which speculative decoding cannot be exact, and why."""


def ragged(cache: Any, lengths: RowLengths, model: nn.Module, kv_bits: int | None = None) -> Any:
    """Return the ragged counterpart of one of mlx-lm's caches. kv_bits quantizes full attention only: windows, chunks
    and states are small. Raises TargetError if there is none."""
    kind = type(cache)
    if kind is KVCache and kv_bits is not None:
        return RaggedQuantized(lengths, kv_bits)
    if kind is KVCache:
        groups_queries_itself = model_file(model) == "gemma2"
        return RaggedGrouped(lengths) if groups_queries_itself else RaggedKV(lengths)
    if kind is RotatingKVCache and cache.keep == 0:
        return RaggedWindow(lengths, cache.max_size)
    if kind is ChunkedKVCache:
        return RaggedChunked(lengths, cache.chunk_size)
    if kind is ArraysCache:
        return RecurrentState(lengths, len(cache.cache), masked=masks_padding(model))
    if kind is CacheList:
        return RaggedList([ragged(part, lengths, model, kv_bits) for part in cache.caches])
    raise TargetError(
        f"this model uses a {kind.__name__}, which cannot be rolled back row by row; "
        "decode it with mlx_lm, or choose a model from docs/architectures.md"
    )


def check_cacheable(model: nn.Module, rows: int = 1, kv_bits: int | None = None) -> None:
    """Raise TargetError if this model cannot decode `rows` rows together exactly, or not with `kv_bits`."""
    file = model_file(model)
    if file in REFUSED:
        raise TargetError(f"models of type {file} cannot be decoded speculatively: {REFUSED[file]}; use mlx_lm")
    if rows > 1 and file in ONE_ROW:
        raise TargetError(f"models of type {file} decode one row at a time: {ONE_ROW[file]}; set max_batch=1")
    lengths, caches = RowLengths(rows), []
    for index, cache in enumerate(make_prompt_cache(model)):
        try:
            caches.append(ragged(cache, lengths, model, kv_bits))
        except TargetError as e:
            raise TargetError(f"layer {index} of {file}: {e}") from e
    if kv_bits is None:
        return
    if not any(isinstance(cache, RaggedQuantized) for cache in caches):
        raise TargetError(f"models of type {file} have no cache that kv_bits can quantize; omit it")
    try:
        model(mx.zeros((rows, 1), mx.int32), cache=caches)  # nothing is evaluated: only shapes and types matter
    except Exception as e:  # the model knows nothing of such a cache, so any error is possible
        reason = str(e).partition("\n")[0]
        raise TargetError(f"this model cannot decode with a quantized KV cache ({reason}); omit kv_bits") from e


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
