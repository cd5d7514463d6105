"""Requests of Anthropic's Messages API."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any, Literal

import yaml
from pydantic import BeforeValidator, Field, Tag

from ..conversation import BareTool, Extensions, one_of, without_details
from ..schema import Body, Many, supported

Ignored = Any
"""Marks fields without effect. Cache breakpoints are among them: the prefix cache finds shared prefixes itself."""


KNOWN_TOOLS: dict[str, dict[str, Any]] = yaml.safe_load(
    Path(__file__).with_name("known_tools.yaml").read_text(encoding="utf-8")
)
"""Description and parameters of the tools that have no schema in requests, by type."""


class TextBlock(Body):
    type: Literal["text"]
    text: str
    cache_control: Ignored = None
    citations: Ignored = None


class ThinkingBlock(Body):
    type: Literal["thinking"]
    thinking: str
    signature: str | None = None


class RedactedThinkingBlock(Body):
    """Encrypted reasoning, which is left out of the prompt."""

    type: Literal["redacted_thinking"]
    data: str


class ToolUseBlock(Body):
    type: Literal["tool_use"]
    id: str
    name: str
    input: dict[str, Any]
    cache_control: Ignored = None
    caller: Ignored = None


class ToolResultBlock(Body):
    type: Literal["tool_result"]
    tool_use_id: str
    content: str | Many[Annotated[TextBlock, BeforeValidator(supported)]] | None = None
    is_error: bool | None = None
    cache_control: Ignored = None


Block = Annotated[
    Annotated[TextBlock, Tag("<text>")]
    | Annotated[ThinkingBlock, Tag("<thinking>")]
    | Annotated[RedactedThinkingBlock, Tag("<redacted_thinking>")]
    | Annotated[ToolUseBlock, Tag("<tool_use>")]
    | Annotated[ToolResultBlock, Tag("<tool_result>")],
    one_of("text", "thinking", "redacted_thinking", "tool_use", "tool_result"),
    BeforeValidator(supported),
]


class Turn(Body):
    role: Literal["user", "assistant", "system"]
    content: str | Many[Block]


class ClientTool(Body):
    """A tool that the client runs."""

    type: Literal["custom"] | None = None
    name: str = Field(pattern=r"^[a-zA-Z0-9_.-]{1,128}$")
    description: str | None = None
    input_schema: dict[str, Any]
    strict: bool | None = None
    # Ignored: all tools are in the prompt, and tool input arrives in one piece.
    cache_control: Ignored = None
    defer_loading: bool | None = None
    eager_input_streaming: bool | None = None
    input_examples: list[dict[str, Any]] | None = None
    allowed_callers: list[str] | None = None


OfferedTool = Annotated[
    Annotated[ClientTool, Tag("<custom>")] | Annotated[BareTool, BeforeValidator(without_details), Tag("<bare>")],
    one_of("custom", strange="bare"),
]


class MessagesToolChoice(Body):
    type: Literal["auto", "any", "tool", "none"]
    name: str | None = None
    disable_parallel_tool_use: bool | None = None


class Thinking(Body):
    type: Literal["enabled", "disabled", "adaptive", "between_tools"]
    budget_tokens: int | None = Field(None, ge=1)
    """Not enforced: reasoning ends when the model ends it, or at max_tokens."""
    display: Literal["summarized", "omitted"] | None = None


class OutputFormat(Body):
    type: Literal["json_schema"]
    schema_: dict[str, Any] = Field(alias="schema")


class OutputConfig(Body):
    effort: Literal["low", "medium", "high", "xhigh", "max"] | None = None
    format: OutputFormat | None = None


class CountTokensRequest(Extensions):
    """The conversation and everything else that goes into the prompt."""

    messages: Annotated[Many[Turn], Field(min_length=1)]
    system: str | Many[Annotated[TextBlock, BeforeValidator(supported)]] | None = None
    tools: Many[OfferedTool] | None = None
    tool_choice: MessagesToolChoice | None = None
    thinking: Thinking | None = None
    output_config: OutputConfig | None = None
    # Ignored: these concern Anthropic's own servers.
    cache_control: Ignored = None
    context_management: dict[str, Any] | None = None
    mcp_servers: Annotated[list[Any], Field(max_length=0)] | None = None
    speed: Literal["standard"] | None = None
    user_profile_id: str | None = None
    workspace_id: str | None = None


class MessagesRequest(CountTokensRequest):
    max_tokens: int = Field(ge=1)
    """An upper bound: the context may leave fewer."""
    stream: bool | None = None
    stop_sequences: Many[str] | None = None
    temperature: float | None = Field(None, ge=0, le=1)
    top_p: float | None = None
    top_k: int | None = None
    # Ignored as well.
    metadata: dict[str, Any] | None = None
    service_tier: Literal["auto", "standard_only"] | None = None
    inference_geo: str | None = None
    diagnostics: dict[str, Any] | None = None
    container: None = None
