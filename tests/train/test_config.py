from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest

from eagle_mlx.errors import ConfigError
from eagle_mlx.train.config import TrainConfig, field_help, from_mapping, load_config


def test_flags_go_over_yaml_over_defaults(tmp_path: Path) -> None:
    file = tmp_path / "c.yaml"
    file.write_text("lr: 3e-4\nunroll: 5\ndata: [a.jsonl, b.jsonl]\nminutes: 6\naux_layers: [1, 2, 3]\n")
    config = load_config(file, {"unroll": 3})
    assert (config.lr, config.unroll, config.minutes) == (3e-4, 3, 6.0)
    assert config.data == ("a.jsonl", "b.jsonl")
    assert config.aux_layers == (1, 2, 3)
    assert config.rows == TrainConfig().rows
    file.write_text("")
    assert load_config(file) == TrainConfig()


def test_an_unknown_key_names_the_nearest() -> None:
    with pytest.raises(ConfigError, match="unknown setting 'unrol'; did you mean 'unroll'"):
        from_mapping({"unrol": 3})
    with pytest.raises(ConfigError, match="did you mean 'draft_vocab'"):
        from_mapping({"draft-vocabulary": 3})


@pytest.mark.parametrize(("line", "said"), [("unrol: 3", "unknown setting 'unrol'"), ("rows: 0", "at least 1")])
def test_what_is_wrong_with_a_file_is_said_of_the_file(tmp_path: Path, line: str, said: str) -> None:
    (tmp_path / "c.yaml").write_text(line)
    with pytest.raises(ConfigError, match=f"c.yaml: .*{said}"):
        load_config(tmp_path / "c.yaml")


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"rows": "four"}, "rows must be a whole number, not 'four'"),
        ({"rows": 2.5}, "rows must be a whole number"),
        ({"rows": True}, "rows must be a whole number"),
        ({"lr": "fast"}, "lr must be a number"),
        ({"wandb": "yes"}, "wandb must be true or false"),
        ({"optimizer": "sgd"}, "optimizer must be one of adamw, muon"),
        ({"aux_layers": ["a"]}, "aux_layers must be a list, each a whole number"),
        ({"rows": 0}, "rows must be at least 1"),
        ({"lr": 0.0}, "lr must be above 0"),
        ({"limit": -1}, "limit must not be negative"),
        ({"decay": 1.5}, "decay must be between 0 and 1"),
        ({"length": 6, "unroll": 7}, "length 6 leaves no room"),
        ({"head": "medusa"}, "head must be one of eagle3, eagle, mtp"),
        ({"loss": "l1"}, "loss must be one of auto, soft, hard"),
        ({"step_weights": [1, 0]}, "step_weights must be above 0, but are 1 0"),
        ({"step_weights": [1, 1], "unroll": 3}, "given for 2 draft steps and unroll is 3"),
        ({"step_weights": [1, 1], "decay": 0.5}, "step_weights and decay are both given"),
        ({"loss_weights": [1]}, "loss_weights are two numbers"),
        ({"loss_weights": [0, 0]}, "loss_weights are two numbers"),
        ({"feature_noise": -0.5}, "feature_noise must not be negative"),
        ({"draft_vocab": -1}, "draft_vocab must not be negative"),
    ],
)
def test_values_that_cannot_be_used(values: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        from_mapping(values)


@pytest.mark.parametrize(("text", "message"), [("a: [", "cannot be read as YAML"), ("- a\n- b", "must hold settings")])
def test_yaml_that_cannot_be_used(tmp_path: Path, text: str, message: str) -> None:
    file = tmp_path / "c.yaml"
    file.write_text(text)
    with pytest.raises(ConfigError, match=message):
        load_config(file)
    with pytest.raises(ConfigError, match="there is no config file"):
        load_config(tmp_path / "none.yaml")


def test_every_field_has_help() -> None:
    assert set(field_help()) == {field.name for field in dataclasses.fields(TrainConfig)}
