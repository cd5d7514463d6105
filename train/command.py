"""How the commands of this application end."""

from __future__ import annotations

import sys
from collections.abc import Callable

from eagle_mlx.errors import EagleError

from .stop import Stopped


def exit_code(work: Callable[[], None]) -> int:
    """Do a command's work: 0, 2 after an error that the user can mend, 130 or 143 when interrupted."""
    try:
        work()
    except EagleError as e:
        print(f"error: {e}", file=sys.stderr)
        return 2
    except KeyboardInterrupt as e:
        print("interrupted", file=sys.stderr)
        return e.exit_code if isinstance(e, Stopped) else 130
    return 0
