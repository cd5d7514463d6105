"""`eagle-heads certify` and `show`: what the certificate says, and what changed since the last one."""

from __future__ import annotations

import hashlib
import json
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from eagle_mlx import hub, load_target
from eagle_mlx.serve.certificate import Acceptance, read_certificate
from eagle_mlx.serve.heads import main as heads
from eagle_mlx.target import fingerprint
from tests.fakes import target_with_two_heads

COUNT = 8
TOKENS = 6


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder with a random target, a head with a certificate, another head, and prompts of two categories."""
    folder = tmp_path_factory.mktemp("models")
    target_with_two_heads(folder)
    rows = [{"turns": [f"def number_{at}(x):"], "category": ("math", "code")[at % 2]} for at in range(COUNT)]
    (folder / "prompts.jsonl").write_text("\n".join(map(json.dumps, rows)) + "\n")
    assert heads(arguments(folder, folder / "head0")) == 0
    return folder


def arguments(models: Path, head: Path, *more: str) -> list[str]:
    named = ("--target", str(models / "target"), "--prompts", str(models / "prompts.jsonl"))
    return ["certify", str(head), *named, "--max-tokens", str(TOKENS), "--quiet", *more]


def copied(models: Path, folder: Path) -> Path:
    return Path(shutil.copytree(models / "head0", folder / "head"))


def written(folder: Path) -> dict[str, Any]:
    content: dict[str, Any] = json.loads((folder / "certificate.json").read_text())
    return content


def test_it_says_what_was_measured_on_what(models: Path) -> None:
    certificate, target = written(models / "head0"), load_target(models / "target")
    turns = [{"role": "user", "content": f"def number_{at}(x):"} for at in range(COUNT)]
    assert target.tokenizer is not None
    prompts = [target.tokenizer.apply_chat_template([turn], add_generation_prompt=True) for turn in turns]
    assert certificate["prompts_sha256"] == hashlib.sha256(json.dumps(prompts).encode()).hexdigest()
    assert certificate["head_sha256"] == hub.weights_digest(models / "head0")
    assert certificate["target_fingerprint"] == fingerprint(target)
    named = {name: certificate[name] for name in ("head", "target", "prompts", "depth", "max_tokens")}
    assert named == {
        "head": "head0",
        "target": "target",
        "prompts": ["prompts.jsonl"],
        "depth": 4,
        "max_tokens": TOKENS,
    }
    assert {"cpu", "mlx", "mlx_lm"} < certificate["machine"].keys()
    assert len(certificate["cost_curve"]) > 1
    texts = certificate["texts"]
    assert texts["identical"] + texts["excused"] == COUNT
    assert not texts["different"]
    rows = {(part["temperature"], part["category"]): part for part in certificate["acceptance"]}
    for temperature in (0.0, 1.0):
        of_all, code, math = (rows[temperature, category] for category in ("all", "code", "math"))
        assert of_all["answers"] + of_all["left_out"] == COUNT
        assert of_all["answers"] == code["answers"] + math["answers"]
        assert of_all["interval"] is not None
        assert code["interval"] is math["interval"] is None, "too few answers"
        assert 1 <= min(code["tau"], math["tau"]) <= of_all["tau"] <= max(code["tau"], math["tau"])


def test_a_second_run_says_what_changed(models: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    head = copied(models, tmp_path)
    content = written(head)
    content["acceptance"][0] |= {"tau": 9.0, "interval": 0.1}
    content["acceptance"][1] |= {"tau": 9.0, "interval": None}
    (head / "certificate.json").write_text(json.dumps(content))
    assert heads(arguments(models, head, "--depth", "2")) == 0
    changed = capsys.readouterr().out.partition("is replaced; changed:\n")[2].splitlines()
    assert "  depth: 4 -> 2" in changed
    of_tau = [line for line in changed if "tau at temperature 0, " in line]
    assert of_tau[0].startswith("  tau at temperature 0, all: 9.000 ± 0.100 (")
    assert of_tau[0].endswith(", lower")
    assert of_tau[1].endswith(", not told apart")
    assert not any("sha256" in line or "fingerprint" in line for line in changed)
    assert written(head)["depth"] == 2


def test_figures_are_told_apart_only_if_their_intervals_do_not_overlap() -> None:
    old = Acceptance(0.0, "all", 2.0, 0.1, 50, 0)
    assert replace(old, tau=2.3).against(old) == "higher"
    assert replace(old, tau=2.19).against(old) == "not told apart"
    assert replace(old, tau=1.7).against(old) == "lower"
    assert replace(old, tau=1.7, interval=None).against(old) == "not told apart"


def test_a_certificate_of_other_weights_is_named(
    models: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    head = Path(shutil.copytree(models / "head1", tmp_path / "head"))
    shutil.copyfile(models / "head0" / "certificate.json", head / "certificate.json")
    assert heads(["show", str(head)]) == 1
    shown = capsys.readouterr()
    assert "tau at temperature 0, all" in shown.out
    assert "the certificate is of other weights" in shown.err
    assert heads(arguments(models, head)) == 0
    replaced = capsys.readouterr().out
    assert "was of other weights, and is replaced" in replaced
    assert f"head sha256: {hub.weights_digest(models / 'head0')} -> {hub.weights_digest(head)}" in replaced
    assert heads(["show", str(head)]) == 0
    assert "certificate is of other weights" not in capsys.readouterr().err


def test_a_head_without_a_certificate_is_told_how_to_get_one(models: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert heads(["show", str(models / "head1")]) == 1
    assert f"eagle-heads certify {models / 'head1'} --target MODEL" in capsys.readouterr().err


@pytest.mark.parametrize("content", ["", "[]", '{"depth": 4}'])
def test_another_file_is_not_overwritten(
    models: Path, tmp_path: Path, content: str, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "figures.json"
    file.write_text(content)
    assert heads(arguments(models, models / "head1", "--output", str(file))) == 2
    assert f"error: {file} is not a certificate" in capsys.readouterr().err
    assert file.read_text() == content


def test_a_certificate_is_read_as_it_was_written(models: Path) -> None:
    certificate = read_certificate(models / "head0" / "certificate.json")
    assert certificate is not None
    assert certificate.changes(certificate) == []
    assert certificate.changes(replace(certificate, date="2020-01-01")) == []
