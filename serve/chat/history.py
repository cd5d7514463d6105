"""Conversations for chat templates: reading messages, other forms of them, and a check that none is lost."""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from copy import deepcopy
from hashlib import sha256
from itertools import groupby
from typing import Any

from eagle_mlx.errors import PromptError

from .. import log_once
from .tools import CallForm, Tool, ToolCallTags

Message = Mapping[str, Any]
PARAGRAPH = "\n\n"  # separates texts that came separately

_COMMON_KEYS = {"role", "content", "name"}
_MORE_KEYS = {"assistant": {"tool_calls", "reasoning_content", "reasoning"}, "tool": {"tool_call_id"}}
"""The other allowed fields of messages, by the role in templates."""


def read_messages(messages: Sequence[Message]) -> list[dict[str, Any]]:
    """Return messages for templates: call arguments as objects, `developer` as `system`, and results in order.

    Fields have the types of `serve/api/schema.py`; contents are text. Raises PromptError that names the message.
    """
    read, ids = list[dict[str, Any]](), set[str | None]()
    for index, message in enumerate(messages):
        where = f"messages[{index}]"
        read.append(_message(message, where))
        ids |= {call.get("id") for call in read[-1].get("tool_calls", ())}
        answered = read[-1].get("tool_call_id")
        if answered is not None and ids.isdisjoint({answered, None}):  # a call without an id fits all
            missing = f"a call with the id {answered[:100]!r}; send the message with that call before its result"
            raise PromptError.at(f"{where}.tool_call_id", f"no earlier assistant message has {missing}")
    return results_in_order(read)


def results_in_order(messages: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return messages with results in the order of the calls before them, because most templates write no ids."""
    changed, places = list[dict[str, Any]](), dict[str | None, int]()
    for is_result, group in groupby(messages, key=lambda message: message["role"] == "tool"):
        turns = list(group)
        changed += sorted(turns, key=lambda turn: places.get(turn["tool_call_id"], -1)) if is_result else turns
        places = {call.get("id"): place for place, call in enumerate(turns[-1].get("tool_calls", ()))}
    return changed


def _message(message: Message, where: str) -> dict[str, Any]:
    role = "system" if message["role"] == "developer" else message["role"]
    given = {key: value for key, value in message.items() if value is not None and value != []}
    if unknown := sorted(given.keys() - _COMMON_KEYS - _MORE_KEYS.get(role, set())):
        raise PromptError.at(where, f"{unknown[0]!r} is not supported in a message of role {message['role']!r}")
    if "content" not in given and role in ("system", "user"):  # models write the others, and clients send them back
        raise PromptError.at(f"{where}.content", "must be text, or a list of text parts")
    if role == "tool" and "tool_call_id" not in given:
        raise PromptError.at(f"{where}.tool_call_id", "a tool message must name the call that it answers")
    if "reasoning" in given:
        given["reasoning_content"] = given.pop("reasoning")
    if "tool_calls" in given:
        given["tool_calls"] = list(map(_call, given["tool_calls"]))
    return {"content": "", **given, "role": role}


def _call(call: Message) -> dict[str, Any]:
    """Return a call with its arguments as an object, because templates write them in their own ways.

    Arguments that are no object become `{}`: a model wrote them, and its client sends them with every later turn.
    """
    function = call["function"]
    arguments = function.get("arguments") or "{}"
    try:
        arguments = json.loads(with_whole_pairs(arguments)) if isinstance(arguments, str) else arguments
    except (ValueError, RecursionError):
        arguments = None
    if not isinstance(arguments, dict):
        log_once(f"the call {call.get('id', '')!r} has arguments that are no JSON object; the model sees {{}} instead")
        arguments = {}
    return {**call, "type": "function", "function": {"name": function["name"], "arguments": arguments}}


_ESCAPE = re.compile(r"\\(?:u[dD][89abAB]..\\u[dD][c-fC-F]..|u[dD][89a-fA-F]..|.)", re.DOTALL)


def with_whole_pairs(text: str) -> str:
    """Return JSON text without halves of surrogate pairs: programs cut texts there, and prompts cannot hold them."""
    return _ESCAPE.sub(lambda match: r"\ufffd" if len(match[0]) == 6 else match[0], text) if r"\u" in text else text


Way = tuple[list[dict[str, Any]], Mapping[str, Any]]  # messages and the template's other arguments


def ways_to_render(
    messages: list[dict[str, Any]], arguments: Mapping[str, Any], calls: ToolCallTags | None
) -> Iterator[Way]:
    """Yield messages and arguments in the template's own way, then in others that may help.

    Some templates refuse ids of calls, system messages after the first turn or at all, a greeting of the assistant,
    roles that do not alternate, or a user after a result. Some cannot take call arguments as objects, or contents as
    text. Some take no tools or calls; text describes these in the system message, or in the user's if there is none.
    """
    if calls is not None and calls.one_by_one:
        messages = one_call_each(messages, with_thinking=not calls.rewrites)
    calling = any("tool_calls" in message for message in messages)
    form: list[dict[str, Any]] = []
    joining = (with_late_instructions_from_user, joined, with_answers)
    for change in (list, with_short_ids, *joining, with_instructions_from_user, with_user_first):
        if (changed := change(form or messages)) != form:
            form = changed
            yield form, arguments
            if calling:
                yield with_argument_texts(form), arguments
    if calls is not None and calls.parser == "dsml" and arguments["tools"] and messages[0]["role"] != "system":
        led = [{"role": "system", "content": ""}, *messages]  # DeepSeek's templates list tools only in that message
        yield from ((led, arguments), (with_argument_texts(led), arguments))
    if calls is not None and calls.parser == "pythonic" and calling:  # LFM2's templates leave out calls
        yield with_python_calls(messages, calls), arguments
    yield with_typed_parts(messages), arguments
    yield with_typed_parts(form), arguments
    tools = arguments["tools"] or ()
    if calls is not None and calls.form and calls.rewrites and (tools or calling):
        for place in ("system", "user"):
            yield as_text(messages, tools, calls.form, place), {**arguments, "tools": None}


def with_short_ids(messages: Sequence[Message]) -> list[dict[str, Any]]:
    """Return messages whose calls have ids of nine letters and digits, the only ones that Mistral's templates take."""
    changed = deepcopy(list(map(dict, messages)))
    named = [call for message in changed for call in message.get("tool_calls", ()) if "id" in call]
    for names, key in ((named, "id"), (changed, "tool_call_id")):
        for holder in names:
            if key in holder and not re.fullmatch("[a-zA-Z0-9]{9}", holder[key]):
                holder[key] = sha256(holder[key].encode()).hexdigest()[:9]
    return changed


def with_late_instructions_from_user(messages: Sequence[Message]) -> list[dict[str, Any]]:
    """Change late system messages to user messages, for templates that allow none after the first turn."""
    first = next((index for index, message in enumerate(messages) if message["role"] != "system"), len(messages))
    return [*map(dict, messages[:first]), *_from_user(messages[first:])]


def with_answers(messages: Sequence[Message]) -> list[dict[str, Any]]:
    """Return messages with a short answer in place of an empty one, and between a result, or a call, and the user."""
    changed, answer = list[dict[str, Any]](), {"role": "assistant", "content": "OK."}
    for before, message in zip(({}, *messages), messages, strict=False):
        if message["role"] == "user" and (before.get("role") == "tool" or "tool_calls" in before):
            changed.append(answer)
        is_empty = message["role"] == "assistant" and not (message["content"] or "tool_calls" in message)
        changed.append({**message, **(answer if is_empty else {})})
    return changed


def with_instructions_from_user(messages: Sequence[Message]) -> list[dict[str, Any]]:
    """Change system messages to user messages, and join them with others, for templates without a system role."""
    return joined(_from_user(messages))


def with_user_first(messages: Sequence[Message]) -> list[dict[str, Any]]:
    """Return messages that begin with an empty one of the user if the assistant's greeting is the first."""
    greets = bool(messages) and messages[0]["role"] == "assistant"
    return [*([{"role": "user", "content": ""}] if greets else []), *map(dict, messages)]


def _from_user(messages: Sequence[Message]) -> list[dict[str, Any]]:
    return [{**message, "role": "user" if message["role"] == "system" else message["role"]} for message in messages]


def joined(messages: Sequence[Message]) -> list[dict[str, Any]]:
    """Join consecutive messages of a role, except results, for templates whose roles must alternate."""
    changed: list[dict[str, Any]] = []
    for role, group in groupby(map(dict, messages), key=lambda message: message["role"]):
        turns = list(group)
        if role == "tool":
            changed += turns
            continue
        whole = {key: value for turn in turns for key, value in turn.items()}
        for key in whole.keys() & {"content", "reasoning_content"}:
            whole[key] = PARAGRAPH.join(filter(None, (turn.get(key) for turn in turns)))
        if "tool_calls" in whole:
            whole["tool_calls"] = [call for turn in turns for call in turn.get("tool_calls", ())]
        changed.append(whole)
    return changed


def with_argument_texts(messages: Sequence[Message]) -> list[dict[str, Any]]:
    """Return messages with call arguments as JSON text, for templates that concatenate them."""
    changed = deepcopy(list(map(dict, messages)))
    for function in (call["function"] for message in changed for call in message.get("tool_calls", ())):
        function["arguments"] = json.dumps(function["arguments"], ensure_ascii=False)
    return changed


def with_python_calls(messages: Sequence[Message], tags: ToolCallTags) -> list[dict[str, Any]]:
    """Return messages with calls as Python after their contents, as LFM2's models write them."""
    changed = list(map(dict, messages))
    for message in changed:
        if calls := message.pop("tool_calls", ()):
            written = f"{tags.start}[{', '.join(_in_python(call['function']) for call in calls)}]{tags.end}"
            message["content"] = "\n".join(filter(None, (message["content"], written)))
    return changed


def _in_python(function: Mapping[str, Any]) -> str:
    values = {
        key: json.dumps(v, ensure_ascii=False) if isinstance(v, str) else v for key, v in function["arguments"].items()
    }
    return f"{function['name']}({', '.join(f'{key}={value}' for key, value in values.items())})"


def with_typed_parts(messages: Sequence[Message]) -> list[dict[str, Any]]:
    """Return messages with contents as lists of parts, for templates that read only these."""
    return [{**message, "content": [{"type": "text", "text": message["content"]}]} for message in messages]


def one_call_each(messages: Sequence[Message], with_thinking: bool) -> list[dict[str, Any]]:
    """Return messages with at most one call each. The other calls go before their results.

    with_thinking: reasoning and content before a call become `thinking`, as gpt-oss's template takes them.
    """
    changed: list[dict[str, Any]] = []
    waiting: dict[str, dict[str, Any]] = {}
    for message in map(dict, messages):
        if calls := message.get("tool_calls"):
            message["tool_calls"] = calls[:1]
            waiting = {call["id"]: call for call in calls[1:] if "id" in call}
            if with_thinking and (thought := message.get("reasoning_content")):
                message |= {"thinking": PARAGRAPH.join(filter(None, (thought, message["content"]))), "content": ""}
        elif call := waiting.pop(message.get("tool_call_id", ""), None):
            changed.append({"role": "assistant", "content": "", "tool_calls": [call]})
        changed.append(message)
    return changed


_INSTRUCTIONS = """You have access to these functions:
{tools}

To call a function, write only this, and end your answer:
{form}

The next message has the result. If no function helps, answer without a call."""


def as_text(messages: Sequence[Message], tools: Sequence[Tool], form: CallForm, place: str) -> list[dict[str, Any]]:
    """Return messages with tools, calls and results in their contents. Roles alternate.

    place: the role that describes the tools, `system` or `user`; with `user`, there are no system messages.
    """
    functions = "\n".join(json.dumps(tool["function"], ensure_ascii=False) for tool in tools)
    example = form.write([("FUNCTION_NAME", '{"ARGUMENT_NAME": VALUE}')])
    instructions = _INSTRUCTIONS.format(tools=functions, form=example)
    names: dict[Any, str] = {}
    changed: list[dict[str, Any]] = [{"role": place, "content": instructions}] if tools else []
    for message in messages:
        role, content = message["role"], message["content"]
        if calls := message.get("tool_calls", ()):
            names |= {call.get("id"): call["function"]["name"] for call in calls}
            written = [(call["function"]["name"], json.dumps(call["function"]["arguments"])) for call in calls]
            content = "\n".join(filter(None, (content, form.write(written))))
        elif role == "tool":
            role, content = "user", f"Result of {names.get(message['tool_call_id'], 'the call')}:\n{content}"
        elif role == "system":
            role = place
        changed.append({"role": role, "content": content})
    return with_user_first(joined(changed))


_PIECE = re.compile(r"[^\s\x00-\x1f\"'\\<>&/]+(?: [^\s\x00-\x1f\"'\\<>&/]+)*")
"""Text that templates write as it is: they trim white space, escape JSON, and remove tags."""
_FLAG = re.compile(r"/(?:no_?)?think\b")  # switches of reasoning in messages, which templates remove
_HEAD = 4096  # characters of a message in which to look for such text
_MOST_PIECES = 4
"""Pieces of a message, longest first, of which one must be in the prompt; the others are no shorter than half."""
_MOST_SEARCHES = 64
"""Searches without success, each of which may read the whole prompt. Beyond them, nothing more is checked."""


def lost_message(messages: Sequence[Message], prompt: str, think_end: str) -> Message | None:
    """Return the first message whose text is not in the prompt, or None. Takes linear time.

    A role's messages must be in their order; results may be in another. Reasoning may be left out, also in contents,
    where it ends with `think_end`, and so may the text before a call.
    """
    places, failed = Counter[str](), 0
    for message in messages:
        role, content = message["role"], text_of(message)
        if "tool_calls" in message:
            continue
        if role == "assistant" and think_end:
            content = content.rpartition(think_end)[2]
        pieces = sorted(_PIECE.findall(_FLAG.sub("", content.lstrip()[:_HEAD])), key=len, reverse=True)[:_MOST_PIECES]
        pieces = [piece for piece in pieces if 2 * len(piece) >= len(pieces[0])]
        tries = [(piece, places[role]) for piece in pieces] + [(piece, 0) for piece in pieces if role == "tool"]
        for piece, start in tries:
            if (at := prompt.find(piece, start)) >= 0:
                places[role] = max(places[role], at + len(piece))
                break
            failed += 1
            if failed == _MOST_SEARCHES:
                return None
        else:
            if pieces:
                return message
    return None


def text_of(message: Message) -> str:
    """Return a message's content, which is text or one typed part."""
    content = message["content"]
    return content if isinstance(content, str) else str(content[0]["text"])
