"""mlx-lm's options for loading a target: adapters, stop tokens, templates, trusted code."""

from __future__ import annotations

import json
import shlex
from collections.abc import Callable, Sequence
from pathlib import Path

import mlx.core as mx
import mlx_lm
import pytest

import eagle_mlx as em
from eagle_mlx.command import read
from eagle_mlx.data_pipelines.cli import main as data
from eagle_mlx.errors import ConfigError, TargetError
from eagle_mlx.heads.eagle3 import save_eagle3
from eagle_mlx.serve.api.cli import main as serve
from eagle_mlx.serve.bench.cli import main as bench
from eagle_mlx.serve.chat import ChatFormat
from eagle_mlx.serve.generate import main as generate
from eagle_mlx.serve.prompts import Question
from eagle_mlx.target import fingerprint
from eagle_mlx.target_options import TargetOptions
from tests.fakes import tiny_adapters, tiny_head, tiny_target_folder
from tests.full import in_full

CHAT = [{"role": "user", "content": "def f(x):"}]
TEMPLATE = "{% for m in messages %}{{ m.content }}{% endfor %}{% if short %} Be short.{% endif %}"


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    root = tmp_path_factory.mktemp("lora")
    return tiny_target_folder(root / "target"), tiny_adapters(root / "adapters")


def options(line: str) -> TargetOptions:
    return read(TargetOptions, shlex.split(line), "test", "")


def greedy_of_mlx_lm(target: Path, adapter: Path | None, prompt: Sequence[int], count: int) -> list[int]:
    model, tokenizer = mlx_lm.load(str(target), adapter_path=str(adapter) if adapter else None)[:2]
    model.set_dtype(mx.float32)
    stream = mlx_lm.stream_generate(model, tokenizer, list(prompt), max_tokens=count)
    return [step.token for step in stream]


def test_adapters_give_the_same_text_as_in_mlx_lm(models: tuple[Path, Path]) -> None:
    folder, adapter = models
    prompt, params = [5, 9, 200, 31], em.SamplingParams(max_tokens=16)
    texts = []
    for path in (None, adapter):
        target = em.load_target(folder, mx.float32, adapter_path=path)
        [output] = em.Engine(target, em.NgramProposer(), policy=em.FixedPolicy(3)).generate([prompt], params)
        texts.append(output.tokens)
        assert output.tokens == greedy_of_mlx_lm(folder, path, prompt, 16)[: len(output.tokens)]
    assert texts[0] != texts[1]


def test_adapters_on_the_command_line(models: tuple[Path, Path], capsys: pytest.CaptureFixture[str]) -> None:
    folder, adapter = models
    flags = ["def f(x):", "--target", str(folder), "--quiet", "--max-tokens", "8", "--spec-decode", "none"]
    texts = []
    for more in ([], ["--adapter-path", str(adapter)]):
        assert generate([*flags, *more]) == 0
        texts.append(capsys.readouterr().out)
    assert texts[0] != texts[1]


@pytest.mark.parametrize(
    ("settings", "reason"),
    [
        ({"lora_parameters": {"alpha": 1}}, "missing required key 'scale'"),
        ({"lora_parameters": {"rank": 2, "scale": 1.0}}, "do not fit"),
    ],
)
def test_adapters_of_another_model_are_refused(
    models: tuple[Path, Path], tmp_path: Path, settings: dict[str, object], reason: str
) -> None:
    with pytest.raises(TargetError, match=reason):
        em.load_target(models[0], adapter_path=tiny_adapters(tmp_path / "other", **settings))


def test_a_folder_without_adapters_is_named(models: tuple[Path, Path], tmp_path: Path) -> None:
    with pytest.raises(TargetError, match=r"lacks adapter_config.json and adapters.safetensors"):
        em.load_target(models[0], adapter_path=tmp_path)


def test_an_extra_stop_token_ends_a_text(models: tuple[Path, Path]) -> None:
    target = em.load_target(models[0])
    [whole] = em.Engine(target).generate([[5, 9, 200]], em.SamplingParams(max_tokens=12))
    last = whole.tokens[4]
    assert target.tokenizer is not None
    name = target.tokenizer.convert_ids_to_tokens(last)
    for extra in ([str(last)], [last], [name], name):  # a text alone is a token, not its letters
        ending = em.load_target(models[0], extra_eos_tokens=extra)
        assert ending.eos_token_ids == {*target.eos_token_ids, last}
        [output] = em.Engine(ending).generate([[5, 9, 200]], em.SamplingParams(max_tokens=12))
        assert output.finish_reason == "stop"
        assert len(output.tokens) == whole.tokens.index(last) + 1
    with pytest.raises(TargetError, match="'no-such-token' is not a token"):
        em.load_target(models[0], extra_eos_tokens=["no-such-token"])


def test_template_arguments_reach_every_prompt(models: tuple[Path, Path]) -> None:
    target = em.load_target(models[0], chat_template=TEMPLATE, chat_template_args={"short": True})
    assert target.tokenizer is not None
    long, short = (target.tokenizer.encode(f"def f(x):{end}") for end in ("", " Be short."))
    assert em.Engine(target).prepare(CHAT, em.SamplingParams()).prompt == short
    assert Question(CHAT).encode(target) == short
    chat = ChatFormat.of(target)
    assert chat.chat(CHAT).tokens() == short
    assert chat.chat(CHAT, template_kwargs={"short": False}).tokens() == long
    plain = em.load_target(models[0], chat_template=TEMPLATE)
    assert em.Engine(plain).prepare(CHAT, em.SamplingParams()).prompt == long


def test_the_flags_become_the_arguments_of_load_target() -> None:
    parsed = options(
        "--adapter-path a --trust-remote-code --extra-eos-token x y --chat-template T "
        """--chat-template-args '{"enable_thinking": false}'"""
    )
    assert parsed == TargetOptions("a", True, ("x", "y"), "T", '{"enable_thinking": false}')
    assert options("") == TargetOptions()


@pytest.mark.parametrize(
    ("line", "reason"),
    [
        ("--chat-template-args {", "is not JSON"),
        ("--chat-template-args []", "must be an object"),
        ("""--chat-template-args '{"tokenize": false}'""", "'tokenize' is not an argument of the template"),
    ],
)
def test_invalid_template_arguments_are_refused(line: str, reason: str) -> None:
    with pytest.raises(ConfigError, match=reason):
        options(line)


def test_a_template_may_be_in_a_file(models: tuple[Path, Path], tmp_path: Path) -> None:
    file = tmp_path / "template.jinja"
    file.write_text(TEMPLATE)
    for given in (TEMPLATE, str(file)):
        tokenizer = TargetOptions(chat_template=given).load(models[0], lazy=True).tokenizer
        assert tokenizer is not None
        assert tokenizer.chat_template == TEMPLATE
    file.write_text("words")
    for given, reason in ((str(file), "the file has no template expression"), ("chatml", "no file: No such file")):
        with pytest.raises(ConfigError, match=f"--chat-template {given}.*{reason}"):
            TargetOptions(chat_template=given).load(models[0])
    broken = "{% for m in messages %}\n{% if %}"
    file.write_text(broken)
    for given in (broken, str(file)):
        with pytest.raises(ConfigError, match="--chat-template has a syntax error in line 2: Expected an expression"):
            TargetOptions(chat_template=given).load(models[0])
        with pytest.raises(ConfigError, match="--chat-template has a syntax error in line 2: Expected an expression"):
            em.load_target(models[0], chat_template=given)
    of_transformers = "{% for m in messages %}{%- generation -%}x{% endgeneration %}{% break %}{% endfor %}"
    assert TargetOptions(chat_template=of_transformers).load(models[0])


def test_the_fingerprint_tells_adapters_apart(models: tuple[Path, Path], tmp_path: Path) -> None:
    """So saved files and resumed runs are never used with other adapters."""
    others = tiny_adapters(tmp_path / "others", seed=1)
    loaded = [TargetOptions(adapter_path=str(path)).load(models[0]) for path in ("", models[1], others, models[1])]
    prints = [fingerprint(target) for target in loaded]
    assert len(set(prints)) == 3
    assert prints[1] == prints[3]
    names = [target.adapter.name if target.adapter else None for target in loaded]
    assert names == [None, "adapters", "others", "adapters"]
    assert len({target.adapter.digest for target in loaded if target.adapter}) == 2


def test_code_of_a_model_runs_only_if_it_is_trusted(tmp_path: Path) -> None:
    folder = tiny_target_folder(tmp_path / "model")
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "model_file": "mine.py"}))
    (folder / "mine.py").write_text("from mlx_lm.models.qwen3 import Model, ModelArgs\n")
    with pytest.raises(TargetError, match="add --trust-remote-code"):
        em.load_target(folder)
    assert em.load_target(folder, trust_remote_code=True).num_layers == 4


@pytest.fixture
def wired(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Record the limits that MLX gets, as on a Mac of 64 GB. mlx-lm's decoding sets one, then restores the former."""
    told = [0]

    def tell(limit: int) -> int:
        told.append(limit)
        return told[-2]

    info = {"memory_size": 64 << 30, "max_recommended_working_set_size": 48 << 30}
    monkeypatch.setattr(mx.metal, "is_available", lambda: True)
    monkeypatch.setattr(mx, "is_available", lambda _: True)
    monkeypatch.setattr(mx, "device_info", lambda *_: info)
    monkeypatch.setattr(mx, "set_cache_limit", lambda _: 0)
    monkeypatch.setattr(mx, "set_wired_limit", tell)
    return told


COMMANDS = ("generate", "bench", "serve", "regenerate")


@pytest.mark.parametrize(
    ("command", "flags"),
    [*((name, []) for name in COMMANDS), *((name, ["--no-wire"]) for name in in_full(COMMANDS, COMMANDS[:1]))],
)
def test_commands_wire_the_active_memory_after_the_head_is_loaded(
    models: tuple[Path, Path], tmp_path: Path, wired: list[int], command: str, flags: list[str]
) -> None:
    save_eagle3(tiny_head(em.load_target(models[0])), tmp_path / "head", target_name="tiny")
    assert wired == [0]
    both = ["--target", str(models[0]), "--head", str(tmp_path / "head"), *flags]
    quick = ["--limit", "2", "--max-tokens", "4"]
    mains: dict[str, Callable[[], int]] = {
        "generate": lambda: generate(["def f(x):", "--max-tokens", "4", *both]),
        "bench": lambda: bench([*both, *quick, "--modes", "plain", "--quiet"]),
        "serve": lambda: serve(["--check", *both]),
        "regenerate": lambda: data(
            ["regenerate", "--data", "builtin:python", *both, *quick, "--output", str(tmp_path / "answers.jsonl")]
        ),
    }
    assert mains[command]() == 0
    files = [*models[0].glob("*.safetensors"), *(tmp_path / "head").glob("*.safetensors")]
    if flags:
        assert wired[-1] == 0
    else:
        assert 0.9 * sum(file.stat().st_size for file in files) <= wired[-1] <= 0.6 * (64 << 30)
