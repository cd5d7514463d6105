"""Chat formats: render messages as prompts, parse reasoning and tool calls out of answers, compile schemas to grammars.

`ChatFormat` holds a model's template and tags, `AnswerParser` splits its answers, `Grammars` compiles schemas.
"""

from .parser import AnswerParser, Delta, FirstCall
from .structured import Grammars
from .template import Chat, ChatFormat, Volatile
from .tools import ToolCall, ToolOffer, whole_calls
