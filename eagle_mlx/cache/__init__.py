"""KV caches in which every row of a batch has its own length, so that a rollback only changes lengths."""

from eagle_mlx.cache.kinds import check_cacheable, may_pad
from eagle_mlx.cache.lengths import without_row
from eagle_mlx.cache.ragged import RaggedCache, Saved

__all__ = ["RaggedCache", "Saved", "check_cacheable", "may_pad", "without_row"]
