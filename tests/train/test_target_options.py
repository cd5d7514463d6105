"""eagle-train with mlx-lm's options for a target: adapters, its own template, more stop tokens."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest

from eagle_mlx.command import Stop, Stopped
from eagle_mlx.data_pipelines import ShardCapture
from eagle_mlx.data_pipelines.cli import main as collect
from eagle_mlx.target import fingerprint, load_target
from eagle_mlx.train.cli import main
from eagle_mlx.train.publish.cli import main as publish
from tests.fakes import tiny_adapters

SMALL = [
    *("--head", "eagle", "--length", "64", "--max-length", "64", "--rows", "2", "--max-steps", "2", "--lr", "1e-3"),
    *("--eval-prompts", "2", "--eval-tokens", "4", "--eval-depth", "2", "--limit", "40"),
]


@pytest.fixture(scope="module")
def adapters(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_adapters(tmp_path_factory.mktemp("lora") / "mine")


def command(target: Path, chats: Path, out: Path, *more: str) -> list[str]:
    return ["--target", str(target), "--data", str(chats), "--output", str(out), *SMALL, *more]


def stop_at(look: int, patch: pytest.MonkeyPatch) -> None:
    """Stop a run at its n-th check for a signal."""
    looks = 0

    def check(self: Stop) -> None:
        nonlocal looks
        looks += 1
        if looks == look:
            raise Stopped

    patch.setattr(Stop, "check", check)


def test_a_head_for_a_target_with_adapters(
    target: Path, chats: Path, adapters: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    """It learns from the target's text with them, resumes only with the same ones, and its card names them."""
    monkeypatch.setenv("EAGLE_MLX_CACHE", str(tmp_path / "cache"))
    out = tmp_path / "out"
    with monkeypatch.context() as patch:
        stop_at(3, patch)
        assert main(command(target, chats, out, "--adapter-path", str(adapters))) == 130
    began = json.loads((out / "run.json").read_text())
    assert (
        began["target"] == fingerprint(load_target(target, adapter_path=adapters)) != fingerprint(load_target(target))
    )
    capsys.readouterr()
    assert main(["--resume", str(out), "--adapter-path", str(tmp_path)]) == 2
    assert f"but the run in {out} began with {str(adapters)!r}; leave --adapter-path out" in capsys.readouterr().err
    file = adapters / "adapters.safetensors"
    whole = file.read_bytes()
    others: Any = mx.load(str(file))
    mx.save_safetensors(str(file), {name: 2 * value for name, value in others.items()})
    assert main(["--resume", str(out)]) == 2
    assert "is not the target that the run" in capsys.readouterr().err
    file.write_bytes(whole)
    monkeypatch.setattr("eagle_mlx.train.job.LEAST", 0.0)  # a head of two steps gains nothing
    assert main(["--resume", str(out)]) == 0
    assert f"eagle-serve --target {target} --adapter-path {adapters} finds it" in capsys.readouterr().err
    assert json.loads((out / "report.json").read_text())["config"]["adapter_path"] == adapters.name

    goes = ["--repo", "you/head", "--license", "mit", "--base-model", "owner/tiny", "--dry-run"]
    assert publish([str(out), *goes]) == 0
    card = capsys.readouterr().out
    for line in (
        "| adapters of the target | mine |",
        "eagle-serve --target owner/tiny --adapter-path mine --head you/head",
        'em.load_target("owner/tiny", adapter_path="mine")',
        "with the LoRA adapters `mine`",
        "mlx_lm.fuse",
        "eagle-train --target owner/tiny --head eagle --adapter-path mine",
    ):
        assert line in card
    assert str(adapters.parent) not in card


def test_states_of_other_adapters_are_refused(
    target: Path, chats: Path, adapters: Path, tmp_path: Path, capsys: Any
) -> None:
    texts = [(list(range(20)), [0] * 5 + [1] * 15)] * 6
    plain, tuned = load_target(target), load_target(target, adapter_path=adapters)
    for name, model in (("plain", plain), ("tuned", tuned)):
        ShardCapture(model, (), texts).write(tmp_path / name)
    others = ["--adapter-path", str(tiny_adapters(tmp_path / "others", seed=1))]
    mine = ["--adapter-path", str(adapters)]
    for name, more, reason in (
        ("plain", mine, "was captured without adapters, but the target has those of"),
        ("tuned", [], "but the target has none; give them with --adapter-path"),
        ("tuned", others, "was captured with the adapters"),
    ):
        out = tmp_path / "out"
        assert main(command(target, chats, out, "--shards", str(tmp_path / name), *more)) == 2
        assert reason in capsys.readouterr().err
        assert not out.exists()
    assert main(command(target, chats, tmp_path / "out", "--shards", str(tmp_path / "tuned"), *mine)) == 0


def test_shards_of_another_template_are_refused(target: Path, chats: Path, tmp_path: Path, capsys: Any) -> None:
    own = ["--chat-template", "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}"]
    argued = [*own, "--chat-template-args", '{"short": true}']
    shards, out = tmp_path / "shards", tmp_path / "out"
    made = ["collect", "--target", str(target), "--data", str(chats), "--output", str(shards), "--max-length", "64"]
    assert collect([*made, *own]) == 0
    for more in ([], argued):
        assert main(command(target, chats, out, "--shards", str(shards), *more)) == 2
        assert "was captured with another chat template" in capsys.readouterr().err
        assert not out.exists()
    assert main(command(target, chats, out, "--shards", str(shards), *own)) == 0


def test_a_template_and_its_arguments_change_the_training_data(
    target: Path, chats: Path, tmp_path: Path, capsys: Any
) -> None:
    template = tmp_path / "own.jinja"
    template.write_text(
        "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}{% if add_generation_prompt %}<assistant>"
        "{% endif %}{% if short %} Be short, I say, as short as can be.{% endif %}"
    )
    own = ["--chat-template", str(template)]
    counts = []
    for number, more in enumerate(([], own, [*own, "--chat-template-args", '{"short": true}'])):
        assert main(command(target, chats, tmp_path / str(number), *more)) == 0
        counts.append(json.loads((tmp_path / str(number) / "report.json").read_text())["data"]["tokens"])
    assert len(set(counts)) == 3
    template.unlink()
    assert main(command(target, chats, tmp_path / "out", *own)) == 2
    assert f"--chat-template {template} is not a template" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("more", "reason"),
    [
        (("--chat-template-args", "{"), "--chat-template-args is not JSON"),
        (("--extra-eos-token", "no-such-token"), "'no-such-token' is not a token of this tokenizer"),
        (("--adapter-path", "nowhere"), "--adapter-path nowhere lacks adapter_config.json"),
    ],
)
def test_contradictory_options_are_refused_first(
    target: Path, chats: Path, tmp_path: Path, capsys: Any, more: tuple[str, ...], reason: str
) -> None:
    for dry in ((), ("--dry-run",)):
        assert main(command(target, chats, tmp_path / "out", *more, *dry)) == 2
        assert reason in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []
