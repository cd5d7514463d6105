"""What is special about chat: prompts from messages, thoughts and tool calls in answers, texts that follow a schema."""

from .calls import ToolCall
from .reader import AnswerReader, Delta
from .structured import Grammars
from .template import ChatFormat
from .tools import ToolOffer

__all__ = ["AnswerReader", "ChatFormat", "Delta", "Grammars", "ToolCall", "ToolOffer"]
