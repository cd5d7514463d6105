"""How the commands of this application end."""

from __future__ import annotations

import sys
from collections.abc import Callable

from eagle_mlx.errors import EagleError


def exit_code(work: Callable[[], None]) -> int:
    """Do a command's work: 0, 2 after an error that the user can mend, 130 when interrupted."""
    try:
        work()
    except EagleError as e:
        print(f"error: {e}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        return 130
    return 0
