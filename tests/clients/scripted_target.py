"""A target that says given texts: a folder with real weights, which every command can load.

Each piece of a text has its own token, and the weights map each of these tokens to the next. The chat template selects
the text: it ends the prompt with the token before the text's start. So a server reads, drafts, verifies and streams as
usual, and programs get meaningful answers.
"""

from __future__ import annotations

import itertools
import json
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import eagle_mlx  # noqa: F401  (brings the fast BLAS before MLX)

import mlx.core as mx  # isort: skip
import numpy as np
from mlx.utils import tree_flatten
from mlx_lm.models import qwen3
from tokenizers.pre_tokenizers import ByteLevel

from tests.fakes import EMBEDDED_TARGET, TOKENIZER_FILES

CONTEXT = 131_072
"""Enough for every agent's prompts."""
CERTAIN = 10.0
"""The logit advantage of the next token, in units of a hidden state's length, so that samples are certain too."""
PIECE = 12
"""Characters of a token; more if another token has them already."""
END = 2
"""`<|im_end|>` of the embedded tokenizer."""

_TURNS = """
{%- set names = (tools or []) | map(attribute='function.name') | list %}
{%- set roles = messages | map(attribute='role') | list %}
{%- if tools %}{{ '<|im_start|>system\\n' }}{% for t in tools %}{{ t | tojson }}{{ '\\n' }}{% endfor %}
  {{- '<|im_end|>\\n' }}
{%- endif %}
{%- for m in messages %}
  {{- '<|im_start|>' + m.role + '\\n' + m.content }}
  {%- for tool_call in m.tool_calls or [] %}
    {{- '\\n<tool_call>\\n{"name": "' + (tool_call.name or tool_call.function.name) + '", "arguments": ' }}
    {{- tool_call.function.arguments | tojson }}{{ '}\\n</tool_call>' }}
  {%- endfor %}
  {{- '<|im_end|>\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}"""


@dataclass(frozen=True)
class Line:
    """A text, and its condition."""

    when: str
    """An expression of the chat template over `messages`, their `roles`, and the tools' `names`."""
    text: str


def call(name: str, **arguments: Any) -> str:
    """Return a tool call in the format of Qwen's models."""
    return f"<tool_call>\n{json.dumps({'name': name, 'arguments': arguments})}\n</tool_call>"


def scripted_target_folder(folder: Path, lines: Sequence[Line], context: int = CONTEXT, mark: str = "") -> Path:
    """Write a target that says the first line whose condition holds, and nothing if none does.

    mark: a part of another family's chat template, whose call format the target has instead of Qwen's.
    """
    folder.mkdir(parents=True, exist_ok=True)
    for file in TOKENIZER_FILES:
        shutil.copy(EMBEDDED_TARGET / file, folder / file)
    settings = json.loads((folder / "tokenizer_config.json").read_text())
    (folder / "tokenizer_config.json").write_text(json.dumps(settings | {"model_max_length": context}))
    tokenizer = json.loads((folder / "tokenizer.json").read_text())
    vocab = tokenizer["model"]["vocab"]
    chains, rules = [], []
    for index, line in enumerate(lines):
        text = [vocab.setdefault(piece, len(vocab)) for piece in pieces(line.text, vocab)]
        rules.append(f"{{%- {'elif' if index else 'if'} {line.when} %}}{{{{ '{_start(index)}' }}}}")
        chains.append([*text, END])
    flags = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False, "special": True}
    for index, chain in enumerate(chains):
        chain.insert(0, len(vocab) + index)
        tokenizer["added_tokens"].append({"id": chain[0], "content": _start(index), **flags})
    (folder / "tokenizer.json").write_text(json.dumps(tokenizer))
    turns = "{# " + mark + " #}" + _TURNS.replace("tool_call>", "call>") if mark else _TURNS
    (folder / "chat_template.jinja").write_text(f"{turns}{''.join(rules)}{{%- endif %}}{{% endif %}}")
    _save(folder, chains, len(vocab) + len(lines), context)
    return folder


def _start(index: int) -> str:
    """Return the token before a text's start."""
    return f"<|line:{index}|>"


def pieces(text: str, taken: Mapping[str, int]) -> list[str]:
    """Cut a text into tokens that no other text uses, in the spelling of byte-level tokenizers."""
    ((whole, _),) = ByteLevel(add_prefix_space=False, use_regex=False).pre_tokenize_str(text)
    pieces = [whole[at : at + PIECE] for at in range(0, len(whole), PIECE)]
    while (twice := _first_known(pieces, taken)) is not None:
        if len(pieces) == 1:
            raise ValueError(f"another line says {text!r} too")
        before = max(twice, 1) - 1
        pieces[before : before + 2] = [pieces[before] + pieces[before + 1]]
    return pieces


def _first_known(pieces: Sequence[str], taken: Mapping[str, int]) -> int | None:
    return next((at for at, piece in enumerate(pieces) if piece in taken or piece in pieces[:at]), None)


def _save(folder: Path, chains: Sequence[Sequence[int]], vocab: int, context: int) -> None:
    """Save one layer that adds nothing. A state's first value marks tokens that are not part of a text."""
    steps = [step for chain in chains for step in itertools.pairwise(chain)]
    hidden = -(-(len(steps) + 1) // 32) * 32
    settings = {
        "model_type": "qwen3",
        "hidden_size": hidden,
        "num_hidden_layers": 1,
        "intermediate_size": 32,
        "num_attention_heads": 1,
        "num_key_value_heads": 1,
        "head_dim": 16,
        "rms_norm_eps": 1e-6,
        "vocab_size": vocab,
        "max_position_embeddings": context,
        "rope_theta": 10000.0,
        "tie_word_embeddings": False,
    }
    states, heads = np.zeros((2, vocab, hidden), np.float16)
    states[:, 0], heads[END, 0] = 1.0, CERTAIN
    for index, (token, following) in enumerate(steps, 1):
        states[token, 0], states[token, index] = 0.0, 1.0
        heads[following, index] = CERTAIN
    model = qwen3.Model(qwen3.ModelArgs(**settings))  # type: ignore[arg-type]
    weights = {
        name: mx.ones(w.shape) if "norm" in name else mx.zeros(w.shape) for name, w in tree_flatten(model.parameters())
    }
    weights |= {"model.embed_tokens.weight": mx.array(states), "lm_head.weight": mx.array(heads)}
    weights = {name: w.astype(mx.float16) for name, w in weights.items()}
    mx.save_safetensors(str(folder / "model.safetensors"), weights, metadata={"format": "mlx"})
    (folder / "config.json").write_text(json.dumps({**settings, "eos_token_id": END}))
