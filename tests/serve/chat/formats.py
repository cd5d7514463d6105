"""Targets with several models' chat formats: short templates, their tags, one vocabulary."""

from __future__ import annotations

import json
import shutil
import string
import tempfile
from collections.abc import Callable, Sequence
from functools import cache
from pathlib import Path
from typing import Any

from mlx_lm.tokenizer_utils import TokenizerWrapper
from mlx_lm.tokenizer_utils import load as load_tokenizer

import eagle_mlx as em
from eagle_mlx.sampling_params import Grammar
from eagle_mlx.serve.chat import ChatFormat
from tests.fakes import EMBEDDED_TARGET, TOKENIZER_FILES, tiny_target

VOCAB = 4160
"""The models' vocabularies are larger than their tokenizers', as in real models."""

WIDE = 49_152
END = 2
"""The token that ends an answer."""

_TURNS = """
{%- for m in messages %}
  {{- '<|im_start|>' + m.role + '\\n' }}
  {#- thoughts #}
  {{- m.content }}
  {%- for tool_call in m.tool_calls or [] %}
    {{- '\\n<tool_call>\\n{"name": "' + (tool_call.name or tool_call.function.name) + '", "arguments": ' }}
    {{- tool_call.function.arguments | tojson }}{{ '}\\n</tool_call>' }}
  {%- endfor %}
  {{- '<|im_end|>\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"""
_THOUGHTS = _TURNS.replace(
    "  {#- thoughts #}",
    "  {%- if m.reasoning_content %}{{ '<think>\\n' + m.reasoning_content + '\\n</think>\\n\\n' }}{% endif %}",
)
_TOOLS = """
{%- if tools %}{{ '<|im_start|>system\\n# Tools\\n' }}{% for t in tools %}{{ t | tojson }}{{ '\\n' }}{% endfor %}
  {{- '<|im_end|>\\n' }}
{%- endif %}"""
_JOINED = """
{%- if tools %}{{ tools | tojson }}{% endif %}
{%- for m in messages %}
  {{- m.role + ': ' + m.content }}
  {%- for c in m.tool_calls or [] %}{{ ' calls ' + c.function.name + ' ' + c.function.arguments }}{% endfor %}
  {{- '\\n' }}
{%- endfor %}"""
_MISTRAL = """
{%- if tools %}{{ '[AVAILABLE_TOOLS]' + tools | tojson + '[/AVAILABLE_TOOLS]' }}{% endif %}
{%- for m in messages %}
  {%- if m.role == 'user' %}{{ '[INST]' + m.content + '[/INST]' }}
  {%- elif m.role == 'assistant' %}
    {%- for c in m.tool_calls or [] %}
      {%- if c.id | length != 9 %}{{ raise_exception('ids have nine letters') }}{% endif %}
      {{- '[TOOL_CALLS]' + c.function.name + '[ARGS]' + c.function.arguments | tojson }}
    {%- endfor %}{{ m.content }}
  {%- else %}{{ raise_exception('only user and assistant may speak, not ' + m.role) }}{% endif %}
{%- endfor %}"""

_HARMONY = """
{%- if tools %}{{ '<|start|>developer<|message|># Tools\\n' + tools | tojson + '<|end|>' }}{% endif %}
{%- for m in messages %}
  {%- if m.tool_calls %}
    {%- if m.content and m.thinking %}{{ raise_exception('either content or thinking') }}{% endif %}
    {%- if m.thinking %}{{ '<|start|>assistant<|channel|>analysis<|message|>' + m.thinking + '<|end|>' }}{% endif %}
    {{- '<|start|>assistant to=functions.' + m.tool_calls[0].function.name + '<|channel|>commentary json<|message|>' }}
    {{- m.tool_calls[0].function.arguments | tojson + '<|call|>' }}
  {%- else %}{{ '<|start|>' + m.role + '<|message|>' + m.content + '<|end|>' }}{% endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<|start|>assistant' }}{% endif %}"""
_LLAMA = """
{%- if tools %}{{ 'Respond in the format {"name": function name, "parameters": dictionary of arguments}.' }}
  {{- tools | tojson }}
{%- endif %}
{%- for m in messages %}
  {%- if m.tool_calls | length > 1 %}{{ raise_exception('only single tool-calls at once') }}{% endif %}
  {{- '<|' + m.role + '|>' + m.content }}{% if m.tool_calls %}{{ m.tool_calls[0].function | tojson }}{% endif %}
{%- endfor %}"""
_GEMMA = """
{%- for m in messages %}
  {%- if m.role not in ('user', 'assistant') %}{{ raise_exception(m.role + ' role not supported') }}{% endif %}
  {%- if (m.role == 'user') != (loop.index0 % 2 == 0) %}{{ raise_exception('roles must alternate') }}{% endif %}
  {{- '<start_of_turn>' + m.role + '\\n' + m.content + '<end_of_turn>\\n' }}
{%- endfor %}"""
_DEEPSEEK = """
{%- for m in messages %}
  {{- '<' + m.role + '>' + m.content }}
  {%- for c in m.tool_calls if m.content is none %}
    {{- '<\uff5ctool▁calls▁begin\uff5c><\uff5ctool▁call▁begin\uff5c>' + c.type + '<\uff5ctool▁sep\uff5c>' }}
    {{- c.function.name }}
    {{- '\\n```json\\n' + c.function.arguments + '\\n```<\uff5ctool▁call▁end\uff5c><\uff5ctool▁calls▁end\uff5c>' }}
  {%- endfor %}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<think>\\n' }}{% endif %}"""

TEMPLATES = {
    "plain": (EMBEDDED_TARGET / "chat_template.jinja").read_text(),
    "qwen": _TOOLS + _TURNS,
    "thinking": _TOOLS + _THOUGHTS + "{% if add_generation_prompt and enable_thinking %}{{ '<think>\\n' }}{% endif %}",
    "llama": _TOOLS.replace("# Tools", "Answer with JSON.") + _TURNS.split("  {%- for tool_call")[0] + "{% endfor %}",
    "joined": _JOINED,
    "mistral": _MISTRAL,
    "coder": _TOOLS + _TURNS,
    "gpt-oss": _HARMONY,
    "llama3": _LLAMA,
    "gemma": _GEMMA,
    "deepseek": _DEEPSEEK,
}
TOOL_TAGS = ("<tool_call>", "</tool_call>")
THINK_TAGS = ("<think>", "</think>")
ADDED = {
    "qwen": TOOL_TAGS,
    "thinking": (*TOOL_TAGS, *THINK_TAGS),
    "joined": TOOL_TAGS,
    "coder": TOOL_TAGS,
    "mistral": ("[TOOL_CALLS]", "[ARGS]"),
    "gpt-oss": tuple(f"<|{n}|>" for n in ("start", "channel", "message", "end", "constrain", "call", "return")),
    "deepseek": (
        *THINK_TAGS,
        *(f"<\uff5ctool▁{n}\uff5c>" for n in ("calls▁begin", "call▁begin", "sep", "call▁end", "calls▁end")),
    ),
}
PARSERS = {"joined": "json_tools", "coder": "qwen3_coder"}

WEATHER = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "The weather in a city.",
        "parameters": {
            "type": "object",
            "properties": {"city": {"enum": ["Rome", "Oslo"]}, "days": {"$ref": "#/$defs/days"}},
            "required": ["city", "days"],
            "additionalProperties": False,
            "$defs": {"days": {"type": "integer", "minimum": 1, "maximum": 9}},
        },
    },
}
CLOCK = {
    "type": "function",
    "function": {"name": "clock", "parameters": {"properties": {}, "additionalProperties": False}},
}
HELLO = [{"role": "user", "content": "hello"}]
SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 8},
        "level": {"enum": ["low", "middle", "high"]},
        "counts": {"type": "array", "items": {"type": "integer", "minimum": 0, "maximum": 99}, "maxItems": 3},
        "open": {"type": ["boolean", "null"]},
    },
    "required": ["name", "level", "counts", "open"],
    "additionalProperties": False,
}
ANSWER = '{"name": "é漢", "level": "high", "counts": [1, 23], "open": null}'
CALL = '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Rome", "days": 3}}\n</tool_call>'


def by_schema(schema: Any, **more: Any) -> dict[str, Any]:
    return {"type": "json_schema", "json_schema": {"name": "answer", "schema": schema, **more}}


@cache
def tokenizer_of(
    name: str, special: bool = False, parser: str | None = None, normalizer: str | None = None
) -> TokenizerWrapper:
    """Return a tokenizer. special: whether the added tags are special tokens, which differs between models."""
    added, parser = ADDED.get(name, ()), parser or PARSERS.get(name)
    with tempfile.TemporaryDirectory() as folder:
        return _load(Path(folder), TEMPLATES[name], added, special, parser, normalizer)


def _load(
    folder: Path,
    template: str,
    added: Sequence[str],
    special: bool = False,
    parser: str | None = None,
    normalizer: str | None = None,
    renderer: str | None = None,
) -> TokenizerWrapper:
    for file in TOKENIZER_FILES:
        shutil.copy(EMBEDDED_TARGET / file, folder / file)
    path = folder / "tokenizer.json"
    content = json.loads(path.read_text())
    flags = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False, "special": special}
    content["added_tokens"] += [{"id": 4096 + index, "content": tag, **flags} for index, tag in enumerate(added)]
    content["normalizer"] = {"type": normalizer} if normalizer else content["normalizer"]
    path.write_text(json.dumps(content))
    (folder / "chat_template.jinja").write_text(template)
    config = {"tool_parser_type": parser, "chat_template_type": renderer}
    return load_tokenizer(folder, {key: value for key, value in config.items() if value})


@cache
def target_of(name: str, special: bool = False, seed: int = 0, normalizer: str | None = None) -> em.Target:
    tokenizer = tokenizer_of(name, special, normalizer=normalizer)
    return em.Target(tiny_target(seed, layers=2, vocab=VOCAB).model, tokenizer, name=name)


@cache
def format_of(name: str, special: bool = False) -> ChatFormat:
    return ChatFormat.of(target_of(name, special))


@cache
def format_with_parser(parser: str) -> ChatFormat:
    """Return the format of a model whose calls this parser of mlx-lm reads."""
    target = tiny_target(layers=2)
    return ChatFormat.of(em.Target(target.model, tokenizer_of("qwen", parser=parser), name=parser))


@cache
def format_with_template(template: str, added: tuple[str, ...] = (), renderer: str | None = None) -> ChatFormat:
    """Return the format that mlx-lm detects for this template and these added tokens.

    renderer: the module of mlx-lm's that writes prompts instead of the template.
    """
    with tempfile.TemporaryDirectory() as folder:
        tokenizer = _load(Path(folder), template, added, renderer=renderer)
    return ChatFormat.of(em.Target(tiny_target(layers=2).model, tokenizer, name="told"))


def allows(make: Callable[[], Grammar] | None, text: str, name: str = "plain", special: bool = False) -> bool:
    """Return whether the text can be written token by token, and can end there."""
    assert make is not None
    grammar = make()
    for token in tokenizer_of(name, special).encode(text, add_special_tokens=False):
        allowed = bool(grammar.mask()[token].item())
        assert grammar.advance(token) == allowed
        if not allowed:
            return False
    return bool(grammar.mask()[END].item())


def with_format(source: Path, name: str, folder: Path) -> Path:
    """Return a folder with another folder's target and this chat format.

    The tags replace the tokens of the last merges, so the vocabulary keeps its size and heads fit.
    """
    folder.mkdir(parents=True, exist_ok=True)
    for file in (*source.glob("*config.json"), *source.glob("*.safetensors*")):
        (folder / file.name).symlink_to(file.resolve())
    content = json.loads((source / "tokenizer.json").read_text())
    vocab, merges = content["model"]["vocab"], content["model"]["merges"]
    for tag in ADDED.get(name, ()):
        last = "".join(merges.pop())
        vocab[tag] = vocab.pop(last)
        flags = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False, "special": True}
        content["added_tokens"].append({"id": vocab[tag], "content": tag, **flags})
    (folder / "tokenizer.json").write_text(json.dumps(content))
    (folder / "chat_template.jinja").write_text(TEMPLATES[name])
    return folder


@cache
def wide_tokenizer() -> TokenizerWrapper:
    """Return a tokenizer of 49,152 tokens, a common size: bytes, and two or three letters with and without a space."""
    with tempfile.TemporaryDirectory() as folder:
        for file in TOKENIZER_FILES:
            shutil.copy(EMBEDDED_TARGET / file, Path(folder) / file)
        path = Path(folder) / "tokenizer.json"
        content = json.loads(path.read_text())
        vocab, merges = dict(content["model"]["vocab"]), list(content["model"]["merges"])
        letters = string.ascii_lowercase + string.ascii_uppercase
        pairs = [(a, b) for a in ["\u0120", *letters] for b in letters]
        pieces = [*pairs, *((a + b, c) for a, b in pairs for c in string.ascii_lowercase)]
        for first, second in pieces:
            if len(vocab) < WIDE and first in vocab and first + second not in vocab:
                vocab[first + second] = len(vocab)
                merges.append([first, second])
        assert len(vocab) == WIDE
        content["model"] |= {"vocab": vocab, "merges": merges}
        path.write_text(json.dumps(content))
        return load_tokenizer(Path(folder), {})
