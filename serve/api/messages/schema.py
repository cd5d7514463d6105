"""What clients of Anthropic's Messages API may send."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, Discriminator, Field, Tag

from ..conversation import Extensions, one_of, without_details
from ..schema import Body, Many, supported
from .known_tools import KNOWN_TYPES, KnownType

Ignored = Any
"""Where a cache may be cut is of no consequence here: the prefix cache finds that by itself."""


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
    """A thought that only its writer can read; it is left out."""

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
    # Of no consequence: every tool is told of at once, and its input comes in one piece.
    cache_control: Ignored = None
    defer_loading: bool | None = None
    eager_input_streaming: bool | None = None
    input_examples: list[dict[str, Any]] | None = None
    allowed_callers: list[str] | None = None


class KnownTool(BaseModel):
    """A tool that the client runs, whose schema `known_tools` knows. Its other fields say nothing to the model."""

    model_config = ConfigDict(strict=True, extra="ignore", json_schema_extra={"additionalProperties": True})

    type: KnownType
    name: str = Field(pattern=r"^[a-zA-Z0-9_.-]{1,128}$")
    strict: bool | None = None


class AnthropicTool(BaseModel):
    """A tool that Anthropic runs, or whose schema only Anthropic's models know."""

    model_config = ConfigDict(strict=True, json_schema_extra={"additionalProperties": True})

    type: str = Field(json_schema_extra={"not": {"enum": ["custom", *sorted(KNOWN_TYPES)]}})
    name: str | None = None


def _tool_tag(value: object) -> str:
    kind = value.get("type") if isinstance(value, dict) else getattr(value, "type", None)
    if kind in (None, "custom"):
        return "<client>"
    return "<known>" if isinstance(kind, str) and kind in KNOWN_TYPES else "<hosted>"


def _known_fields(tool: object) -> object:
    """The fields of a known tool that are read, so that others are not refused."""
    return {key: tool[key] for key in KnownTool.model_fields if key in tool} if isinstance(tool, dict) else tool


Hosted = Annotated[AnthropicTool, BeforeValidator(without_details)]
OfferedTool = Annotated[
    Annotated[ClientTool, Tag("<client>")]
    | Annotated[KnownTool, BeforeValidator(_known_fields), Tag("<known>")]
    | Annotated[Hosted, Tag("<hosted>")],
    Discriminator(_tool_tag),
]


class MessagesToolChoice(Body):
    type: Literal["auto", "any", "tool", "none"]
    name: str | None = None
    disable_parallel_tool_use: bool | None = None


class Thinking(Body):
    type: Literal["enabled", "disabled", "adaptive", "between_tools"]
    budget_tokens: int | None = Field(None, ge=1)
    """Not kept: a thought ends where the model ends it, or at max_tokens."""
    display: Literal["summarized", "omitted"] | None = None


class OutputFormat(Body):
    type: Literal["json_schema"]
    schema_: dict[str, Any] = Field(alias="schema")


class OutputConfig(Body):
    effort: Literal["low", "medium", "high", "xhigh", "max"] | None = None
    format: OutputFormat | None = None


class CountTokensRequest(Extensions):
    """The conversation, and what else goes into the prompt."""

    model: str | None = None
    messages: Annotated[Many[Turn], Field(min_length=1)]
    system: str | Many[Annotated[TextBlock, BeforeValidator(supported)]] | None = None
    tools: Many[OfferedTool] | None = None
    tool_choice: MessagesToolChoice | None = None
    thinking: Thinking | None = None
    output_config: OutputConfig | None = None
    # Of no consequence here: who asks, what for, and what Anthropic's own servers do about it.
    cache_control: Ignored = None
    context_management: dict[str, Any] | None = None
    mcp_servers: Annotated[list[Any], Field(max_length=0)] | None = None
    speed: Literal["standard"] | None = None
    user_profile_id: str | None = None
    workspace_id: str | None = None


class MessagesRequest(CountTokensRequest):
    max_tokens: int = Field(ge=1)
    """As many at most: the context may leave fewer."""
    stream: bool | None = None
    stop_sequences: Many[str] | None = None
    temperature: float | None = Field(None, ge=0, le=1)
    """In Anthropic's range."""
    top_p: float | None = None
    top_k: int | None = None
    # As above.
    metadata: dict[str, Any] | None = None
    service_tier: Literal["auto", "standard_only"] | None = None
    inference_geo: str | None = None
    diagnostics: dict[str, Any] | None = None
    container: None = None
