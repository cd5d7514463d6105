"""Targets: captured hidden states, the parts that are found, and refused models."""

from __future__ import annotations

import gc
import io
import json
import weakref
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np
import pytest

import eagle_mlx as em
from eagle_mlx.errors import TargetError
from eagle_mlx.heads.eagle3 import save_eagle3
from eagle_mlx.serve.api.cli import main as serve
from eagle_mlx.serve.generate import main as generate
from eagle_mlx.target import Target, digest_of, load_target
from tests.architectures import tiny_model
from tests.fakes import plain_tokenizer, tiny_head, tiny_target, tiny_target_folder
from tests.full import diagonal

TEMPLATE = "{% for m in messages %}{{ m.content }}{% endfor %}"
TOKENS = mx.array([[1, 5, 9, 2], [3, 3, 7, 8]])


def test_capture_changes_no_logit_and_no_parameter() -> None:
    watched, plain = tiny_target(), tiny_target()
    names = [k for k, _ in nn.utils.tree_flatten(watched.model.parameters())]
    out = watched.forward(TOKENS, aux_layers=(0, 2, 3))
    assert mx.array_equal(out.logits, plain.model(TOKENS))
    assert [k for k, _ in nn.utils.tree_flatten(watched.model.parameters())] == names
    assert isinstance(watched.model.layers[0], type(plain.model.layers[0]))


def test_aux_layers_are_outputs_of_layers_counted_from_zero() -> None:
    target = tiny_target()
    out = target.forward(TOKENS, aux_layers=(3, 0))
    hidden = target.embed(TOKENS)
    hidden = tiny_target().model.layers[0](hidden, "causal", None)
    np.testing.assert_allclose(np.array(out.aux[1]), np.array(hidden), rtol=1e-4, atol=1e-5)
    logits = target.lm_head(target.norm(out.aux[0]))
    np.testing.assert_allclose(np.array(logits), np.array(out.logits), rtol=1e-4, atol=1e-5)


def test_a_layer_watched_twice_is_watched_once() -> None:
    target = tiny_target()
    first = target.forward(TOKENS, aux_layers=(1,)).aux[0]
    kind = type(target.model.layers[1])
    second = target.forward(TOKENS, aux_layers=(1, 2)).aux[0]
    assert type(target.model.layers[1]) is kind
    assert mx.array_equal(first, second)


def test_targets_of_one_model_do_not_know_of_one_another() -> None:
    first = tiny_target()
    second = Target(first.model)
    wanted = tiny_target().forward(TOKENS, aux_layers=(1, 3), ends=[1, 2])
    for target in (first, second, first, Target(first.model)):
        out = target.forward(TOKENS, aux_layers=(1, 3), ends=[1, 2])
        for got, want in zip((out.logits, *out.aux), (wanted.logits, *wanted.aux), strict=True):
            np.testing.assert_allclose(np.array(got), np.array(want), rtol=1e-4, atol=1e-5)


def test_a_target_that_is_gone_leaves_nothing_in_its_model() -> None:
    target = tiny_target()
    model, gone = target.model, weakref.ref(target)
    target.forward(TOKENS, aux_layers=(1, 3), ends=[1, 2])
    del target
    gc.collect()
    assert gone() is None
    assert mx.array_equal(model(TOKENS), tiny_target().model(TOKENS))


@pytest.mark.parametrize(
    ("name", "reason"),
    [("gemma3n", r"give \[4, 1, 2, 32\] for \[1, 2\] tokens of 32"), ("iquestloopcoder", "called in parts")],
)
def test_hidden_states_that_are_none_are_refused(name: str, reason: str) -> None:
    target = Target(tiny_model(name))
    assert target.forward(mx.array([[1, 2]])).logits.shape == (1, 2, target.vocab_size)
    with pytest.raises(TargetError, match=f"models of type {name} cannot be read.*{reason}.*without a head"):
        target.forward(mx.array([[1, 2]]), aux_layers=(0,))
    with pytest.raises(TargetError, match=f"models of type {name} cannot be read"):
        em.Engine(target, em.HeadProposer(tiny_head(target)))
    reader = em.NgramProposer()
    em.Engine(target, reader)
    reader.aux_layers = (0,)
    with pytest.raises(TargetError, match=f"models of type {name} cannot be read"):
        em.Engine(target, reader)


def test_a_layer_that_the_target_lacks_is_named() -> None:
    with pytest.raises(TargetError, match="there is no layer 4: the target has layers 0 to 3"):
        tiny_target().forward(TOKENS, aux_layers=(4,))


def test_a_model_without_known_parts_says_what_was_looked_for() -> None:
    with pytest.raises(TargetError, match="no backbone found.*looked for model, "):
        Target(nn.Linear(2, 2))


def test_a_folder_loads_with_its_tokenizer_and_shape(tmp_path: Path) -> None:
    target = load_target(tiny_target_folder(tmp_path / "t"))
    assert (target.num_layers, target.hidden_size, target.vocab_size, target.context_length) == (4, 32, 4096, 512)
    assert target.tokenizer is not None
    assert target.eos_token_ids == {0, 2}


def test_a_tokenizer_of_transformers_is_taken_as_by_mlx_lm() -> None:
    wrapped, params = tiny_target(tokenizer=True), em.SamplingParams(max_tokens=8, stop="zz")
    plain = Target(wrapped.model, plain_tokenizer(TEMPLATE))
    assert plain.eos_token_ids == {2}
    text = em.Engine(plain).generate("import os", params).text
    assert text == em.Engine(wrapped).generate("import os", params).text
    assert "".join(chunk.text for chunk in em.Engine(plain).stream("import os", params)) == text
    assert em.Engine(plain).generate([{"role": "user", "content": "x"}], params).prompt_tokens == 1


@pytest.mark.parametrize("name", ["float32", "bfloat16", "float16"])
def test_a_dtype_may_be_given_by_name(name: str, tmp_path: Path) -> None:
    folder = tiny_target_folder(tmp_path / "t")
    assert em.load_target(folder, dtype=name).dtype == getattr(mx, name)
    assert em.load_target(folder, dtype=getattr(mx, name)).dtype == getattr(mx, name)


@pytest.mark.parametrize("dtype", ["fp32", "int32", mx.int32, ""])
def test_another_dtype_is_refused_with_those_that_work(dtype: Any, tmp_path: Path) -> None:
    with pytest.raises(TargetError, match=r"cannot be loaded in dtype .*; write one of float32, bfloat16, float16$"):
        em.load_target(tiny_target_folder(tmp_path / "t"), dtype=dtype)


@pytest.mark.parametrize("missing", ["config.json", "model.safetensors"])
def test_a_folder_that_is_no_model_is_an_error_that_names_it(tmp_path: Path, missing: str) -> None:
    folder = tiny_target_folder(tmp_path / "broken")
    (folder / missing).unlink()
    with pytest.raises(TargetError, match="broken"):
        load_target(folder)


@pytest.mark.parametrize("kind", ["Qwen2Tokenizer", "LlamaTokenizer", "GemmaTokenizer", "T5Tokenizer", None])
def test_a_folder_without_a_vocabulary_is_refused(kind: str | None, tmp_path: Path) -> None:
    folder = tiny_target_folder(tmp_path / "target")
    (folder / "tokenizer.json").unlink()
    change(folder / "tokenizer_config.json", tokenizer_class=kind)
    if kind is None:
        (folder / "tokenizer_config.json").unlink()
    with pytest.raises(TargetError, match="target cannot be loaded as a target: .*copy tokenizer.json .*from"):
        load_target(folder)


def test_the_logits_of_one_position_a_row_are_computed_without_the_others() -> None:
    tokens = mx.array([[1, 2, 3, 4], [5, 6, 7, 8]])
    target = tiny_target()
    whole = target.forward(tokens).logits
    projected: list[mx.array] = []
    inner = target.lm_head
    target.model.model.embed_tokens.as_linear = lambda h: (projected.append(inner(h)), projected[-1])[1]  # type: ignore[func-returns-value]
    out = target.forward(tokens, aux_layers=(1,), ends=[3, 1])
    del target.model.model.embed_tokens.as_linear
    assert out.logits.shape == (2, 1, 128)
    assert mx.allclose(out.logits[:, 0], mx.stack([whole[0, 3], whole[1, 1]]), atol=1e-4)
    assert out.aux[0].shape[1] == 4
    assert [is_computed(logits) for logits in projected if logits.shape[1] > 1] == [False]
    assert target.forward(tokens).logits.shape == (2, 4, 128)


def is_computed(array: mx.array) -> bool:
    graph = io.StringIO()
    mx.export_to_dot(graph, array)
    return "shape=rectangle" not in graph.getvalue()


def test_a_final_norm_that_is_called_more_than_once_is_left_alone() -> None:
    target = tiny_target()
    backbone = target.model.model
    base = type(backbone)

    class Looped(base):  # type: ignore[misc, valid-type]
        def __call__(self, inputs: mx.array, *args: object, **kwargs: object) -> mx.array:
            once = super().__call__(inputs, *args, **kwargs)
            return self.norm(once)

    backbone.__class__ = Looped
    tokens = mx.array([[1, 2, 3, 4]])
    whole = target.forward(tokens).logits
    for _ in range(3):
        assert mx.allclose(target.forward(tokens, ends=[2]).logits[0, 0], whole[0, 2], atol=1e-4)


def change(file: Path, **values: Any) -> None:
    """Set fields of a JSON file; None removes one."""
    content = {**(json.loads(file.read_text()) if file.exists() else {}), **values}
    file.write_text(json.dumps({name: value for name, value in content.items() if value is not None}))


DAMAGES: dict[str, tuple[str, dict[str, Any], str]] = {
    "chat_template_type": (
        "tokenizer_config",
        {"chat_template_type": "new"},
        "or correct chat_template_type",
    ),
    "tool_parser_type": (
        "tokenizer_config",
        {"tool_parser_type": "new"},
        "or correct chat_template_type",
    ),
    "tokenizer_class": ("tokenizer_config", {"tokenizer_class": 3}, "cannot be loaded as a target"),
    "no vocab_size": ("config", {"vocab_size": None}, "'vocab_size'"),
    "no layers": ("config", {"num_hidden_layers": "four"}, "TypeError"),
    "heads": ("config", {"num_attention_heads": 3}, "cannot be loaded as a target"),
    "kv heads": ("config", {"num_key_value_heads": 1, "num_attention_heads": 1}, "cannot be loaded as a target"),
    "odd rotation": ("config", {"rope_scaling": {"rope_type": "new"}}, "cannot be loaded as a target"),
    "eos": ("config", {"eos_token_id": [{}]}, "TypeError"),
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_whatever_fails_while_a_target_loads_is_one_line(
    damage: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    name, values, reason = DAMAGES[damage]
    folder = tiny_target_folder(tmp_path / "target")
    change(folder / f"{name}.json", **values)
    with pytest.raises(TargetError) as error:
        load_target(folder)
    assert reason in str(error.value)
    assert "\n" not in str(error.value)
    for command in (generate, serve):
        argv = ["--target", str(folder), "--spec-decode", "none", *(["x"] if command is generate else ["--check"])]
        assert command(argv) == 2
        assert capsys.readouterr().err.splitlines()[-1] == f"error: {error.value}"


@pytest.mark.parametrize("size", [0, -100])
def test_a_file_of_weights_that_is_cut_short_is_named(size: int, tmp_path: Path) -> None:
    weights = tiny_target_folder(tmp_path / "target") / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:size])
    with pytest.raises(TargetError, match=f"{weights} is damaged or cut short .* download or make it again"):
        load_target(weights.parent)


def test_a_head_in_place_of_a_target_is_refused_with_where_it_belongs(tmp_path: Path) -> None:
    save_eagle3(tiny_head(tiny_target(tokenizer=True), draft_vocab=64), tmp_path / "head", target_name="tiny")
    with pytest.raises(TargetError, match="name its target here, and the folder as the head"):
        load_target(tmp_path / "head")


@pytest.mark.parametrize(("advice", "own"), diagonal([0, [0], [0, 5], 5, [5], None], [0, [0], [3, 0], None]))
def test_the_first_token_may_end_a_text(own: Any, advice: Any, tmp_path: Path) -> None:
    folder = tiny_target_folder(tmp_path / "target")
    change(folder / "config.json", eos_token_id=own)
    change(folder / "generation_config.json", eos_token_id=advice)
    given = own if advice is None else advice
    wanted = set() if given is None else {given} if isinstance(given, int) else set(given)
    assert wanted <= load_target(folder).eos_token_ids


def test_a_named_template_for_tools_is_searched_for_their_marks(tmp_path: Path) -> None:
    folder = tiny_target_folder(tmp_path / "target")
    (folder / "chat_template.jinja").unlink()
    plain = "{% for m in messages %}{{ m.content }}{% endfor %}"
    marked = plain + "{% for tool_call in tools %}<tool_call>{{ tool_call.name }}</tool_call>{% endfor %}"
    templates = [{"name": "default", "template": plain}, {"name": "tool_use", "template": marked}]
    change(folder / "tokenizer_config.json", chat_template=templates)
    tokenizer = load_target(folder).tokenizer
    assert tokenizer is not None
    assert tokenizer.tool_call_start == "<tool_call>"
    chat = [{"role": "user", "content": "x"}]
    assert tokenizer.apply_chat_template(chat, tokenize=False) == "x"
    text = tokenizer.apply_chat_template(chat, tools=[{"name": "f"}], tokenize=False)
    assert text == "x<tool_call>f</tool_call>"


@pytest.mark.parametrize("size", [1000, 1025, 100_000])
def test_a_fingerprint_covers_each_part_of_each_tensor(size: int) -> None:
    """It reads every value of a small tensor, and at least one of any run of 1/1024 of a large one."""
    stride = max(1, size // 1024)

    def digest(begin: int | None) -> str:
        layer = nn.Linear(1, size, bias=False)
        at = mx.arange(size)
        changed = mx.zeros(size, mx.bool_) if begin is None else (at >= begin) & (at < begin + stride)
        layer.weight = changed[:, None].astype(mx.float32)
        return digest_of(layer)

    assert len({digest(begin) for begin in (None, 0, size // 3, size // 2, size - stride)}) == 5


def test_a_fingerprint_depends_on_names_shapes_dtypes_and_the_template() -> None:
    def digest(weight: mx.array, name: str = "weight", template: str = "") -> str:
        module = nn.Module()
        module[name] = weight
        return digest_of(module, template)

    weight = mx.zeros((2, 3))
    others = digest(weight.reshape(3, 2)), digest(weight.astype(mx.float16)), digest(weight, "bias")
    assert len({digest(weight), *others, digest(weight, template="a")}) == 5
