"""Data for training draft heads: conversations, the chat template and loss mask, regenerated answers, capture."""

from .chat import Rendered, RenderReport, render, render_all
from .collect import capture
from .conversation import Conversation, Message, parse_row
from .jsonl import write_jsonl
from .regenerate import RegenerateReport, regenerate
from .shard_capture import ShardCapture, capture_to_shards, shard_meta
from .sources import load_conversations
from .vocab import (
    choose_draft_vocab,
    count_tokens,
    coverage,
    draft_to_target,
    special_token_ids,
    target_to_draft,
)

__all__ = [
    "Conversation",
    "Message",
    "RegenerateReport",
    "RenderReport",
    "Rendered",
    "ShardCapture",
    "capture",
    "capture_to_shards",
    "choose_draft_vocab",
    "count_tokens",
    "coverage",
    "draft_to_target",
    "load_conversations",
    "parse_row",
    "regenerate",
    "render",
    "render_all",
    "shard_meta",
    "special_token_ids",
    "target_to_draft",
    "write_jsonl",
]
