"""Recipes: each is valid for its model, and makes a plan without a network or weights."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest
import yaml
from mlx_lm.utils import get_total_parameters

from eagle_mlx import hub
from eagle_mlx.catalog.models import described_target
from eagle_mlx.data_pipelines import DataConfig
from eagle_mlx.errors import ConfigError
from eagle_mlx.formats.tensors import weights_of
from eagle_mlx.heads.precision import quantize
from eagle_mlx.target import Target
from eagle_mlx.train.cli import flags_parser, main
from eagle_mlx.train.config import TrainConfig, load_config
from eagle_mlx.train.job import new_run
from eagle_mlx.train.kinds import KINDS, resolve
from eagle_mlx.train.plan.dry_run import as_text, assumed
from eagle_mlx.train.plan.memory import FLOAT, bound_of, probe
from eagle_mlx.train.plan.recipe import load_recipe
from eagle_mlx.train.recipes import RECIPES, recipe_names
from tests import hub_server
from tests.architectures import tiny_model
from tests.fakes import EMBEDDED_TARGET, tiny_config
from tests.full import in_turn

BILLIONS = {
    "gemma3-4b": 3.88,
    "gemma3-12b": 11.77,
    "gemma3-27b": 27.01,
    "gemma4-e4b": 7.46,
    "gemma4-26b-a4b": 25.2,
    "gemma4-31b": 30.7,
    "gpt-oss-20b": 20.91,
    "gpt-oss-20b-dspark": 20.91,
    "llama3.1-8b": 8.03,
    "llama3.3-70b": 70.55,
    "qwen3-0.6b": 0.6,
    "qwen3-1.7b": 1.72,
    "qwen3-4b": 4.02,
    "qwen3-4b-dspark": 4.02,
    "qwen3-8b": 8.19,
    "qwen3-8b-dspark": 8.19,
    "qwen3-14b": 14.77,
    "qwen3-30b-a3b": 30.53,
    "qwen3-32b": 32.76,
    "qwen3-32b-dspark": 32.76,
    "qwen3.5-0.8b": 0.75,
    "qwen3.5-4b": 4.21,
    "qwen3.5-9b": 8.95,
    "qwen3.5-27b": 26.9,
    "qwen3.5-35b-a3b": 34.66,
    "qwen3.6-27b-dspark": 26.9,
    "qwen3.6-27b-images": 26.9,
}
"""Published parameter counts (of the language model only), which a recipe's model must match."""
SMALL = ("--draft-vocab", "512", "--rows", "1", "--accumulate", "1", "--length", "16")
"""A batch that is quick to measure."""


def test_every_recipe_is_known() -> None:
    assert recipe_names() == sorted(BILLIONS)


@pytest.mark.parametrize("name", in_turn(sorted(BILLIONS), of=3))
def test_a_recipe_makes_a_plan(name: str) -> None:
    recipe = load_recipe(name)
    config = TrainConfig.of(**recipe.settings)
    bound = bound_of(config, described_target(config.head.target, recipe.model))
    parameters = get_total_parameters(bound.target.model)
    assert parameters / 1e9 == pytest.approx(BILLIONS[name], rel=0.01)
    assert bound.weights < parameters * 6 / 8  # 4 bits, and scales
    assert bound.head.token_ids is not None
    assert bound.head.token_ids.size == 32_000
    assert bound.training > FLOAT * bound.trained > 0
    assert all(source.spec.startswith("preset:") for source in DataConfig(config.data.sources).parsed)
    text = as_text(bound, assumed(config, recipe.tokens_each), free=10**11)
    assert f"{bound.target.num_layers} layers" in text
    assert "tokens      " in text
    assert "assumed" in text
    assert not re.search(r"\b(nan|inf)\b", text)


@pytest.mark.parametrize("name", [name for name in BILLIONS if name.endswith("-dspark")])
def test_a_dspark_recipe_takes_steps_with_a_tiny_model_of_its_family(name: str) -> None:
    recipe = load_recipe(name)
    target = Target(tiny_model(recipe.model["model_type"]), name="tiny")
    small = {"draft_vocab": 64, "intermediate_size": 32, "rows": 1, "length": 16, "accumulate": 1}
    config = resolve(TrainConfig.of(**{**recipe.settings, **small}), target.hidden_size)
    assert config.optimization.unroll == 7
    assert config.optimization.lr == 6e-4
    assert probe(target, config).learned > 0


def test_a_plan_is_printed_without_a_network(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--recipe", "qwen3-32b", "--dry-run"]) == 0
    plan = dict(line.split(maxsplit=1) for line in capsys.readouterr().out.splitlines())
    assert list(plan) == [
        *(
            "target",
            "head",
            "layers",
            "vocabulary",
            "data",
            "tokens",
            "run",
            "chosen",
            "memory",
            "states",
            "disk",
            "time",
            "here",
        )
    ]
    assert plan["target"].startswith("mlx-community/Qwen3-32B-4bit: 64 layers of 5,120, vocabulary 151,936, 32.8 b")
    assert plan["layers"].startswith("1, 31, 60, 63")
    assert plan["memory"].startswith("at least ")
    assert plan["time"] == "measured by a probe when the target is loaded"


def test_a_recipes_model_is_planned_without_a_network(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    caplog: pytest.LogCaptureFixture,
) -> None:
    """By a short name. Nothing is retried."""
    hub_server.use(monkeypatch, "http://127.0.0.1:9", tmp_path / "huggingface")
    assert main(["--target", "Qwen3-0.6B-4bit", "--recipe", "--dry-run", "--max-steps", "7"]) == 0
    printed = capsys.readouterr()
    plan = dict(line.split(maxsplit=1) for line in printed.out.splitlines())
    assert plan["target"].startswith("Qwen3-0.6B-4bit: 28 layers of 1,024, vocabulary 151,936")
    stored, unit, *_ = plan["memory"].split("target ")[1].replace(",", " ").split()
    assert float(stored) / {"GB": 1, "MB": 1000}[unit] == pytest.approx(0.34, abs=0.15)
    assert "Retrying" not in caplog.text + printed.err
    assert "thrown while" not in caplog.text + printed.err


def test_a_plan_does_not_fetch_the_rest_of_a_model(online: hub_server.Hub, capsys: pytest.CaptureFixture[str]) -> None:
    """A download that was interrupted left a part of the weights."""
    parts = [f"model-{number}-of-2.safetensors" for number in (1, 2)]
    config = {**tiny_config(4, 32, 4096), "model_type": "qwen3"}
    online.put("user/model", {**dict.fromkeys(parts, b"weights"), "config.json": json.dumps(config).encode()})
    for file in ("config.json", parts[0]):
        hub.fetch_file("user/model", file)
    online.requests.clear()
    assert main(["--target", "user/model", "--dry-run", "--limit", "40", "--data", "chats.jsonl"]) == 0
    assert "target      user/model: 4 layers of 32" in capsys.readouterr().out
    assert online.requests == []


@pytest.mark.parametrize("offline", [False, True])
def test_the_plan_of_an_unknown_target_needs_its_config(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    caplog: pytest.LogCaptureFixture,
    offline: bool,
) -> None:
    hub_server.use(monkeypatch, "http://127.0.0.1:9", tmp_path / "huggingface")
    monkeypatch.setattr(hub_server.constants, "HF_HUB_OFFLINE", offline)
    assert main(["--target", "Nobody-7B-4bit", "--dry-run", "--limit", "40", "--data", "chats.jsonl"]) == 2
    printed = capsys.readouterr()
    assert "config.json of mlx-community/Nobody-7B-4bit is not in the hub's cache" in printed.err
    assert "Retrying" not in caplog.text + printed.err


@pytest.mark.parametrize(
    ("line", "name"),
    [
        (["--recipe", "Qwen/Qwen3-8B"], "qwen3-8b"),
        (["--recipe", "mlx-community/Qwen3-8B-8bit"], "qwen3-8b"),
        (["--recipe", "Qwen/Qwen3.6-27B"], "qwen3.6-27b-dspark"),
        (["--recipe", "Qwen/Qwen3-8B", "--head", "dspark"], "qwen3-8b-dspark"),
        (["--recipe", "qwen3-8b", "--head", "mtp"], "qwen3-8b"),
        (["--recipe", "Meta-Llama-3.1-8B-Instruct-bf16"], "llama3.1-8b"),
        (["--recipe", "--target", "mlx-community/Qwen3-32B-4bit"], "qwen3-32b"),
        (["--target", "Qwen/Qwen3-32B", "--recipe"], "qwen3-32b"),
    ],
)
def test_a_recipe_is_found_by_its_models_name(line: list[str], name: str) -> None:
    args = vars(flags_parser().parse_args(line))
    config, recipe = new_run(args.pop("recipe"), None, args)
    assert recipe is not None
    assert recipe.name == name
    assert config.head.target == args.get("target", recipe.settings["target"])
    assert config.data.sources == tuple(recipe.settings["data"])


@pytest.mark.parametrize(
    ("flags", "shown"),
    [
        (["--head", "mtp"], "head        MTP"),
        (["--head", "peagle"], "head        P-EAGLE"),
        (["--head", "mtp", "--hours", "2"], "head        MTP"),
        (["--step-weights", ".51", ".31", ".18"], "; 3 draft steps"),
    ],
)
def test_a_recipes_settings_give_way_to_what_replaces_them(
    flags: list[str], shown: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["--recipe", "qwen3-0.6b", *flags, "--dry-run"]) == 0
    assert shown in capsys.readouterr().out


def test_another_kind_of_head_than_the_recipes_has_its_own_defaults() -> None:
    own = new_run("llama3.1-8b", None, {"head": "dspark"})[0].optimization
    assert (own.unroll, own.decay, own.accumulate) == (None, None, 16)


def test_prompts_replace_the_data_of_a_recipe() -> None:
    data = new_run("qwen3-0.6b", None, {"adapt": "someone/head", "prompts": ("mine.jsonl",)})[0].data
    assert (data.prompts, data.sources) == (("mine.jsonl",), ("builtin:python",))


def test_a_bare_recipe_needs_a_target_that_has_one(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--recipe", "--dry-run"]) == 2
    assert "name the target with --target" in capsys.readouterr().err
    assert main(["--recipe", "--target", "someone/unknown-7B", "--dry-run"]) == 2
    assert "there is no recipe someone/unknown-7B" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("target", "reason"),
    [
        (
            "mlx-community/Qwen3-8B-4bit",
            "writes conversations first (--data self); data sets for it: --recipe qwen3-8b\n",
        ),
        ("someone/unknown-7B", "so someone/unknown-7B writes conversations first (--data self)\n"),
        ("", ""),
        (str(EMBEDDED_TARGET), ""),
    ],
)
def test_only_the_embedded_target_has_data_of_its_own(
    target: str, reason: str, capsys: pytest.CaptureFixture[str]
) -> None:
    config, _ = new_run(None, None, {"target": target})
    assert config.data.sources == (("self",) if reason else ("builtin:python",))
    shown = capsys.readouterr().err
    assert shown.endswith(reason)
    assert bool(shown) == bool(reason)


@pytest.mark.parametrize("named", [{"data": ["builtin:python"]}, {"shards": "somewhere"}])
def test_named_data_is_used_for_any_target(named: dict[str, Any], tmp_path: Path) -> None:
    assert new_run(None, None, {"target": "someone/unknown-7B", **named})[1] is None
    (tmp_path / "c.yaml").write_text(yaml.safe_dump({"target": "someone/unknown-7B", **named}))
    assert new_run(None, str(tmp_path / "c.yaml"), {})[0].head.target == "someone/unknown-7B"


def test_flags_override_the_recipe(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    assert main(["--recipe", "qwen3-0.6b", "--dry-run", "--draft-vocab", "1000", "--max-steps", "7"]) == 0
    out = capsys.readouterr().out
    assert "drafts 1,000 of 151,936" in out
    assert "7 steps" in out
    assert "\ntime" not in out
    (tmp_path / "own.yaml").write_text("lr: 5e-4\nrows: 3\n")
    config = load_config(tmp_path / "own.yaml", {"rows": 5}, load_recipe("qwen3-0.6b").settings)
    assert (config.optimization.lr, config.optimization.rows, config.optimization.accumulate) == (5e-4, 5, 8)
    assert main(["--recipe", "qwen3-32b", "--dry-run", "--target", str(EMBEDDED_TARGET), *SMALL]) == 0
    assert "14 layers of 192" in capsys.readouterr().out  # for a target without a recipe, its own config is read


def test_a_local_target_needs_no_recipe(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--target", str(EMBEDDED_TARGET), "--dry-run", "--head", "mtp", "--rows", "1", "--length", "16"]) == 0
    assert "MTP, " in capsys.readouterr().out
    assert main(["--dry-run"]) == 2
    assert "--target, or choose a --recipe" in capsys.readouterr().err


def test_an_unknown_recipe_names_those_that_exist(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(ConfigError, match="did you mean qwen3-32b.*llama3.3-70b"):
        load_recipe("qwen3-33b")
    assert main(["--recipe", "none", "--dry-run"]) == 2
    assert "the recipes are gemma3-12b" in capsys.readouterr().err


def test_recipes_and_the_card_template_are_packaged() -> None:
    project = (Path(__file__).parents[2] / "pyproject.toml").read_text(encoding="utf-8")
    assert '"eagle_mlx.train" = ["publish/*.jinja"]' in project
    assert '"eagle_mlx.train.recipes" = ["*.yaml"]' in project
    assert RECIPES.is_dir()


@pytest.mark.usefixtures("as_on_a_gpu")
@pytest.mark.parametrize("name", ["qwen3-4b", "qwen3-8b", "llama3.1-8b"])
def test_the_shares_of_heads_in_few_bits_are_those_of_the_guide(name: str) -> None:
    recipe = load_recipe(name)
    target = described_target(name, recipe.model)
    bound = bound_of(TrainConfig.of(**recipe.settings), target)
    guide = (Path(__file__).parents[2] / "docs" / "heads.md").read_text(encoding="utf-8")
    assert "have 17 to 19 % of the size of a 4-bit target, in 8 bits 9 to 10 %, in 4 bits 5 %" in guide
    for bits, shares in ((16, (17, 18, 19)), (8, (9, 10)), (4, (5,))):
        head = KINDS[bound.config.head.kind].blank(target, bound.config)
        head.set_dtype(mx.bfloat16)
        if bits < 16:
            quantize(head, bits, 64)
        size = sum(x.nbytes for x in weights_of(head).values())
        assert round(100 * size / bound.weights) in shares
