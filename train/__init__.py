"""The commands eagle-train (`cli`), eagle-convert and eagle-publish; docs/structure.md describes the parts in order.

The server uses only the names below, to train while it serves.
"""

from typing import TYPE_CHECKING

from eagle_mlx.late import late_names

if TYPE_CHECKING:
    from .online import ROWS, OnlineTrainer, first_head
    from .step import NotFiniteError

__getattr__ = late_names(__name__, __file__)
