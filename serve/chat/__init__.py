"""Chat formats: prompts from messages, reasoning and tool calls parsed out of answers, schemas as grammars.

`ChatFormat` knows a model's template and tags, `AnswerParser` splits its answers, `Grammars` compiles schemas.
"""

from .parser import AnswerParser, Delta, FirstCall
from .structured import Grammars
from .template import Chat, ChatFormat
from .tools import ToolCall, ToolOffer
from .volatile import Volatile

__all__ = ["AnswerParser", "Chat", "ChatFormat", "Delta", "FirstCall", "Grammars", "ToolCall", "ToolOffer", "Volatile"]
