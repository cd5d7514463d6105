"""An answer as a response of the Responses API."""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass
from typing import Any

from pydantic import TypeAdapter

from eagle_mlx.engine.output import Output
from eagle_mlx.request import Request as EngineRequest

from ..answer import stats
from ..chat import ChatAnswer
from ..errors import ApiError
from ..parts import Part, parts_of
from ..schema import SERVICE_TIER
from ..service import Call
from ..stream import EventWriter, dumps, stream_answer
from .events import ResponseWriter
from .memory import ID_PREFIXES, Kept, ResponseMemory
from .schema import Item, ResponsesRequest
from .tools import Functions, echoed
from .translate import sealed

_ITEMS: TypeAdapter[list[Item]] = TypeAdapter(list[Item])


@dataclass(frozen=True)
class ResponseAnswer:
    """A chat that is answered with a response."""

    body: ResponsesRequest
    chat: ChatAnswer
    functions: Functions
    items: Sequence[Item]
    """The conversation that is answered."""
    nbytes: int
    """Of the conversation, as JSON."""
    memory: ResponseMemory

    @property
    def requests(self) -> Sequence[EngineRequest]:
        return self.chat.requests

    def response(self, call: Call, outputs: Sequence[Output]) -> dict[str, Any]:
        (output,) = outputs
        return self.ended(call, output, parts_of(self.chat.deltas(output)))

    def stream(self, call: Call) -> AsyncIterator[bytes]:
        return stream_answer(call, self.writer(call))

    def writer(self, call: Call) -> EventWriter:
        return ResponseWriter(self, call)

    def ended(self, call: Call, output: Output, parts: Sequence[Part]) -> dict[str, Any]:
        """The response of an answer that is whole, or was cut off; it is kept where that is wanted."""
        cut_off = output.finish_reason == "length"
        last = len(parts) - 1
        items = [
            self.item(call, part, index, "incomplete" if cut_off and index == last else "completed")
            for index, part in enumerate(parts)
        ]
        response = self.begun(call) | {
            "status": "incomplete" if cut_off else "completed",
            "incomplete_details": {"reason": "max_output_tokens"} if cut_off else None,
            "output": items,
            "usage": self._usage(output),
            **stats(call, [output]),
        }
        if self.body.store is not False:
            conversation = [*self.items, *_ITEMS.validate_python(items)]
            nbytes = self.nbytes + len(dumps(response).encode())
            self.memory.keep(response["id"], Kept(response, conversation, nbytes))
        return response

    def failed(self, call: Call, error: ApiError) -> dict[str, Any]:
        code = "invalid_prompt" if error.status == 400 else "server_error"
        return self.begun(call) | {"status": "failed", "error": {"code": code, "message": error.message}}

    def begun(self, call: Call) -> dict[str, Any]:
        """The response before anything is said."""
        body = self.body
        form = body.text.format if body.text is not None else None
        choice = body.tool_choice or "auto"
        return {
            "id": f"resp_{call.id}",
            "object": "response",
            "created_at": call.created,
            "status": "in_progress",
            "background": False,
            "error": None,
            "incomplete_details": None,
            "instructions": body.instructions,
            "max_output_tokens": body.max_output_tokens,
            "metadata": body.metadata or {},
            "model": call.service.name,
            "output": [],
            "parallel_tool_calls": body.parallel_tool_calls is not False,
            "previous_response_id": body.previous_response_id,
            "reasoning": body.reasoning.model_dump(include={"effort", "summary"}) if body.reasoning else None,
            "store": body.store is not False,
            "temperature": body.temperature,
            "text": {"format": form.model_dump(by_alias=True, exclude_unset=True) if form else {"type": "text"}},
            "tool_choice": choice if isinstance(choice, str) else choice.model_dump(exclude_none=True),
            "tools": echoed(body.tools),
            "service_tier": SERVICE_TIER,
            "top_p": body.top_p,
            "truncation": "disabled",
            "usage": None,
        }

    def item(self, call: Call, part: Part, index: int, status: str) -> dict[str, Any]:
        """A part as an item. Calls are never cut off: what is cut off is no call, but text."""
        if part.call is not None:
            item = self.functions.called(part.call)
            status = "in_progress" if status == "in_progress" else "completed"
        elif part.kind == "reasoning":
            item = {"type": "reasoning", "summary": [], "content": [{"type": "reasoning_text", "text": part.text}]}
            if self.body.wants_encrypted_thoughts:
                item["encrypted_content"] = sealed(part.text)
        else:
            content = {"type": "output_text", "text": part.text, "annotations": [], "logprobs": []}
            item = {"type": "message", "role": "assistant", "content": [content]}
        return {"id": f"{ID_PREFIXES[item['type']]}_{call.id}_{index}", **item, "status": status}

    def _usage(self, output: Output) -> dict[str, Any]:
        return {
            "input_tokens": output.prompt_tokens,
            "input_tokens_details": {"cached_tokens": output.cached_tokens, "cache_write_tokens": 0},
            "output_tokens": len(output.tokens),
            "output_tokens_details": {"reasoning_tokens": self.chat.thought_tokens(output)},
            "total_tokens": output.prompt_tokens + len(output.tokens),
        }
