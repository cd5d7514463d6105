"""Tries of a target to make up something worth learning from, side by side."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Generic, NoReturn, Protocol, TypeVar

from tqdm import tqdm

from eagle_mlx.engine import Engine
from eagle_mlx.errors import TargetError
from eagle_mlx.request_state import RequestState

from .made import ConversationWriter, Made, MakeConfig
from .made_text import TextWriter
from .regenerate import Speed
from .usable import LOOK

_AHEAD = 4
"""Requests that wait beside those that decode, so that a place that falls free is taken in the same step."""


class _Attempt(Protocol):
    """A try under way."""

    def result(self) -> Made:
        """What came of it, once it has ended."""


A = TypeVar("A", bound=_Attempt)


class Writer(Protocol[A]):
    """How a target makes something up. Each try is a function of the seed and its number alone."""

    def open(self, number: int) -> A:
        """Begin a try."""

    def submit(self, attempt: A) -> RequestState:
        """Have its next part written."""

    def take(self, attempt: A, request: RequestState) -> bool:
        """Put a part that has been written into it; whether another one follows. Raises DataError for none."""

    def give_up(self, attempt: A, request: RequestState) -> bool:
        """Whether the part under way cannot be used any more; then the try ends without it."""

    def stop(self, attempt: A, request: RequestState) -> None:
        """End a try before its next part is written, because the time is over. Parts that are complete are kept."""


@dataclass
class _Running(Generic[A]):
    """A try and the request that writes its next part."""

    attempt: A
    request: RequestState
    looks: int = 0
    """How often the part has been looked at while it was written."""

    def look(self) -> bool:
        """Whether enough has been written since the last look; then this is one."""
        before, self.looks = self.looks, len(self.request.tokens) // LOOK
        return self.looks > before


def make_all(
    engine: Engine,
    config: MakeConfig,
    following: Callable[[int], int | None],
    shown: tqdm[NoReturn] | None = None,
    over: Callable[[], bool] = lambda: False,
) -> Iterator[Made]:
    """Yield what comes of tries, each as soon as it has ended: conversations, or texts without a chat template.

    `following(running)` gives the number of the next try while so many run, or None where none is wanted now; whoever
    wants no more leaves the loop. `over()` is asked before each step; once it holds, running tries end with the parts
    that are complete. A user's turn that has ended is answered at once: prompts and answers of different
    conversations decode side by side. Where the engine's proposer is a CapturingProposer, whose last layer must be the
    target's, each comes with the hidden states of the forwards that wrote it. Raises TargetError for a target that
    cannot speak as its user, or that has no tokenizer.
    """
    tokenizer = engine.target.tokenizer
    if tokenizer is None:
        raise TargetError(f"{engine.target.name} has no tokenizer, so it can make up nothing")
    if tokenizer.has_chat_template:
        return _run(engine, ConversationWriter(engine, config, tokenizer), following, shown, over)
    return _run(engine, TextWriter(engine, config, tokenizer), following, shown, over)


def _run(
    engine: Engine,
    writer: Writer[A],
    following: Callable[[int], int | None],
    shown: tqdm[NoReturn] | None,
    over: Callable[[], bool],
) -> Iterator[Made]:
    running: dict[int, _Running[A]] = {}
    speed = Speed(shown)
    try:
        while True:
            while len(running) < engine.max_batch + _AHEAD and (number := following(len(running))) is not None:
                attempt = writer.open(number)
                running[number] = _Running(attempt, writer.submit(attempt))
            if not running:
                return
            if over():
                for number, one in list(running.items()):
                    engine.cancel(one.request)
                    writer.stop(one.attempt, one.request)
                    del running[number]
                    yield one.attempt.result()
                return
            engine.step()
            for number, one in list(running.items()):
                attempt, request = one.attempt, one.request
                if request.finish_reason is not None:
                    speed.finished += len(request.tokens)
                    if writer.take(attempt, request):
                        running[number] = _Running(attempt, writer.submit(attempt))
                        continue
                elif one.look() and writer.give_up(attempt, request):
                    speed.finished += len(request.tokens)
                    engine.cancel(request)
                else:
                    continue
                del running[number]
                yield attempt.result()
            speed.show(one.request for one in running.values())
    finally:
        for one in running.values():
            engine.cancel(one.request)
