"""Formats of calls and reasoning that mlx-lm has no parser for."""

from __future__ import annotations

from collections.abc import Mapping

from mlx_lm.tokenizer_utils import TokenizerWrapper

from .call_formats import deepseek_tag
from .call_markup import DSML_BAR
from .tools import AnswerStates, CallForm, ToolCallTags

JSON_TOOLS = CallForm('\n{"name": "', '", "arguments": ', "}\n", "<tool_call>", "</tool_call>", outer="\n")
"""The form of mlx-lm's parser `json_tools`."""

# https://github.com/openai/openai-cookbook/blob/main/articles/openai-harmony.md
_START, _ANALYSIS, _JSON = "<|start|>assistant", "<|channel|>analysis", " <|constrain|>json"
_ENDS = (_START, "<|end|>", "<|return|>")
_STAY = (_JSON, "<|message|>")
_BUILT_IN = (
    *(f"<|channel|>{name} to={tool}" for name in ("commentary", "analysis") for tool in ("python", "browser")),
    *(
        f" to={tool}{after}"
        for tool in ("python", "browser.search", "browser.open", "browser.find")
        for after in ("<|channel|>", " <|constrain|>")
    ),
)
"""Messages to tools that the server does not have. They are no content."""
_HARMONY_THOUGHTS = AnswerStates(
    f"{_ANALYSIS}<|message|>",
    "<|end|>",
    {
        "content": [
            (_ANALYSIS, "reasoning"),
            *((tag, "content") for tag in (*_ENDS, *_STAY, "<|channel|>final", "<|channel|>commentary", "<|call|>")),
            *((tag, "hidden") for tag in _BUILT_IN),
        ],
        "reasoning": [
            *((tag, "reasoning") for tag in (_ANALYSIS, *_STAY)),
            *((tag, "content") for tag in (*_ENDS, "<|channel|>final<|message|>", "<|channel|>commentary<|message|>")),
            *((tag, "hidden") for tag in _BUILT_IN),
        ],
        "hidden": [(tag, "content") for tag in (*_ENDS, "<|call|>")],
    },
    resume=_START,
    answer=f"<|channel|>final{_JSON}<|message|>",
)
"""gpt-oss's channels: `analysis` is reasoning, the others are content. A `commentary` with a recipient is a call."""

_HARMONY = ToolCallTags(
    " to=functions.",
    "<|call|>",
    "harmony",
    CallForm("<|channel|>commentary to=functions.", f"{_JSON}<|message|>", ""),
    one_by_one=True,
    variants=((" to=functions.", "<|end|>"),),
)
_CALL, _SEP, _CALL_END = map(deepseek_tag, ("call▁begin", "sep", "call▁end"))
_CALLS, _CALLS_END = map(deepseek_tag, ("calls▁begin", "calls▁end"))
_V3 = CallForm(f"{_CALL}function{_SEP}", "\n```json\n", f"\n```{_CALL_END}", _CALLS, _CALLS_END, "\n")
_V31 = CallForm(_CALL, _SEP, _CALL_END, _CALLS, _CALLS_END, "")
_PLAIN = CallForm('{"name": "', '", "parameters": ', "}", outer="; ")


_MARKS: Mapping[tuple[str, ...], ToolCallTags] = {
    ("<|channel|>commentary",): _HARMONY,
    (_CALLS, "```json"): ToolCallTags(_CALLS, _CALLS_END, "deepseek", _V3, rewrites=True),
    (_CALLS,): ToolCallTags(_CALLS, _CALLS_END, "deepseek", _V31, rewrites=True),
    ('"parameters": dictionary',): ToolCallTags("", "", "llama", _PLAIN, one_by_one=True, rewrites=True),
    ("<start_of_turn>",): ToolCallTags("", "", "gemma", _PLAIN, one_by_one=True, rewrites=True),
}
"""For each family, the parts that its chat templates have. The first that fits counts."""


_DSML = ToolCallTags(
    f"<{DSML_BAR}function_calls>",
    f"</{DSML_BAR}function_calls>",
    "dsml",
    variants=tuple((f"<{DSML_BAR}{name}>", f"</{DSML_BAR}{name}>") for name in ("tool_calls", " calls")),
)
"""DeepSeek V3.2, V4 and V4.1 write different tags around the same notation."""
_BARE = {"qwen3_coder": ("<function=", "</function>"), "minicpm5": ("<function name=", "</function>")}
"""Functions that models write without other tags around them."""
_THOUGHTS = (
    ("<think>", "</think>"),
    ("[THINK]", "[/THINK]"),
    ("<seed:think>", "</seed:think>"),
    ("<|START_THINKING|>", "<|END_THINKING|>"),
)
"""Tags of thoughts that mlx-lm does not know, or knows only as single tokens."""


def call_tags(tokenizer: TokenizerWrapper) -> ToolCallTags | None:
    """Return how a model with this tokenizer writes calls, or None if it is unknown."""
    if tokenizer.has_tool_calling:
        name = str(getattr(tokenizer.tool_parser, "__module__", "")).rsplit(".", 1)[-1]
        form = JSON_TOOLS if name == "json_tools" else None
        return ToolCallTags(tokenizer.tool_call_start, tokenizer.tool_call_end or "", name, form, bare=_BARE.get(name))
    template = templates(tokenizer)
    dsml = _DSML if DSML_BAR in tokenizer.get_vocab() or DSML_BAR in template else None
    return next((tags for marks, tags in _MARKS.items() if all(mark in template for mark in marks)), dsml)


def templates(tokenizer: TokenizerWrapper) -> str:
    """Return the source of a tokenizer's chat templates."""
    template = tokenizer.chat_template or ""
    return "\n".join(template.values()) if isinstance(template, Mapping) else str(template)


def answer_states(tokenizer: TokenizerWrapper) -> AnswerStates:
    """Return the states of a model's answers: reasoning, content, and those of its template. All tags are dropped."""
    if call_tags(tokenizer) is _HARMONY:
        return _HARMONY_THOUGHTS
    names = {"normal": "content"}
    edges: dict[str, list[tuple[str, str]]] = {}
    start, end = tokenizer.think_start, tokenizer.think_end
    if not tokenizer.has_thinking:
        vocab, template = tokenizer.get_vocab(), templates(tokenizer)
        pairs = (pair for pair in _THOUGHTS if all(tag in vocab for tag in pair) or pair[1] in template)
        start, end = next(pairs, ("", ""))
    if start:
        edges["reasoning"] = [(end, "content"), *((tag, "content") for tag in tokenizer.structural_markers)]
    edges["content"] = [(tag, "content") for tag in tokenizer.structural_markers]
    for state, leads in tokenizer.response_transitions.items():
        own = edges.setdefault(names.get(state, state), [])
        own += [(tag, names.get(to, to)) for tag, to in leads if to != "tool"]
    initial = tokenizer.response_initial_state or ""
    return AnswerStates(start, end, edges, names.get(initial, initial))
