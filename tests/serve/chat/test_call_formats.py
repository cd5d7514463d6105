"""Tool-call formats of model families: detected by template, and parsed however the text is cut.

Each line of the table in docs/agents.md is a test here, and each of mlx-lm's parsers is in one of its lines.
"""

from __future__ import annotations

import itertools
import json
import pkgutil
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import mlx_lm.tool_parsers
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from eagle_mlx.errors import PromptError
from eagle_mlx.serve.chat import AnswerParser, ChatFormat, Delta, ToolOffer
from eagle_mlx.text import IncrementalText
from tests.full import some
from tests.serve.chat.formats import HELLO, format_with_parser, format_with_template

QUOTE = '<|"|>'
"""Gemma 4's."""
GUIDE = Path(__file__).parents[3] / "docs" / "agents.md"
Arguments = dict[str, Any]
Calls = Sequence[tuple[str, Arguments]]


def tool(name: str, **types: str) -> dict[str, Any]:
    parameters = {"type": "object", "properties": {key: {"type": kind} for key, kind in types.items()}}
    return {"type": "function", "function": {"name": name, "parameters": parameters}}


TOOLS = [
    tool("get_weather", city="string", days="integer", metric="boolean"),
    tool("edit-file", path="string", options="object", lines="array"),
    tool("clock"),
]


def dumps(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False)


def plain(value: Any) -> str:
    """Return text as it is and other values as JSON, as most templates write arguments."""
    return value if isinstance(value, str) else dumps(value)


def json_tools(calls: Calls, prefix: str = "") -> str:
    written = [dumps({"name": name, "arguments": arguments}) for name, arguments in calls]
    return "\n".join(f"<{prefix}tool_call>\n{call}\n</{prefix}tool_call>" for call in written)


def qwen3_coder(calls: Calls) -> str:
    """Write calls with numbers and booleans as in Python."""
    out = []
    for name, arguments in calls:
        values = {
            key: plain(value) if isinstance(value, dict | list) else str(value) for key, value in arguments.items()
        }
        given = "".join(f"<parameter={key}>\n{value}\n</parameter>\n" for key, value in values.items())
        out.append(f"<tool_call>\n<function={name}>\n{given}</function>\n</tool_call>")
    return "\n".join(out)


def glm(calls: Calls, line: str = "\n", prefix: str = "") -> str:
    out = []
    for name, arguments in calls:
        given = (
            f"<{prefix}arg_key>{key}</{prefix}arg_key>{line}<{prefix}arg_value>{plain(value)}</{prefix}arg_value>{line}"
            for key, value in arguments.items()
        )
        out.append(f"<{prefix}tool_call>{name}{line}{''.join(given)}</{prefix}tool_call>")
    return "\n".join(out)


def glm47(calls: Calls) -> str:
    return glm(calls, "")


def longcat(calls: Calls) -> str:
    return glm(calls, prefix="longcat_")


def longcat_json(calls: Calls) -> str:
    return json_tools(calls, "longcat_")


def mistral(calls: Calls) -> str:
    return "".join(f"[TOOL_CALLS]{name}[ARGS]{dumps(arguments)}" for name, arguments in calls)


def old_mistral(calls: Calls) -> str:
    return "[TOOL_CALLS] " + dumps([{"name": name, "arguments": arguments} for name, arguments in calls])


def gemma_value(value: Any, quote: str) -> str:
    if isinstance(value, str):
        return f"{quote}{value}{quote}"
    if isinstance(value, dict):
        return "{" + ",".join(f"{key}:{gemma_value(item, quote)}" for key, item in value.items()) + "}"
    return "[" + ",".join(gemma_value(item, quote) for item in value) + "]" if isinstance(value, list) else dumps(value)


def gemma4(calls: Calls) -> str:
    written = (f"call:{name}{gemma_value(arguments, QUOTE)}" for name, arguments in calls)
    return "".join(f"<|tool_call>{call}<tool_call|>" for call in written)


def function_gemma(calls: Calls) -> str:
    out = []
    for name, arguments in calls:
        given = gemma_value(arguments, "<escape>")
        out.append(f"<start_function_call>call:{name}{given}<end_function_call>")
    return "".join(out)


def kimi_k2(calls: Calls) -> str:
    written = (
        f"<|tool_call_begin|>functions.{name}:{index}<|tool_call_argument_begin|>{dumps(arguments)}<|tool_call_end|>"
        for index, (name, arguments) in enumerate(calls)
    )
    return f"<|tool_calls_section_begin|>{''.join(written)}<|tool_calls_section_end|>"


def kimi_k3(calls: Calls) -> str:
    def argument(key: str, value: Any) -> str:
        kind = "string" if isinstance(value, str) else "json"
        return f'<|open|>argument key="{key}" type="{kind}"<|sep|>{plain(value)}<|close|>argument<|sep|>'

    written = (
        f'<|open|>call tool="{name}" index="{index}"<|sep|>'
        f"{''.join(itertools.starmap(argument, arguments.items()))}<|close|>call<|sep|>"
        for index, (name, arguments) in enumerate(calls, 1)
    )
    return f"<|open|>tools<|sep|>{''.join(written)}<|close|>tools<|sep|>"


def pythonic(calls: Calls) -> str:
    written = (
        f"{name}({', '.join(f'{key}={_python(value)}' for key, value in arguments.items())})"
        for name, arguments in calls
    )
    return f"<|tool_call_start|>[{', '.join(written)}]<|tool_call_end|>"


def _python(value: Any) -> str:
    return repr(value) if isinstance(value, bool) else dumps(value)


def minimax_m2(calls: Calls) -> str:
    written = (
        f'<invoke name="{name}">\n'
        + "".join(f'<parameter name="{key}">{plain(value)}</parameter>\n' for key, value in arguments.items())
        + "</invoke>\n"
        for name, arguments in calls
    )
    return f"<minimax:tool_call>\n{''.join(written)}</minimax:tool_call>"


def minicpm5(calls: Calls) -> str:
    def written(value: Any) -> str:
        text = plain(value)
        return f"<![CDATA[{text}]]>" if any(letter in text for letter in "<&\n") else text

    return "\n".join(
        f'<function name="{name}">'
        + "".join(f'<param name="{key}">{written(value)}</param>' for key, value in arguments.items())
        + "</function>"
        for name, arguments in calls
    )


def muse_spark(calls: Calls) -> str:
    written = (
        f'<atem:invoke name="{name}">\n'
        + "".join(f'<atem:parameter name="{key}">{dumps(value)}</atem:parameter>\n' for key, value in arguments.items())
        + "</atem:invoke>\n"
        for name, arguments in calls
    )
    return f"<atem:function_calls>\n{''.join(written)}</atem:function_calls>"


def harmony(calls: Calls) -> str:
    return "<|start|>assistant".join(
        f"<|channel|>commentary to=functions.{name} <|constrain|>json<|message|>{dumps(arguments)}<|call|>"
        for name, arguments in calls
    )


def template_harmony(calls: Calls) -> str:
    """Write calls as gpt-oss's template does."""
    return "<|start|>assistant".join(
        f" to=functions.{name}<|channel|>commentary json<|message|>{dumps(arguments)}<|call|>"
        for name, arguments in calls
    )


def llama(calls: Calls) -> str:
    return "; ".join(dumps({"name": name, "parameters": arguments}) for name, arguments in calls)


def fenced(calls: Calls) -> str:
    written = (dumps({"name": name, "parameters": arguments}) for name, arguments in calls)
    return "```json\n" + "\n".join(written) + "\n```"


def bare_pythonic(calls: Calls) -> str:
    return pythonic(calls).removeprefix("<|tool_call_start|>").removesuffix("<|tool_call_end|>")


def tool_code(calls: Calls) -> str:
    return "```tool_code\n" + "\n".join(bare_pythonic([call])[1:-1] for call in calls) + "\n```"


def deepseek_v3(calls: Calls) -> str:
    written = (
        f"<\uff5ctool▁call▁begin\uff5c>function<\uff5ctool▁sep\uff5c>{name}\n```json\n{dumps(arguments)}\n```"
        "<\uff5ctool▁call▁end\uff5c>"
        for name, arguments in calls
    )
    return "<\uff5ctool▁calls▁begin\uff5c>" + "\n".join(written) + "<\uff5ctool▁calls▁end\uff5c>"


def deepseek_v31(calls: Calls) -> str:
    written = (
        f"<\uff5ctool▁call▁begin\uff5c>{name}<\uff5ctool▁sep\uff5c>{dumps(arguments)}<\uff5ctool▁call▁end\uff5c>"
        for name, arguments in calls
    )
    return "<\uff5ctool▁calls▁begin\uff5c>" + "".join(written) + "<\uff5ctool▁calls▁end\uff5c>"


def dsml(calls: Calls, name: str = "function_calls", space: str = "") -> str:
    bar = f"\uff5cDSML\uff5c{space}"
    written = (
        f'<{bar}invoke name="{function}">\n'
        + "".join(
            f'<{bar}parameter name="{key}" string="{dumps(isinstance(value, str))}">{plain(value)}</{bar}parameter>\n'
            for key, value in arguments.items()
        )
        + f"</{bar}invoke>\n"
        for function, arguments in calls
    )
    return f"<{bar}{name}>\n{''.join(written)}</{bar}{name}>"


def dsml_v4(calls: Calls) -> str:
    return dsml(calls, "tool_calls")


def dsml_v41(calls: Calls) -> str:
    return dsml(calls, "calls", " ")


@dataclass(frozen=True)
class Family:
    """Models whose templates describe calls in the same way."""

    parser: str
    template: str
    """Its characteristic part."""
    writers: tuple[Callable[[Calls], str], ...] = ()
    """Functions that write calls in such models' forms."""
    vocabulary: tuple[str, ...] = ()
    dashes: bool = True
    """Whether a function's name may contain a dash."""


def loop(text: str) -> str:
    return "{% for tool_call in tool_calls %}" + text + "{% endfor %}"


FAMILIES = {
    "Qwen2.5, Qwen3": Family(
        "json_tools", loop('<tool_call>\n{"name": "{{ tool_call.name }}"}\n</tool_call>'), (json_tools,)
    ),
    "Qwen3-Coder, Qwen3.5": Family(
        "qwen3_coder", loop("{{ '<tool_call>\\n<function=' + tool_call.name + '>' }}"), (qwen3_coder,)
    ),
    "GLM-4.5 to GLM-4.7": Family("glm47", loop("<tool_call>{{ tool_call.name }}<arg_key>"), (glm, glm47)),
    "Gemma 4": Family("gemma4", loop("<|tool_call>call:{{ tool_call.name }}<tool_call|>"), (gemma4,)),
    "FunctionGemma": Family(
        "function_gemma",
        loop("<start_function_call>call:{{ tool_call.name }}<end_function_call>"),
        (function_gemma,),
    ),
    "Mistral, Ministral, Devstral, Magistral": Family(
        "mistral", loop("[TOOL_CALLS]{{ tool_call.name }}[ARGS]"), (mistral, old_mistral)
    ),
    "Kimi K2": Family("kimi_k2", loop("<|tool_calls_section_begin|>{{ tool_call.name }}"), (kimi_k2,)),
    "Kimi K3": Family("kimi_k3", "", (kimi_k3,), ("<|open|>", "<|close|>", "<|sep|>", "<|end_of_msg|>")),
    "LongCat": Family("longcat", loop("<longcat_tool_call>{{ tool_call.name }}"), (longcat, longcat_json)),
    "LFM2": Family(
        "pythonic", "<|tool_list_start|>", (pythonic,), ("<|tool_call_start|>", "<|tool_call_end|>"), dashes=False
    ),
    "MiniCPM5": Family("minicpm5", '<function name="f"><param name="p">', (minicpm5,)),
    "MiniMax M2": Family("minimax_m2", "<minimax:tool_call>", (minimax_m2,)),
    "Muse Spark": Family("muse_spark", "<atem:function_calls>", (muse_spark,)),
    "Laguna": Family("laguna", "", (glm47,)),
    "gpt-oss": Family("harmony", "<|channel|>commentary json<|message|>", (harmony, template_harmony)),
    "Llama 3.1 to 3.3, Llama 4": Family("llama", '{"name": function name, "parameters": dictionary}', (llama, fenced)),
    "Gemma 2, Gemma 3": Family("gemma", "<start_of_turn>model", (fenced, bare_pythonic, tool_code), dashes=False),
    "DeepSeek V3, R1": Family(
        "deepseek", "<\uff5ctool▁calls▁begin\uff5c>" + loop("{{ tool_call.name }}"), (deepseek_v3, deepseek_v31)
    ),
    "DeepSeek V3.2, V4, V4.1": Family("dsml", "", (dsml, dsml_v4, dsml_v41), ("\uff5cDSML\uff5c",)),
}
OWN = {"harmony", "llama", "gemma", "deepseek", "dsml"}
CALLING = [
    pytest.param(name, writer, id=f"{name}: {writer.__name__}")
    for name, family in FAMILIES.items()
    for writer in family.writers
]


def format_of(name: str) -> ChatFormat:
    family = FAMILIES[name]
    if name == "Laguna":  # its checkpoints name the parser; its template resembles GLM's
        return format_with_parser("laguna")
    return format_with_template(family.template or "{{ messages }}", family.vocabulary)


def texts(more: str) -> st.SearchStrategy[str]:
    """Return texts without spaces at their ends, which some formats drop."""
    return st.text(f"aé漢😀 '\"[],:\\\n<&(={more}", max_size=12).map(lambda text: f"x{text}x")


def arguments_of(family: Family) -> st.SearchStrategy[tuple[str, Arguments]]:
    text = texts("{}")
    weather = st.fixed_dictionaries({"city": text, "days": st.integers(-9, 99)}, optional={"metric": st.booleans()})
    kinds = [st.tuples(st.just("get_weather"), weather), st.just(("clock", Arguments()))]
    inner = texts("") | st.integers(0, 9) | st.booleans()
    edit = {
        "path": text,
        "options": st.dictionaries(st.sampled_from(["a", "bc"]), inner | st.lists(inner, max_size=2), max_size=2),
        "lines": st.lists(inner, min_size=1, max_size=2),
    }
    if family.dashes:
        kinds.append(st.tuples(st.just("edit-file"), st.fixed_dictionaries(edit)))
    return st.one_of(kinds)


def read(format: ChatFormat, parts: Sequence[str]) -> tuple[str, list[tuple[int, str, Arguments]]]:
    """Return the text of an answer that comes in parts, and its calls as OpenAI's clients get them."""
    reader = AnswerParser(format, ToolOffer.of(TOOLS))
    deltas: list[Delta] = [delta for part in parts for delta in reader.push(part)] + reader.finish()
    calls = [delta.tool_call for delta in deltas if delta.tool_call is not None]
    assert len({call.id for call in calls}) == len(calls)
    assert all(isinstance(json.loads(call.arguments), dict) for call in calls)
    content = "".join(delta.content for delta in deltas)
    return content, [(call.index, call.name, json.loads(call.arguments)) for call in calls]


@pytest.mark.parametrize("name", list(FAMILIES))
def test_a_family_is_detected_by_its_template_or_vocabulary(name: str) -> None:
    calls = format_of(name).calls
    assert calls is not None
    assert calls.parser == ("glm47" if name == "Laguna" else FAMILIES[name].parser)


@pytest.mark.parametrize(("name", "writer"), CALLING)
def test_calls_of_a_family_are_parsed_whole_and_in_pieces(name: str, writer: Callable[[Calls], str]) -> None:
    family, format = FAMILIES[name], format_of(name)

    @settings(max_examples=some(12), deadline=None)
    @given(
        st.lists(arguments_of(family), min_size=1, max_size=3),
        st.sampled_from(["", "I look.\n"]),
        st.lists(st.integers(0, 300), max_size=8),
    )
    def check(calls: list[tuple[str, Arguments]], before: str, cuts: list[int]) -> None:
        text = before + writer(calls)
        expected = (before.rstrip("\n"), [(index, *call) for index, call in enumerate(calls)])
        places = sorted({0, *(min(cut, len(text)) for cut in cuts), len(text)})
        assert read(format, [text]) == expected
        assert read(format, [text[a:b] for a, b in itertools.pairwise(places)]) == expected
        assert read(format, list(text)) == expected

    check()


@pytest.mark.parametrize(("name", "writer"), CALLING)
def test_an_answer_ends_with_its_only_call_in_every_format(name: str, writer: Callable[[Calls], str]) -> None:
    format = format_of(name)
    tokenizer = format.tokenizer
    assert tokenizer is not None
    after = "" if writer is old_mistral else "\nDone."  # its list of calls lasts until the answer ends
    text = "I look.\n" + writer([("get_weather", {"city": "Oslo", "days": 1}), ("clock", {})]) + after
    ends, decoder = AnswerParser(format, ToolOffer.of(TOOLS, parallel=False)).ends_with, IncrementalText(tokenizer)
    tokens = tokenizer.encode(text, add_special_tokens=False)
    last = next((at for at, token in enumerate(tokens) if ends(token, decoder.add([token])[0])), len(tokens))
    reader = AnswerParser(format, ToolOffer.of(TOOLS, parallel=False))
    deltas = [*reader.push(tokenizer.decode(tokens[: last + 1])), *reader.finish()]
    assert [delta.content for delta in deltas if delta.content] == ["I look."]
    calls = [delta.tool_call for delta in deltas if delta.tool_call is not None]
    assert [(call.name, json.loads(call.arguments)) for call in calls] == [("get_weather", {"city": "Oslo", "days": 1})]
    assert last < len(tokens) - 1 or not after


def test_deepseeks_template_lists_tools_and_calls_without_a_system_message() -> None:
    family = FAMILIES["DeepSeek V3.2, V4, V4.1"]
    format = format_with_template(family.template, family.vocabulary, renderer="deepseek_v32")
    function = {"name": "clock", "arguments": "{}"}
    call = {"role": "assistant", "content": "", "tool_calls": [{"id": "a", "type": "function", "function": function}]}
    text = format.chat([*HELLO, call, {"role": "tool", "tool_call_id": "a", "content": "noon"}], TOOLS).text
    assert '"name": "get_weather"' in text
    assert '<\uff5cDSML\uff5cinvoke name="clock">' in text


def test_other_families_refuse_tools_and_their_calls_stay_text() -> None:
    format = format_with_template("{{ messages }}")
    assert format.calls is None
    with pytest.raises(PromptError, match="no parser for this model's tool calls"):
        format.chat(HELLO, TOOLS).tokens()
    text = '<call>{"name": "clock", "parameters": {}}'
    assert read(format, list(text)) == (text, [])


def test_the_guide_has_the_same_table() -> None:
    section = GUIDE.read_text().split("## Tool calls")[1].split("\n## ")[0]
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in section.replace("\\|", "¦").split("\n")]
    told = {row[0]: row[1:] for row in rows if len(row) == 4 and row[0] in FAMILIES}
    assert set(told) == set(FAMILIES)
    for name, (parser, marks, _) in told.items():
        family = FAMILIES[name]
        assert parser == f"`{family.parser}`"
        vocabulary = (family.template + " ".join(family.vocabulary)).replace("|", "¦").replace("\n", "\\n")
        for mark in re.findall("`([^`]+)`", marks):
            assert mark in vocabulary or mark == "tool_parser_type"


def test_every_parser_of_mlx_lm_is_in_the_table() -> None:
    parsers = {module.name for module in pkgutil.iter_modules(mlx_lm.tool_parsers.__path__)}
    assert parsers == {family.parser for family in FAMILIES.values()} - OWN
