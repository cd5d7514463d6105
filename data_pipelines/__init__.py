"""Data for training draft heads: conversations, the chat template and loss mask, regenerated answers, capture.

`eagle-data` is in `cli`. Training uses the names below and nothing else of this package.
"""

from .answers import regenerate_to_file
from .chat import (
    Rendered,
    RenderReport,
    TemplateReport,
    Unrendered,
    all_tokens,
    prompt_tokens,
    render,
    render_all,
    unrendered,
)
from .collect import capture
from .conversation import Conversation, Message, parse_row
from .filters import ReadReport
from .growing_batch import FIRST_ROWS
from .jsonl import write_jsonl
from .made import MakeConfig, MakeReport, steerable
from .made_file import Enough, Limits, Wanted, make_to_file
from .made_once import made_states, make_once, making_engine, prompt_keys
from .made_shards import ShardPlace
from .made_text import beginning
from .mapping import FieldMap
from .regenerate import RegenerateConfig, RegenerateReport, regenerate
from .shard_capture import ShardCapture, capture_to_shards, shard_meta
from .sources import DataConfig, load_conversations, read_conversations
from .vocab import (
    choose_draft_vocab,
    count_tokens,
    coverage,
    draft_to_target,
    special_token_ids,
    target_to_draft,
)

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
    "Unrendered",
    "Wanted",
    "all_tokens",
    "beginning",
    "capture",
    "capture_to_shards",
    "choose_draft_vocab",
    "count_tokens",
    "coverage",
    "draft_to_target",
    "load_conversations",
    "made_states",
    "make_once",
    "make_to_file",
    "making_engine",
    "parse_row",
    "prompt_keys",
    "prompt_tokens",
    "read_conversations",
    "regenerate",
    "regenerate_to_file",
    "render",
    "render_all",
    "shard_meta",
    "special_token_ids",
    "steerable",
    "target_to_draft",
    "unrendered",
    "write_jsonl",
]
