"""Server-sent events, built with as little work per token as can be: no model, no dictionary, one string a piece."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Sequence
from json.encoder import encode_basestring as quote
from typing import Any, Literal, Protocol

from eagle_mlx.engine.output import Output

from .answer import failure, report, usage
from .service import Call
from .worker import News

DONE = b"data: [DONE]\n\n"
Kind = Literal["chat.completion.chunk", "text_completion"]


class Frame:
    """What all chunks of one answer have around their choice."""

    def __init__(self, call: Call, kind: Kind, with_usage: bool):
        prefix = "chatcmpl" if kind == "chat.completion.chunk" else "cmpl"
        fields = {
            "id": f"{prefix}-{call.id}",
            "object": kind,
            "created": call.created,
            "model": call.service.settings.name,
            "system_fingerprint": call.service.fingerprint,
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
    """Writes one row's pieces."""

    def open(self) -> str:
        """Before the first token."""
        ...

    def write(self, news: News) -> str: ...

    def close(self, output: Output, more: str) -> str:
        """The chunk with the finish reason."""
        ...


async def events(call: Call, frame: Frame, writers: Sequence[Writer], answers: int) -> AsyncIterator[bytes]:
    """The rows' pieces as they come; all that is new at one time goes out at once."""
    if opening := "".join(writer.open() for writer in writers):
        yield opening.encode()
    outputs: dict[int, Output] = {}
    while len(outputs) < len(writers):
        pieces: list[str] = []
        for news in await call.news():
            writer = writers[news.index]
            pieces.append(writer.write(news))
            if news.output is None:
                continue
            if error := failure([news.output]):
                call.failed = True
                yield f"{''.join(pieces)}data: {dumps(error.body)}\n\n".encode() + DONE
                return
            outputs[news.index] = news.output
            last = len(outputs) == len(writers)
            more = _report(call, outputs) if last else ""
            pieces.append(writer.close(news.output, more))
        if text := "".join(pieces):
            yield text.encode()
    ordered = [outputs[index] for index in range(len(outputs))]
    if frame.with_usage:
        yield frame.usage_chunk(usage(ordered, answers), _report(call, outputs)).encode()
    yield DONE


def _report(call: Call, outputs: dict[int, Output]) -> str:
    """Timings and metrics, as further fields of a chunk."""
    return f",{dumps(report(call, list(outputs.values())))[1:-1]}"


def dumps(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False, allow_nan=False, separators=(",", ":"))


__all__ = ["DONE", "Frame", "Writer", "dumps", "events", "quote"]
