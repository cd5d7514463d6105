"""Requests of Anthropic's Messages API."""

from __future__ import annotations

from typing import Annotated, Any, Literal, get_args

from pydantic import BaseModel, BeforeValidator, ConfigDict, Discriminator, Field, Tag

from ..conversation import Extensions, one_of, without_details
from ..schema import Body, Many, supported

Ignored = Any
"""Marks fields without effect. Cache breakpoints need none: the prefix cache finds them itself."""


KnownType = Literal[
    "bash_20241022",
    "bash_20250124",
    "text_editor_20241022",
    "text_editor_20250124",
    "text_editor_20250429",
    "text_editor_20250728",
    "memory_20250818",
]
KNOWN_TYPES = frozenset(get_args(KnownType))


def _text(description: str) -> dict[str, Any]:
    return {"type": "string", "description": description}


def _input(required: list[str], **properties: dict[str, Any]) -> dict[str, Any]:
    return {"type": "object", "properties": properties, "required": required, "additionalProperties": False}


def _command(*names: str) -> dict[str, Any]:
    return {"type": "string", "enum": list(names)}


_RANGE = {"type": "array", "items": {"type": "integer"}, "minItems": 2, "maxItems": 2}
_EDITS: dict[str, Any] = {
    "path": _text("File or folder."),
    "file_text": _text("For create: the content of the new file."),
    "view_range": {**_RANGE, "description": "For view: first and last line, from 1; -1 is the end."},
    "old_str": _text("For str_replace: the text to replace; it must occur once."),
    "insert_line": {"type": "integer", "description": "For insert: the line after which to insert; 0 is the start."},
}
_NEW = {
    "new_str": _text("For str_replace: the text to put there."),
    "insert_text": _text("For insert: the text to insert."),
}
_NEW_OLDER = {"new_str": _text("For str_replace and insert: the new text.")}
_BASH = (
    "Run a command in a shell that stays open between calls.",
    _input(
        [],
        command=_text("The command. Required unless restart is true."),
        restart={"type": "boolean", "description": "Whether to restart the shell."},
    ),
)
_EDITOR_OLDER = (
    "View, create and edit files.",
    _input(
        ["command", "path"],
        command=_command("view", "create", "str_replace", "insert", "undo_edit"),
        **_EDITS,
        **_NEW_OLDER,
    ),
)
_EDITOR = (
    "View, create and edit files.",
    _input(["command", "path"], command=_command("view", "create", "str_replace", "insert"), **_EDITS, **_NEW),
)
_MEMORY = (
    "Keep notes in files under /memories between conversations.",
    _input(
        ["command"],
        command=_command("view", "create", "str_replace", "insert", "delete", "rename"),
        **_EDITS,
        **_NEW,
        old_path=_text("For rename: the old path."),
        new_path=_text("For rename: the new path."),
    ),
)
_BY_TYPE: dict[str, tuple[str, dict[str, Any]]] = {
    "bash_20241022": _BASH,
    "bash_20250124": _BASH,
    "text_editor_20241022": _EDITOR_OLDER,
    "text_editor_20250124": _EDITOR_OLDER,
    "text_editor_20250429": _EDITOR,
    "text_editor_20250728": _EDITOR,
    "memory_20250818": _MEMORY,
}


def known_function(type: KnownType, name: str) -> dict[str, Any]:
    """Return the function for a known tool, under the client's name for it."""
    description, parameters = _BY_TYPE[type]
    return {"name": name, "description": description, "parameters": parameters}


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


class KnownTool(BaseModel):
    """A tool that the client runs, with a schema from `known_function`. The model does not see its other fields."""

    model_config = ConfigDict(strict=True, extra="ignore", json_schema_extra={"additionalProperties": True})

    type: KnownType
    name: str = Field(pattern=r"^[a-zA-Z0-9_.-]{1,128}$")
    strict: bool | None = None


class AnthropicTool(BaseModel):
    """A tool that Anthropic runs, or with a schema known only to Anthropic's models."""

    model_config = ConfigDict(strict=True, json_schema_extra={"additionalProperties": True})

    type: str = Field(json_schema_extra={"not": {"enum": ["custom", *sorted(KNOWN_TYPES)]}})
    name: str | None = None


def _tool_tag(value: object) -> str:
    kind = value.get("type") if isinstance(value, dict) else getattr(value, "type", None)
    if kind in (None, "custom"):
        return "<client>"
    return "<known>" if isinstance(kind, str) and kind in KNOWN_TYPES else "<hosted>"


def _known_fields(tool: object) -> object:
    """Keep only the fields of a known tool that are used, so that others are not refused."""
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

    model: str | None = None
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
