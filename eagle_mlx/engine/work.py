"""Work on groups of rows that is done whole or not at all."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager

from eagle_mlx.engine.batch import Batch
from eagle_mlx.request_state import RequestState


class Work:
    """Knows what would be half done if the work under way failed now, and has it given up if it does."""

    def __init__(self, give_up: Callable[[str, Mapping[Batch, list[RequestState]]], None]):
        """`give_up`: told why, and which batches were worked on, with the requests that they had before."""
        self.under_way = False
        self._give_up = give_up
        self._on: dict[Batch, list[RequestState]] = {}

    @contextmanager
    def whole(self, *batches: Batch) -> Iterator[None]:
        """Work on these: where it raises, no request is left that is half done."""
        self.under_way = True
        try:
            with self.only(*batches):
                yield
        except BaseException as e:  # an interrupt from the keyboard leaves as much behind as an error does
            self._give_up(f"the engine failed: {type(e).__name__}: {e}", self._on)
            raise
        finally:
            self.under_way, self._on = False, {}

    @contextmanager
    def only(self, *batches: Batch) -> Iterator[None]:
        """Work on these for a while, and on nothing else: what was worked on before is sound meanwhile.

        Where it raises, that stays so.
        """
        before = self._on
        self._on = {batch: list(batch.requests) for batch in batches}
        yield
        self._on = before

    def also(self, *batches: Batch) -> AbstractContextManager[None]:
        """Work on these too for a while."""
        return self.only(*self._on, *batches)
