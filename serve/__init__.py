"""eagle-serve, eagle-generate, eagle-chat, eagle-bench, eagle-heads and eagle-doctor."""

import logging
from functools import lru_cache

log = logging.getLogger("eagle_mlx.serve")


@lru_cache(1000)
def log_once(message: str) -> None:
    """Log a warning, unless it is one of the last thousand: clients repeat things with every request."""
    log.warning("%s", message)
