"""Server-sent events, built with as little work per token as can be: no model, no dictionary, one string a piece."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from json.encoder import encode_basestring as quote
from typing import Any, Literal, Protocol

from eagle_mlx.request import Output

from .answer import failure, stats, usage
from .errors import ApiError
from .service import Call
from .worker import RequestEvent

DONE = b"data: [DONE]\n\n"
PROGRESS_SECONDS = 1.0
"""Between two looks at what an answer waits for."""
Kind = Literal["chat.completion.chunk", "text_completion"]


class Frame:
    """What all chunks of one answer have around their choice."""

    def __init__(self, call: Call, kind: Kind, with_usage: bool, more: Mapping[str, str] | None = None):
        prefix = "chatcmpl" if kind == "chat.completion.chunk" else "cmpl"
        fields = {
            "id": f"{prefix}-{call.id}",
            "object": kind,
            "created": call.created,
            "model": call.service.name,
            "system_fingerprint": call.service.fingerprint,
            **(more or {}),
        }
        self._open = f"data: {dumps(fields)[:-1]},"
        self._head = f'{self._open}"choices":[{{"index":'
        self._usage = ',"usage":null' if with_usage else ""
        self.with_usage = with_usage

    def chunk(self, index: int, piece: str, logprobs: str = "null", finish: str = "null", more: str = "") -> str:
        """piece: the choice's own field, as JSON. more: further fields of the chunk, with a comma in front."""
        return f'{self._head}{index},{piece},"logprobs":{logprobs},"finish_reason":{finish}}}]{self._usage}{more}}}\n\n'

    def usage_chunk(self, counts: dict[str, Any], more: str) -> str:
        return f'{self._open}"choices":[],"usage":{dumps(counts)}{more}}}\n\n'


class Writer(Protocol):
    """Writes one choice's chunks."""

    def open(self) -> str:
        """Before the first token."""
        ...

    def write(self, event: RequestEvent) -> str: ...

    def close(self, output: Output, more: str) -> str:
        """The chunk with the finish reason."""
        ...


class EventWriter(Protocol):
    """Writes the events of an answer to an API whose events have names."""

    def open(self) -> str:
        """Before the first token."""
        ...

    def write(self, event: RequestEvent) -> str: ...

    def close(self, output: Output) -> str:
        """What ends an answer that is whole, or was cut off."""
        ...

    def fail(self, error: ApiError) -> str:
        """What ends an answer in place of `close`."""
        ...


def named_event(fields: dict[str, Any]) -> str:
    """An event that is called as its type."""
    return f"event: {fields['type']}\ndata: {dumps(fields)}\n\n"


async def waiting_comments(call: Call) -> AsyncIterator[bytes]:
    """What the answer waits for, whenever that has changed, until there is something of it.

    Comments, which every reader of events drops (HTML standard, 9.2.6).
    """
    told: str | None = None
    while not await call.has_begun(PROGRESS_SECONDS):
        before, told = told, call.waits_for()
        if told is not None and told != before:
            yield f": {told}\n\n".encode()


async def stream_answer(call: Call, writer: EventWriter) -> AsyncIterator[bytes]:
    """The events of a single answer as they come; all that waits at one time goes out at once."""
    yield writer.open().encode()
    async for comment in waiting_comments(call):
        yield comment
    ended = False
    while not ended:
        pieces: list[str] = []
        for event in await call.events():
            error = failure([event.output]) if event.output is not None else None
            call.failed |= error is not None
            if error is not None:
                pieces.append(writer.fail(error))
            else:
                pieces.append(writer.write(event))
            if error is None and event.output is not None:
                pieces.append(writer.close(event.output))
            ended |= event.output is not None
        if text := "".join(pieces):
            yield text.encode()


async def stream_events(
    call: Call,
    frame: Frame,
    writers: Sequence[Writer],
    answers: int,
    thought_tokens: Callable[[Output], int] = lambda _: 0,
) -> AsyncIterator[bytes]:
    """The choices' chunks as they come; all that waits at one time goes out at once.

    thought_tokens: counts the reasoning of an answer, for its usage.
    """
    if opening := "".join(writer.open() for writer in writers):
        yield opening.encode()
    async for comment in waiting_comments(call):
        yield comment
    outputs: dict[int, Output] = {}
    while len(outputs) < len(writers):
        pieces: list[str] = []
        for event in await call.events():
            writer = writers[event.index]
            pieces.append(writer.write(event))
            if event.output is None:
                continue
            if error := failure([event.output]):
                call.failed = True
                yield f"{''.join(pieces)}data: {dumps(error.body)}\n\n".encode() + DONE
                return
            outputs[event.index] = event.output
            last = len(outputs) == len(writers)
            more = _stats(call, outputs) if last else ""
            pieces.append(writer.close(event.output, more))
        if text := "".join(pieces):
            yield text.encode()
    ordered = [outputs[index] for index in range(len(outputs))]
    if frame.with_usage:
        yield frame.usage_chunk(
            usage(ordered, answers, sum(map(thought_tokens, ordered))), _stats(call, outputs)
        ).encode()
    yield DONE


def _stats(call: Call, outputs: dict[int, Output]) -> str:
    """Timings and metrics, as further fields of a chunk."""
    return f",{dumps(stats(call, list(outputs.values())))[1:-1]}"


def dumps(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False, allow_nan=False, separators=(",", ":"))


__all__ = [
    "DONE",
    "EventWriter",
    "Frame",
    "Writer",
    "dumps",
    "named_event",
    "quote",
    "stream_answer",
    "stream_events",
]
