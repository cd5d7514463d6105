"""Qwen3.6 and 3.8 as Macs run them: a conversion in 4 bits with its own config, and each published kind of head for it.

The targets are tiny, hybrid and random. They call a tool if one is offered, in the XML of Qwen's chat template.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from copy import deepcopy
from functools import cache
from itertools import pairwise
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from mlx_lm import stream_generate
from mlx_lm.models import qwen3_5, qwen3_5_moe
from mlx_lm.utils import quantize_model, save_config, save_model

import eagle_mlx as em
from eagle_mlx.catalog.head_search import find_heads, known_heads_for, load_found, where_mtp_layers_are
from eagle_mlx.heads import KINDS
from eagle_mlx.heads.base import DraftHead
from eagle_mlx.heads.mtp import MTPConfig, MTPHead
from eagle_mlx.heads.mtp.formats import quantized, save_split
from eagle_mlx.serve.api.loader import load
from eagle_mlx.serve.api.options import LoadConfig
from eagle_mlx.serve.speculation import Speculation
from tests.clients.scripted_target import END, pieces
from tests.eagle_mlx.heads import dflash, dflash2, dspark, eagle3
from tests.eagle_mlx.test_architectures import first_difference
from tests.fakes import EMBEDDED_TARGET, TOKENIZER_FILES, randomize
from tests.full import diagonal, in_full
from tests.serve.api.live import Live, live, one_model
from tests.serve.chat.formats import THINK_TAGS, TOOL_TAGS, WEATHER

HIDDEN, CONTEXT, DEPTH = 128, 2048, 3
THOUGHT = "I need the weather first.\n"
CALL = "<tool_call>\n<function=get_weather>\n<parameter=city>\nOslo\n</parameter>\n<parameter=days>\n3\n</parameter>\n"
CALL += "</function>\n</tool_call>"
TURNS = """
{%- if tools %}
  {{- '<|im_start|>system\\n# Tools\\n\\n<tools>' }}
  {%- for tool in tools %}{{ '\\n' + tool | tojson }}{% endfor %}
  {{- '\\n</tools>\\n\\nCall one as\\n\\n<tool_call>\\n<function=name>\\n<parameter=key>\\nvalue\\n</parameter>\\n' }}
  {{- '</function>\\n</tool_call><|im_end|>\\n' }}
{%- endif %}
{%- for m in messages %}
  {%- if m.role == 'tool' %}
    {{- '<|im_start|>user\\n<tool_response>\\n' + m.content + '\\n</tool_response><|im_end|>\\n' }}
  {%- else %}
    {{- '<|im_start|>' + m.role + '\\n' }}
    {%- if m.reasoning_content %}{{ '<think>\\n' + m.reasoning_content + '\\n</think>\\n\\n' }}{% endif %}
    {{- m.content or '' }}
    {%- for call in m.tool_calls or [] %}
      {{- '<tool_call>\\n<function=' + call.function.name + '>\\n' }}
      {%- for key, value in call.function.arguments | items %}
        {{- '<parameter=' + key + '>\\n' + value | string + '\\n</parameter>\\n' }}
      {%- endfor %}
      {{- '</function>\\n</tool_call>' }}
    {%- endfor %}
    {{- '<|im_end|>\\n' }}
  {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}
  {{- '<|im_start|>assistant\\n<think>\\n' }}{% if enable_thinking is false %}{{ '\\n</think>\\n\\n' }}{% endif %}
{%- endif %}"""

TEXT: dict[str, Any] = {
    **{"attention_bias": False, "attention_dropout": 0.0, "attn_output_gate": True, "dtype": "bfloat16"},
    **{"eos_token_id": END, "full_attention_interval": 4, "head_dim": 32, "hidden_act": "silu", "hidden_size": HIDDEN},
    **{"initializer_range": 0.02, "intermediate_size": 192, "linear_conv_kernel_dim": 4, "linear_key_head_dim": 32},
    **{"linear_num_key_heads": 2, "linear_num_value_heads": 6, "linear_value_head_dim": 32, "mlp_only_layers": []},
    **{"mamba_ssm_dtype": "float32", "max_position_embeddings": CONTEXT, "mtp_num_hidden_layers": 1},
    **{"mtp_use_dedicated_embeddings": False, "num_attention_heads": 6, "num_key_value_heads": 2},
    **{"num_hidden_layers": 4, "layer_types": ["linear_attention"] * 3 + ["full_attention"], "rms_norm_eps": 1e-6},
    **{"tie_word_embeddings": False, "use_cache": True},
    "rope_parameters": {
        **{"mrope_interleaved": True, "mrope_section": [2, 1, 1], "partial_rotary_factor": 0.25},
        **{"rope_theta": 10_000_000, "rope_type": "default"},
    },
}
EXPERTS: dict[str, Any] = {
    **{"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 64, "norm_topk_prob": True},
    **{"shared_expert_intermediate_size": 64, "router_aux_loss_coef": 0.001, "output_router_logits": False},
}
MODELS: dict[str, tuple[Any, dict[str, Any]]] = {
    "Qwen3.6-27B": (qwen3_5, {"model_type": "qwen3_5_text"}),
    "Qwen3.6-35B-A3B": (qwen3_5_moe, {"model_type": "qwen3_5_moe_text", **EXPERTS}),
}


def config_of(name: str, vocab: int) -> dict[str, Any]:
    """Return the original model's config.json in small."""
    module, own = MODELS[name]
    kind = module.__name__.rpartition(".")[2]
    return {
        "architectures": [
            "Qwen3_5MoeForConditionalGeneration" if own.keys() & EXPERTS else "Qwen3_5ForConditionalGeneration"
        ],
        **{"model_type": kind, "image_token_id": 3, "video_token_id": 4, "vision_start_token_id": 5},
        **{"vision_end_token_id": 6, "tie_word_embeddings": False, "vision_config": {"depth": 27, "model_type": kind}},
        "text_config": {**deepcopy(TEXT), **own, "vocab_size": vocab},
    }


def write_tokenizer(folder: Path) -> tuple[list[int], int]:
    """Write a tokenizer that knows the tags. Return the tokens of an open thought and the answer, and their number."""
    folder.mkdir()
    for file in TOKENIZER_FILES:
        shutil.copy(EMBEDDED_TARGET / file, folder / file)
    (folder / "chat_template.jinja").write_text(TURNS)
    content = json.loads((folder / "tokenizer.json").read_text())
    vocab = content["model"]["vocab"]
    text = [vocab.setdefault(piece, len(vocab)) for piece in pieces(f"{THOUGHT}</think>\n\n{CALL}", vocab)]
    flags = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False, "special": False}
    tags = (*TOOL_TAGS, *THINK_TAGS)
    content["added_tokens"] += [{"id": len(vocab) + at, "content": tag, **flags} for at, tag in enumerate(tags)]
    (folder / "tokenizer.json").write_text(json.dumps(content))
    return [vocab["\u010a"], *text, END], len(vocab) + len(tags)


def write_target(folder: Path, name: str) -> Path:
    """Write a target in 4 bits, as mlx-community's. In a thought it decides to call a tool; else its text is random."""
    script, size = write_tokenizer(folder)
    config = config_of(name, -(-size // 64) * 64)
    module = MODELS[name][0]
    model = module.Model(module.ModelArgs.from_dict(deepcopy(config)))
    randomize(model, 0, 0.2)
    embedding, head = model.language_model.model.embed_tokens, model.language_model.lm_head
    states, logits = np.array(embedding.weight), np.array(head.weight)
    for index, (token, following) in enumerate(pairwise(script)):
        states[token], states[token, index], logits[following, index] = 0.0, 1000.0, 1.5
    embedding.weight, head.weight = mx.array(states), mx.array(logits)
    model.set_dtype(mx.bfloat16)
    model, config = quantize_model(model, config, 64, 4)
    save_model(folder, model)
    save_config(config | {"eos_token_id": END}, folder / "config.json")
    card = f"---\nbase_model: Qwen/{name}\nlibrary_name: mlx\n---\n"
    (folder / "README.md").write_text(card)
    return folder


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("models")


@cache
def target_of(root: Path, name: str) -> em.Target:
    """Return the target in float32, so that texts are the same in any batch."""
    return em.load_target(write_target(root / f"{name}-4bit", name), mx.float32)


@cache
def plain(target: em.Target, prompt: tuple[int, ...], count: int) -> tuple[list[int], list[float]]:
    """Return mlx-lm's tokens, and the margin of each over the second best."""
    steps = list(stream_generate(target.model, target.tokenizer, list(prompt), max_tokens=count))
    best = [np.sort(np.array(step.logprobs.astype(mx.float32)))[-2:] for step in steps]
    return [step.token for step in steps], [float(second - first) for first, second in best]


def prompt_of(target: em.Target, messages: list[dict[str, Any]], **more: Any) -> tuple[int, ...]:
    assert target.tokenizer is not None
    return tuple(target.tokenizer.apply_chat_template(messages, add_generation_prompt=True, **more))


def mtp(target: em.Target, bits: int = 8) -> MTPHead:
    """Return a quantized head that drafts the scripted text, because it hands on the token's embedding."""
    head = MTPHead(MTPConfig("qwen3_5", target.model.args.text_config, norm_output=True))
    randomize(head, 1, 0.02)
    head.eh_proj.weight = mx.concatenate([mx.eye(HIDDEN), mx.zeros((HIDDEN, HIDDEN))], axis=-1)
    return quantized(head, bits)


def spark(target: em.Target) -> DraftHead:
    """Return a head that drafts the scripted text, because its bias prefers each token's next one."""
    head = dspark(target, **WIDE)
    markov = head.markov_head
    w1, w2 = (np.array(part.weight) for part in (markov.markov_w1, markov.markov_w2))
    text, _ = plain(target, prompt_of(target, [USER], tools=[WEATHER]), 30)
    for index, (token, following) in enumerate(pairwise(text)):
        w1[token], w1[token, index], w2[following, index] = 0.0, 10.0, 10.0
    markov.markov_w1.weight, markov.markov_w2.weight = mx.array(w1), mx.array(w2)
    return head


USER = {"role": "user", "content": "How is the weather in Oslo?"}
WIDE = {"intermediate_size": 64, "head_dim": 32}
HEADS: dict[str, tuple[str, str, Callable[[em.Target], DraftHead]]] = {
    "MTP of mlx-vlm": ("mtp", "qwen3_5_mtp", mtp),
    "DFlash of z-lab": ("dflash", "dflash", lambda t: dflash(t, windows=(6, None), causal=(True, False), **WIDE)),
    "DFlash2 of z-lab": ("dflash2", "dflash2", lambda t: dflash2(t, **WIDE)),
    "DSpark of SpecForge": ("dspark", "specforge", spark),
    "DSpark of speculators": ("dspark", "speculators", spark),
    "EAGLE-3": ("eagle3", "eagle3", lambda t: eagle3(t, draft_vocab=512)),
}
SCRIPTED = {name for name, (_, _, make) in HEADS.items() if make in (mtp, spark)}
DENSE, SPARSE = MODELS
PAIRS = [(DENSE, head) for head in HEADS] + [(SPARSE, "MTP of mlx-vlm"), (SPARSE, "DFlash2 of z-lab")]
SERVED = in_full(PAIRS, [(DENSE, "MTP of mlx-vlm"), (SPARSE, "DFlash2 of z-lab")])


@cache
def head_of(root: Path, name: str, head: str) -> Path:
    """Return the folder of a head in its published layout."""
    kind, layout, make = HEADS[head]
    [save] = [own.save for own in KINDS[kind].formats if own.name == layout]
    folder = root / f"{name} {head}"
    save(make(target_of(root, name)), folder, target_name=f"Qwen/{name}")
    return folder


LENGTHS, COUNTS = (3, 40, 11), in_full((16, 9, 20), (8, 5, 11))


@pytest.mark.parametrize(("name", "head"), PAIRS)
def test_drafts_of_a_head_leave_the_text_of_mlx_lm(root: Path, name: str, head: str) -> None:
    target = target_of(root, name)
    drafter = em.HeadProposer(em.load_head(head_of(root, name, head), target, check=False))
    rng = np.random.default_rng(0)
    prompts = [tuple(map(int, rng.integers(3, 4096, length))) for length in LENGTHS]
    is_scripted = head in SCRIPTED
    prompts.append(prompt_of(target, [USER], tools=in_full([WEATHER], [WEATHER] if is_scripted else None)))
    counts = [*COUNTS, in_full(30, 30 if is_scripted else 11)]
    engine = em.Engine(target, drafter, policy=em.FixedPolicy(DEPTH), max_batch=3)
    outputs = engine.generate(prompts, [em.SamplingParams(max_tokens=count) for count in counts])
    for output, prompt, count in zip(outputs, prompts, counts, strict=True):
        tokens, margins = plain(target, prompt, count)
        assert first_difference(output.tokens, tokens, margins) is None
    if is_scripted:
        assert outputs[-1].acceptance_length > DEPTH


@contextmanager
def served(root: Path, name: str, head: str) -> Iterator[Live]:
    target_of(root, name)
    drafts = Speculation(head=str(head_of(root, name, head)), policy="fixed", num_tokens=DEPTH, keep=False)
    plan = LoadConfig(root / f"{name}-4bit", drafts)
    with live(models=one_model(lambda: load(plan, lambda _: None))) as running:
        yield running


def answered(server: Live, messages: list[dict[str, Any]], **more: Any) -> dict[str, Any]:
    body = {"messages": messages, "max_tokens": 30, "temperature": 0, **more}
    answer = server.http.post("/v1/chat/completions", json=body)
    assert answer.status_code == 200, answer.text
    body: dict[str, Any] = answer.json()
    return body


@pytest.mark.parametrize(("name", "head"), SERVED)
def test_a_served_model_thinks_calls_a_tool_and_reads_only_the_new_turn(root: Path, name: str, head: str) -> None:
    target = target_of(root, name)
    with served(root, name, head) as server:
        first = answered(server, [USER], tools=[WEATHER])
        [choice] = first["choices"]
        assert choice["finish_reason"] == "tool_calls"
        message = choice["message"]
        assert message["reasoning_content"].strip() == THOUGHT.strip()
        [call] = message["tool_calls"]
        assert call["function"]["name"] == "get_weather"
        assert json.loads(call["function"]["arguments"]) == {"city": "Oslo", "days": 3}
        drafted, accepted = (first["timings"][key] for key in ("draft_n", "draft_n_accepted"))
        assert drafted > 0
        assert head not in SCRIPTED or accepted > drafted / 2
        turns = [USER, message, {"role": "tool", "tool_call_id": call["id"], "content": "rain"}]
        count = in_full(30, 12)
        short = {"max_tokens": count, "chat_template_kwargs": {"enable_thinking": False}}
        second = answered(server, turns, tools=[WEATHER], **short)
        usage = second["usage"]
        assert usage["prompt_tokens_details"]["cached_tokens"] > first["usage"]["prompt_tokens"] - 16
        other = answered(server, [{"role": "user", "content": "Who are you?"}], tools=[WEATHER], max_tokens=1)["usage"]
        assert other["prompt_tokens_details"]["cached_tokens"] > 0.8 * other["prompt_tokens"], "the tools are shared"
        for call in message["tool_calls"]:
            call["function"]["arguments"] = json.loads(call["function"]["arguments"])
        prompt = prompt_of(target, turns, tools=[WEATHER], enable_thinking=False)
        assert len(prompt) == usage["prompt_tokens"]
        tokens, margins = plain(target, prompt, count)
        assert min(margins) > 1e-3
        assert second["choices"][0]["message"]["content"] == target.tokenizer.decode(tokens, skip_special_tokens=True)


@pytest.fixture
def converted(root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str], Path]:
    """Return a function that copies a model's conversion to the folder `mine`, and empty the registry of heads."""
    monkeypatch.setenv("EAGLE_MLX_CACHE", str(tmp_path / "registry"))

    def copied(name: str) -> Path:
        target_of(root, name)
        return Path(shutil.copytree(root / f"{name}-4bit", tmp_path / "mine"))

    return copied


@pytest.mark.parametrize(
    ("name", "kinds"),
    [
        ("mlx-community/Qwen3.6-27B-4bit", {"dflash"}),
        ("mlx-community/Qwen3.6-35B-A3B-4bit-DWQ", {"dspark", "dflash2", "dflash"}),
        ("mlx-community/Qwen3.8-27B-mxfp4", {"dspark", "dflash2", "mtp"}),
        ("Qwen3.8-27B-8bit", {"dspark", "dflash2", "mtp"}),
    ],
)
def test_published_heads_are_known(name: str, kinds: set[str]) -> None:
    assert {head.kind for head in known_heads_for((name,))} == kinds


@pytest.mark.parametrize("name", MODELS)
def test_a_renamed_conversion_without_its_mtp_layers_has_published_heads(
    converted: Callable[[str], Path], name: str
) -> None:
    folder = converted(name)
    assert [match.head for match in find_heads(folder)] == [
        match.head for match in find_heads(f"mlx-community/{name}-4bit")
    ]
    assert where_mtp_layers_are(folder) == f"eagle-convert mtp --source Qwen/{name} --bits 4"


def quantize_routers(folder: Path, tensors: dict[str, mx.array]) -> None:
    """Quantize routers in 8 bits, as mlx-lm does, and note it in the config."""
    config = json.loads((folder / "config.json").read_text())
    for name in [key.removesuffix(".weight") for key in tensors if key.endswith("gate.weight")]:
        parts = mx.quantize(tensors[f"{name}.weight"], 64, 8)
        tensors |= {f"{name}.{part}": value for part, value in zip(("weight", "scales", "biases"), parts, strict=True)}
        config["quantization"][name] = {"group_size": 64, "bits": 8}
    (folder / "config.json").write_text(json.dumps(config))


@pytest.mark.parametrize(("name", "place"), diagonal(MODELS, ("among the model's tensors", "in a file next to them")))
def test_mtp_layers_that_a_conversion_kept_are_its_head(
    converted: Callable[[str], Path], root: Path, name: str, place: str
) -> None:
    target, folder = target_of(root, name), converted(name)
    save_split(mtp(target, 4), folder / "split")
    split = mx.load(str(folder / "split" / "model.safetensors"))
    assert isinstance(split, dict)
    layer = {f"mtp.{key}": value for key, value in split.items()}
    if place == "in a file next to them":
        mx.save_safetensors(str(folder / "mtp.safetensors"), layer)
    else:
        kept = {f"language_model.{key}": value for key, value in layer.items()}
        quantize_routers(folder, kept)
        mx.save_safetensors(str(folder / "model-mtp.safetensors"), kept, metadata={"format": "mlx"})
        index = json.loads((folder / "model.safetensors.index.json").read_text())
        index["weight_map"] |= dict.fromkeys(kept, "model-mtp.safetensors")
        (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    shutil.rmtree(folder / "split")
    match = find_heads(folder)[0]
    assert match.about == "mine's own MTP layers"
    again = em.load_target(folder, mx.float32)
    head = load_found(match.head, again)
    assert head.config.quantization == {"group_size": 64, "bits": 4}
    [output] = em.Engine(again, em.HeadProposer(head), policy=em.FixedPolicy(DEPTH)).generate(
        [prompt_of(target, [USER], tools=[WEATHER])], em.SamplingParams(max_tokens=30)
    )
    assert output.acceptance_length > DEPTH
