"""An answer as it is written, taken apart: what is said, what is thought, and what is called."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from mlx_lm.tokenizer_utils import TokenizerWrapper

from eagle_mlx.text import IncrementalText

from .reasoning import Kind, ReasoningParser
from .template import ChatFormat
from .tools import Tool, ToolCall, ToolCallParser, check_tools


@dataclass(frozen=True)
class Delta:
    """Something that an answer continues with: one of the three."""

    content: str = ""
    reasoning: str = ""
    tool_call: ToolCall | None = None


class AnswerParser:
    """Text in, deltas out; together they are the same however the text is cut.

    tools: those that the model was offered; without any, nothing is taken for a call. several: whether an answer may
    hold several calls; if not, it ends with the first. Raises PromptError for tools that cannot be used.
    """

    def __init__(
        self,
        format: ChatFormat,
        tools: Sequence[Tool] | None = None,
        starts_in_reasoning: bool = False,
        several: bool = True,
    ):
        offered = check_tools(tools or ())
        tags = format.calls if offered else None
        self._calls = ToolCallParser(tags, offered, format.thoughts.think_end) if tags else None
        self._thoughts = ReasoningParser(format.thoughts, starts_in_reasoning)
        self._several = several
        self.has_ended = False
        """Whether the only call that was allowed is complete. Text after it is dropped."""

    def push(self, text: str) -> list[Delta]:
        """What is certain after this text."""
        return self._read(text, False, True)

    def finish(self, complete: bool = True) -> list[Delta]:
        """The rest. complete: whether the model ended its answer itself; else a call that is still open is text."""
        deltas = self._read("", True, complete)
        for kind, text in self._thoughts.push("", final=True):
            _add(deltas, kind, text)
        return deltas

    def _read(self, text: str, final: bool, complete: bool) -> list[Delta]:
        deltas: list[Delta] = []
        if self.has_ended:
            return deltas
        if self._calls is None:
            self._add_text(deltas, text)
            return deltas
        self._calls.feed(text)
        while (part := self._calls.next(self._thoughts.thinking, final, complete)) is not None:
            if isinstance(part, str):
                self._add_text(deltas, part)
                continue
            for kind, waiting in self._thoughts.interrupt():
                _add(deltas, kind, waiting)
            if not self._several:
                self.has_ended = True
                return [*deltas, Delta(tool_call=part[0])]
            deltas += [Delta(tool_call=call) for call in part]
        return deltas

    def _add_text(self, deltas: list[Delta], text: str) -> None:
        for kind, part in self._thoughts.push(text):
            _add(deltas, kind, part)


class FirstCall:
    """Tells when the tokens of an answer have completed its only call (`SamplingParams.stop_watcher`)."""

    def __init__(self, tokenizer: TokenizerWrapper, parser: AnswerParser):
        """parser: must not allow several calls."""
        self._text, self._parser = IncrementalText(tokenizer), parser

    def __call__(self, token: int) -> bool:
        certain, _ = self._text.add([token])
        self._parser.push(certain)
        return self._parser.has_ended


def _add(deltas: list[Delta], kind: Kind, text: str) -> None:
    """Add text, to the last delta where that is of the same kind."""
    last = deltas[-1] if deltas else Delta()
    if kind == "content" and last.content:
        deltas[-1] = replace(last, content=last.content + text)
    elif kind == "reasoning" and last.reasoning:
        deltas[-1] = replace(last, reasoning=last.reasoning + text)
    else:
        deltas.append(Delta(content=text) if kind == "content" else Delta(reasoning=text))
