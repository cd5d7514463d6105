"""What several tests of the data commands read."""

from __future__ import annotations

ROWS = [{"prompt": f"say {n}", "completion": f"it is {n}"} for n in range(6)]
