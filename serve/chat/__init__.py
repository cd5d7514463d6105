"""What is special about chat: prompts from messages, thoughts and tool calls in answers, texts that follow a schema."""

from .reader import AnswerReader, Delta
from .structured import Grammars
from .template import ChatFormat
from .tools import ToolCall, ToolOffer

__all__ = ["AnswerReader", "ChatFormat", "Delta", "Grammars", "ToolCall", "ToolOffer"]
