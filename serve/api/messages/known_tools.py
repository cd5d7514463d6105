"""Tools whose schema Anthropic's models know and whose calls clients run: here their schema is written out.

From Anthropic's documentation of the bash, text editor and memory tools.
"""

from __future__ import annotations

from typing import Any, Literal, get_args

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
    """Return the function that stands for a known tool, under the name that the client gives it."""
    description, parameters = _BY_TYPE[type]
    return {"name": name, "description": description, "parameters": parameters}
