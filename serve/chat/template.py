"""A model's chat format: its template, tools and reasoning tags, the prompts that it makes, and their boundaries."""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from jinja2 import TemplateError, UndefinedError
from mlx_lm.tokenizer_utils import TokenizerWrapper
from transformers import PreTrainedTokenizerBase

from eagle_mlx.errors import ConfigError, PromptError
from eagle_mlx.target import Target
from eagle_mlx.text import common_prefix

from .families import answer_states, call_tags, templates
from .history import Message, Way, lost_message, read_messages, text_of, ways_to_render, with_typed_parts
from .tools import AnswerStates, Tool, ToolCallTags, with_all_fields, without

Encode = Callable[[str, bool], list[int]]
"""Maps a text, and whether to add special tokens that begin or end it, to token ids."""
CONTINUED = "continue_final_message"  # the argument that names the field of the last message that an answer continues
_RESERVED = {"messages", *inspect.signature(PreTrainedTokenizerBase.apply_chat_template).parameters}
_RESERVED -= {"add_generation_prompt"}
"""Arguments of the rendering itself. Requests cannot set them, or have their own fields for them."""


@dataclass(frozen=True)
class Chat:
    """A conversation, rendered by a model's template."""

    tokenizer: TokenizerWrapper
    messages: list[dict[str, Any]]  # the messages in the form that the template takes
    arguments: Mapping[str, Any]
    text: str

    def tokens(self, encode: Encode | None = None) -> list[int]:
        """Return the chat's token ids. encode: replaces the tokenizer, unless that tokenizes chats in its own way."""
        if encode is not None and _encodes_the_text(self.tokenizer):
            return encode(self.text, False)
        return list(self.tokenizer.apply_chat_template(self.messages, tokenize=True, **self.arguments))

    @property
    def continued(self) -> str | None:
        """The field of the last message that the answer continues: `content` or `reasoning_content`."""
        field: str | None = self.arguments.get(CONTINUED)
        return field

    def check_last_is_open(self) -> None:
        """Raise ValueError if the answer should continue the last message, and the text does not end with it."""
        if self.continued is None:
            return
        last = self.messages[-1]
        end = (text_of(last) if self.continued == "content" else last.get(self.continued, "")).strip()
        if not end or not self.text.rstrip().endswith(end):
            raise ValueError("the last message is not at the end")

    def check_tools_are_rendered(self) -> None:
        """Raise PromptError if the template ignores tools or calls, that is, writes the same text without them."""
        if self.arguments["tools"] and self._other(self.messages, {**self.arguments, "tools": None}) == self.text:
            raise PromptError.at("tools", "this model's chat template ignores tools, so the model would not see them")
        calling = [index for index, message in enumerate(self.messages) if "tool_calls" in message]
        silent = [{key: value for key, value in m.items() if key != "tool_calls"} for m in self.messages]
        if calling and self._other(silent, self.arguments) == self.text:
            raise PromptError.at(f"messages[{calling[0]}].tool_calls", "this model's chat template ignores tool calls")

    def _other(self, messages: list[dict[str, Any]], arguments: Mapping[str, Any]) -> str | None:
        """Return the text of another chat; None if the template refuses it."""
        try:
            return _render(self.tokenizer, messages, arguments)
        except Exception:  # a template is a program and raises anything
            return None

    def boundaries(self, prompt: Sequence[int], encode: Encode | None = None) -> tuple[int, ...]:
        """Return the lengths of the prefixes of `prompt`, the chat's tokens, that later prompts may share, in order.

        These are the ends of the system prompt and of the last message. A template may write a message differently if
        another follows, or leave out its reasoning. So the chat is also rendered with another question and with one
        more turn; the common prefixes are stable. Empty if the chat's tokens are not those of its text.
        """
        if not _encodes_the_text(self.tokenizer):
            return ()
        encode = encode or (lambda text, special: list(self.tokenizer.encode(text, add_special_tokens=special)))
        places = {common_prefix(self.text, other) for other in self._later_chats() if other is not None}
        return tuple(sorted({self._count(at, prompt, encode) for at in places if 0 < at < len(self.text)}))

    def _later_chats(self) -> list[str | None]:
        """Return texts of possible later chats: another question, the next turn, and this one before an answer."""
        chat = [dict(message) for message in (self.messages[:-1] if self.continued else self.messages)]
        arguments = {key: value for key, value in self.arguments.items() if key != CONTINUED}
        system = next((at for at, message in enumerate(chat) if message["role"] != "system"), len(chat))
        first = text_of(chat[system]).lstrip() if system < len(chat) else ""
        turns = [{"role": "assistant", "content": "!"}, {"role": "user", "content": "!" if first[:1] == "?" else "?"}]
        if chat and not isinstance(chat[0]["content"], str):
            turns = with_typed_parts(turns)
        later = [self._other(messages, arguments) for messages in ([*chat[:system], turns[1]], [*chat, *turns])]
        return [*later, self._other(chat, arguments | {"add_generation_prompt": False})]

    def _count(self, place: int, prompt: Sequence[int], encode: Encode) -> int:
        """Return how many tokens of the prompt end before a position in its text. Encodes the shorter side."""
        if len(self.text) - place < place:
            tail = encode(self.text[place:], False)
            if tail and list(prompt[-len(tail) :]) == tail:
                return len(prompt) - len(tail)
        return common_prefix(encode(self.text[:place], False), list(prompt))


def _render(tokenizer: TokenizerWrapper, messages: list[dict[str, Any]], arguments: Mapping[str, Any]) -> str:
    return str(tokenizer.apply_chat_template(messages, tokenize=False, **arguments))


_BILLING_HEADER = re.compile(
    r"\Ax-anthropic-billing-header:"
    r"(?:[ \t]{0,4}(?:cc_version|cc_entrypoint|cc_workload|cch)=[^;\n]{0,128};){1,8}\s{0,8}"
)
"""Claude Code writes it as the first block of its system prompt; it is not meant for a model. `cch` is a checksum that
changes with every request, so the prefix cache could reuse nothing after it (50 s instead of 3.65 s: vllm-mlx#277).

No separator may follow it. All repeats are bounded, so a match takes constant time.
"""


def without_billing_header(messages: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Return messages whose system prompts lack Claude Code's billing header."""
    read = list(map(dict, messages))
    for message in read:
        if message["role"] == "system":
            message["content"] = _BILLING_HEADER.sub("", message["content"])
    return read


@dataclass(frozen=True)
class ChatFormat:
    """A model's notation of chats, and its tags of reasoning and calls."""

    tokenizer: TokenizerWrapper
    thoughts: AnswerStates
    calls: ToolCallTags | None  # None if there is no parser for the model's calls

    @classmethod
    def of(cls, target: Target) -> ChatFormat:
        """Read a target's tokenizer. Raises ConfigError if it has none."""
        if (tokenizer := target.tokenizer) is None:
            raise ConfigError(f"{target.name} has no tokenizer, so it can neither chat nor follow a grammar")
        return cls(tokenizer, answer_states(tokenizer), call_tags(tokenizer))

    def chat(
        self,
        messages: Sequence[Message],
        tools: Sequence[Tool] = (),
        template_kwargs: Mapping[str, Any] | None = None,
        continued: bool = False,
    ) -> Chat:
        """Render a conversation for the model to answer.

        messages, tools: as in OpenAI's API. template_kwargs: other arguments of the template, such as
        `enable_thinking`; unknown names have no effect. continued: whether the answer continues the last message.
        Raises PromptError, with the place, if a part is invalid or the template ignores messages, tools or calls.
        """
        read = read_messages(messages)
        arguments = {"add_generation_prompt": not continued, **_check_kwargs(template_kwargs or {})}
        if continued:
            if arguments["add_generation_prompt"]:
                raise PromptError(f"add_generation_prompt must be false with {CONTINUED}", "add_generation_prompt")
            arguments[CONTINUED] = _field_to_continue(read)
        source = templates(self.tokenizer)
        if "enable_thinking" in arguments and "enable_thinking" not in source and "thinking" in source:
            arguments.setdefault("thinking", arguments["enable_thinking"])  # the name in Kimi's and Granite's templates
        offered = [without(tool, "strict") for tool in tools]  # only the server uses `strict`
        if not self.tokenizer.has_chat_template:
            raise PromptError.at("messages", "this model has no chat template; give it text through /v1/completions")
        if tools and self.calls is None:
            problem = "there is no parser for this model's tool calls; if one of mlx-lm's parsers fits"
            raise PromptError.at("tools", f"{problem}, set it as tool_parser_type in the model's tokenizer_config.json")
        read = without_billing_header(read)
        forms = (offered,) if (whole := list(map(with_all_fields, offered))) == offered else (offered, whole)
        ways = (way for form in forms for way in ways_to_render(read, arguments | {"tools": form or None}, self.calls))
        return self._first_rendered(read, ways)

    def _first_rendered(self, given: Sequence[Message], ways: Iterable[Way]) -> Chat:
        """Return the first chat that the template takes with all its texts, tools and calls.

        given: the messages before `ways` changed them. Raises PromptError if there is none.
        """
        errors: list[Exception] = []
        for messages, arguments in ways:
            try:
                chat = Chat(self.tokenizer, messages, arguments, _render(self.tokenizer, messages, arguments))
                chat.check_last_is_open()
                chat.check_tools_are_rendered()
            except Exception as e:  # a template is a program and raises anything
                errors.append(e)
                continue
            if (lost := lost_message(messages, chat.text, self.thoughts.think_end or "</think>")) is None:
                return chat
            errors.append(_leaves_out(lost, given))
        # Words of the template and of this server say more than errors about types that the template does not expect.
        clear = [e for e in errors if isinstance(e, PromptError | TemplateError) and not isinstance(e, UndefinedError)]
        error = clear[-1] if clear else errors[0]
        if isinstance(error, PromptError):
            raise error
        if CONTINUED in arguments and not clear:
            last = f"messages[{len(given) - 1}]"
            raise PromptError.at(last, "this model's chat template does not write it so that it can be continued")
        raise PromptError.at("messages", f"the model's chat template raised an error: {error}") from error

    def starts_in_reasoning(self, prompt: Sequence[int], chat: Chat | None = None) -> bool:
        """Return whether a prompt ends in an open thought, which the answer continues."""
        start = self.thoughts.think_start
        if not start:
            return False
        if chat is not None and chat.continued:
            text = text_of(chat.messages[-1])
            return chat.continued != "content" or text.rfind(start) > text.rfind(self.thoughts.think_end)
        end: str = self.tokenizer.decode(list(prompt[-len(start) - 8 :]))
        return end.rstrip().endswith(start)


def _field_to_continue(messages: Sequence[Message]) -> str:
    """Return the field of the last message that an answer can continue. Raises PromptError if there is none."""
    where, last = f"messages[{len(messages) - 1}]", messages[-1]
    if last["role"] != "assistant":
        problem = f"only a message of the assistant can be continued, not of the {last['role']}"
        raise PromptError.at(f"{where}.role", problem)
    if "tool_calls" in last:
        raise PromptError.at(f"{where}.tool_calls", "a message with calls cannot be continued; send the calls' results")
    field = next((name for name in ("content", "reasoning_content") if last.get(name, "").strip()), None)
    if field is None:
        raise PromptError.at(f"{where}.content", "it is empty, so there is nothing to continue; leave this message out")
    return field


def _leaves_out(lost: Message, given: Sequence[Message]) -> PromptError:
    text = text_of(lost)
    index = next((at for at, m in enumerate(given) if m["content"] and text.startswith(m["content"])), 0)
    lost_text = f"the {lost['role']} message that begins with {text[:40]!r}"
    problem = f"this model's chat template leaves out {lost_text}, so the model would not see it"
    return PromptError.at(f"messages[{index}].content", f"{problem}; send it in another role or place")


def _encodes_the_text(tokenizer: TokenizerWrapper) -> bool:
    """Return whether a chat's tokens are those of its text. Some tokenizers, such as Mistral's, differ."""
    kind = type(tokenizer._tokenizer)
    ways = ("__call__", "encode", "apply_chat_template")
    return all(getattr(kind, name) is getattr(PreTrainedTokenizerBase, name) for name in ways)


def _check_kwargs(kwargs: Mapping[str, Any]) -> Mapping[str, Any]:
    if reserved := sorted(kwargs.keys() & _RESERVED):
        raise PromptError.at("chat_template_kwargs", f"{reserved[0]!r} cannot be set by a request")
    for name in ("add_generation_prompt", "enable_thinking"):
        if not isinstance(kwargs.get(name), bool | None):
            raise PromptError.at("chat_template_kwargs", f"{name} must be true or false")
    return kwargs
