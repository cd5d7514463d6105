"""Chat formats: render messages as prompts, parse reasoning and tool calls out of answers, compile schemas to grammars.

`ChatFormat` holds a model's template and tags, `AnswerParser` splits its answers, `Grammars` compiles schemas,
`with_budget` limits thoughts.
"""

from .budget import with_budget
from .parser import AnswerParser, Delta
from .structured import Grammars
from .template import Chat, ChatFormat, Encode
from .tools import ToolCall, ToolOffer, whole_calls
