"""Log lines for things that clients repeat with every request."""

from __future__ import annotations

import logging
from functools import lru_cache

_log = logging.getLogger("eagle_mlx.serve")


@lru_cache(1000)
def log_once(message: str) -> None:
    """Log a warning, unless it is one of the last thousand."""
    _log.warning("%s", message)
