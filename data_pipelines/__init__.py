"""Data for training draft heads: conversations, the chat template and loss mask, regenerated answers, capture.

The command `eagle-data` is in `cli`. Training uses only the names below.
"""

from __future__ import annotations

from .capturing import ShardCapture, capture, capture_to_shards, shard_meta
from .conversation import Conversation, Message
from .rendering import (
    Rendered,
    RenderReport,
    TemplateReport,
    all_tokens,
    examine,
    prompt_tokens,
    render,
    render_all,
)
from .sources.reading import DataConfig, ReadReport, read_conversations
from .sources.rows import FieldMap, parse_row
from .synthesis.file import Enough, Limits, Wanted, made_states, make_once, make_to_file, prompt_keys
from .synthesis.loop import FIRST_ROWS, growing_engine
from .synthesis.regeneration import RegenerateConfig, RegenerateReport, regenerate, regenerate_to_file
from .synthesis.report import MakeReport
from .synthesis.shards import ShardPlace
from .synthesis.tries import MakeConfig, beginning
from .synthesis.user_turns import steerable

__all__ = [
    "FIRST_ROWS",
    "Conversation",
    "DataConfig",
    "Enough",
    "FieldMap",
    "Limits",
    "MakeConfig",
    "MakeReport",
    "Message",
    "ReadReport",
    "RegenerateConfig",
    "RegenerateReport",
    "RenderReport",
    "Rendered",
    "ShardCapture",
    "ShardPlace",
    "TemplateReport",
    "Wanted",
    "all_tokens",
    "beginning",
    "capture",
    "capture_to_shards",
    "examine",
    "growing_engine",
    "made_states",
    "make_once",
    "make_to_file",
    "parse_row",
    "prompt_keys",
    "prompt_tokens",
    "read_conversations",
    "regenerate",
    "regenerate_to_file",
    "render",
    "render_all",
    "shard_meta",
    "steerable",
]
