from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from eagle_mlx.errors import ConfigError
from eagle_mlx.setting import find, groups_of, settings_of
from eagle_mlx.train.cli import main
from eagle_mlx.train.config import EvaluationConfig, TrainConfig, TrainingDataConfig, TrainSettings, flag, load_config
from eagle_mlx.train.kinds import KINDS, resolve


def test_flags_override_yaml_which_overrides_defaults(tmp_path: Path) -> None:
    file = tmp_path / "c.yaml"
    file.write_text("lr: 3e-4\nunroll: 5\ndata: [a.jsonl, b.jsonl]\nminutes: 6\naux_layers: [1, 2, 3]\n")
    config = load_config(file, {"unroll": 3})
    assert (config.optimization.lr, config.optimization.unroll, config.optimization.minutes) == (3e-4, 3, 6.0)
    assert config.data.sources == ("a.jsonl", "b.jsonl")
    assert config.head.aux_layers == (1, 2, 3)
    assert config.optimization.rows == TrainConfig().optimization.rows
    file.write_text("")
    assert load_config(file) == TrainConfig()


def test_an_unknown_key_names_the_nearest() -> None:
    with pytest.raises(ConfigError, match="unknown setting 'unrol'; did you mean 'unroll'"):
        TrainConfig.of(**{"unrol": 3})
    with pytest.raises(ConfigError, match="did you mean 'draft_vocab'"):
        TrainConfig.of(**{"draft-vocabulary": 3})


@pytest.mark.parametrize(("line", "reason"), [("unrol: 3", "unknown setting 'unrol'"), ("rows: -1", "at least 0")])
def test_errors_name_the_file(tmp_path: Path, line: str, reason: str) -> None:
    (tmp_path / "c.yaml").write_text(line)
    with pytest.raises(ConfigError, match=f"c.yaml: .*{reason}"):
        load_config(tmp_path / "c.yaml")


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"rows": "four"}, "--rows must be a whole number, not 'four'"),
        ({"rows": 2.5}, "--rows must be a whole number"),
        ({"rows": True}, "--rows must be a whole number"),
        ({"lr": "fast"}, "--lr must be a number"),
        ({"wandb": "yes"}, "--wandb must be true or false"),
        ({"optimizer": "sgd"}, "--optimizer must be one of adamw, muon"),
        ({"aux_layers": ["a"]}, "--aux-layers must be a list, each a whole number"),
        ({"rows": -1}, "--rows must be at least 0"),
        ({"muon_lr": -0.1}, "--muon-lr must be at least 0"),
        ({"limit": -1}, "--limit must be at least 0"),
        ({"decay": 1.5}, "--decay must be between 0 and 1"),
        ({"length": 6, "unroll": 7}, "--length 6 is too short"),
        ({"head": "medusa"}, "--head must be one of peagle, "),
        ({"loss": "l1"}, "--loss must be one of auto, soft, hard, tv, lk"),
        ({"step_weights": [1, 0]}, "--step-weights must be above 0, not 0"),
        ({"step_weights": [1, 1], "unroll": 3}, "has 2 draft steps, but --unroll is 3"),
        ({"step_weights": [1, 1], "decay": 0.5}, "--step-weights and --decay are both given"),
        ({"loss_weights": [1]}, "--loss-weights must be two numbers"),
        ({"loss_weights": [0, 0]}, "--loss-weights must be two numbers"),
        ({"feature_noise": -0.5}, "--feature-noise must be at least 0"),
        ({"draft_vocab": -1}, "--draft-vocab must be at least 0"),
    ],
)
def test_invalid_values(values: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        TrainConfig.of(**values)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("a: [", "cannot be read as YAML"),
        ("- a\n- b", "must hold settings"),
        ("hours: 1:30", "--hours must be a number, not '1:30'"),  # 90, by YAML 1.1
        ("rows: 1:30", "--rows must be a whole number, not '1:30'"),
        ("hours: 1:30.5", "--hours must be a number, not '1:30.5'"),
        ("lr: 1e-3\nrows: 2\nlr: 2e-3", "c.yaml.*'lr' appears twice; give each name once"),
    ],
)
def test_invalid_yaml(tmp_path: Path, text: str, message: str) -> None:
    file = tmp_path / "c.yaml"
    file.write_text(text)
    with pytest.raises(ConfigError, match=message):
        load_config(file)
    with pytest.raises(ConfigError, match="there is no config file"):
        load_config(tmp_path / "none.yaml")


def test_every_setting_has_one_name_and_help() -> None:
    settings = [
        (name, setting) for group in groups_of(TrainConfig).values() for name, setting in settings_of(group).items()
    ]
    names = [name for name, _ in settings]
    assert len(set(names)) == len(names) == len(TrainConfig().flat())
    assert [name for name, setting in settings if not setting.help or setting.name != name] == []


def test_a_group_made_by_itself_names_the_flag() -> None:
    with pytest.raises(ConfigError, match="^--eval-depth must be between 1 and 20, not 0$"):
        EvaluationConfig(depth=0)
    with pytest.raises(ConfigError, match="^--cache-bits must be 16 or 8, not 4$"):
        TrainingDataConfig(cache_bits=4)
    with pytest.raises(ConfigError, match="^--data must be a list, each text"):
        TrainingDataConfig(sources=True)  # type: ignore[arg-type]


def test_setting_names_are_unique_across_groups() -> None:
    config = TrainConfig.of(data=("a.jsonl",), head="mtp", eval_depth=2)
    assert (config.data.sources, config.head.kind, config.evaluation.depth) == (("a.jsonl",), "mtp", 2)
    assert config.changed(eval_depth=3).changed(eval_depth=2) == config
    assert (config.value("head"), config.value("eval_data"), flag("eval_data")) == ("mtp", "", "--eval-data")
    assert find(TrainConfig, "data").path == ("data", "sources")
    with pytest.raises(ConfigError, match="unknown setting 'depth'; did you mean 'eval_depth'"):
        config.changed(depth=3)


@pytest.mark.parametrize("group", groups_of(TrainConfig))
def test_a_group_is_not_a_key(group: str) -> None:
    with pytest.raises(ConfigError, match="unknown setting|must be"):
        TrainConfig.of(**{group: {"rows": 2}})


def test_a_saved_config_is_restored() -> None:
    config = TrainConfig.of(data=("a", "b"), aux_layers=(1, 2, 3), loss_weights=(1.0, 0.1), minutes=2.0, eval_tokens=9)
    config = config.changed(adapter_path="a", trust_remote_code=True, extra_eos_token=("x",), chat_template_args="{}")
    assert TrainConfig.of(**json.loads(json.dumps(config.flat()))) == config != TrainConfig()


def test_flags_are_settings_with_the_same_defaults(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["--help"])
    shown = capsys.readouterr().out
    *_, own = shown.split("\noptions:\n")
    at = [own.index(f"\n{group}:\n") for group in groups_of(TrainConfig)]
    assert at == sorted(at)
    for name in TrainConfig().flat():
        assert re.search(rf"^  {flag(name)}\b", own, re.MULTILINE), name


def test_zero_minus_one_and_auto_are_spellings_of_not_given() -> None:
    spelled = {
        "rows": 0,
        "lr": "0",
        "feature_noise": -1,
        "loss": "auto",
        "aux_layers": [],
        "step_weights": (),
        "hours": 0,
    }
    config = TrainConfig.of(**spelled)
    assert config == TrainConfig()
    assert {config.value(name) for name in spelled} == {None}
    files = json.loads(json.dumps(config.flat()))
    assert {name: files[name] for name in spelled} == {**spelled, "lr": 0, "step_weights": []}, (
        "as files always had them"
    )


@pytest.mark.parametrize("kind", KINDS)
def test_what_a_run_uses_has_every_value_chosen(kind: str) -> None:
    settings = resolve(TrainConfig.of(head=kind), 64)
    used = settings_of(TrainSettings)
    chosen = {name for name, given in settings_of(TrainConfig).items() if given.optional and not used[name].optional}
    assert chosen == {"unroll", "loss", "feature_noise", "rows", "length", "epochs", "lr"}
    assert all(settings.value(name) is not None for name in chosen)
    for name in chosen:
        with pytest.raises(ConfigError, match=f"{flag(name)} must be "):
            settings.changed(**{name: None})


def test_only_heads_of_several_layers_feed_back_the_output() -> None:
    recycled = [resolve(TrainConfig.of(layers=layers), 64).value("recycle") for layers in (None, 1, 2)]
    assert recycled == ["normed", "normed", "output"]
