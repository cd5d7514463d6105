"""A head is tried with its target: good heads pass silently, others are reported with likely causes."""

from __future__ import annotations

import random
import warnings
from dataclasses import replace
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import pytest

import eagle_mlx as em
from eagle_mlx import head_check, heads
from eagle_mlx.head_check import HeadTrial, head_warning, try_out, warning_of
from eagle_mlx.heads.eagle import save_eagle
from eagle_mlx.heads.eagle3 import Eagle3Head, save_eagle3
from eagle_mlx.serve.speculation import Speculation
from eagle_mlx.target import Target, load_target
from tests.eagle_mlx.heads import ALL, bigram_target, eagle, silence
from tests.fakes import EMBEDDED_TARGET, tiny_head, tiny_target
from tests.full import in_full, in_turn

SHIPPED = EMBEDDED_TARGET.parent / "head"


@pytest.fixture(scope="module")
def target() -> Target:
    return load_target(EMBEDDED_TARGET)


def shipped(**fields: Any) -> Eagle3Head:
    """Return the embedded head with wrong fields in its config."""
    head = heads.load_head(SHIPPED)
    assert isinstance(head, Eagle3Head)
    misread = Eagle3Head(replace(head.config, **fields), head.token_ids)
    misread.update(head.parameters(), strict=False)
    return misread


def test_the_embedded_head_passes_without_a_word(target: Target) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        em.load_head(SHIPPED, target)


def test_hidden_states_that_say_nothing_to_the_head(target: Target, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(head_check, "TOKENS", in_full(head_check.TOKENS, 32))
    head = shipped()
    head.fc.weight = head.fc.weight[:, ::-1]
    warning = head_warning(head, target)
    assert warning is not None
    assert "layer ids in another convention or order (it reads the outputs of layers 1, 6, 10" in warning
    assert "norm_before_residual" in warning
    assert "another model, fine-tune or quantization" in warning
    assert "\n" not in warning


@pytest.mark.parametrize(
    ("flag", "message", "tokens"), [("fc_norm", "another norm flag", 32), ("norm_output", "good at depth 1", 64)]
)
def test_a_norm_flag_read_wrongly(
    target: Target, flag: str, message: str, tokens: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(head_check, "TOKENS", in_full(head_check.TOKENS, tokens))
    assert message in str(head_warning(shipped(**{flag: False}), target))


@pytest.fixture
def _short(monkeypatch: pytest.MonkeyPatch) -> None:
    """Decode fewer tokens: enough for heads that draft nothing useful."""
    monkeypatch.setattr(head_check, "TOKENS", 16)


def saved(folder: Path) -> Target:
    tiny = tiny_target()
    save_eagle3(tiny_head(tiny), folder)
    return tiny


@pytest.mark.usefixtures("_short")
def test_a_random_head_is_a_warning_that_can_be_left_out(tmp_path: Path) -> None:
    tiny = saved(tmp_path / "h")
    with pytest.warns(em.HeadWarning, match="first draft tokens, and two in 0%; heads that fit") as caught:
        em.load_head(tmp_path / "h", tiny)
    assert Path(caught[0].filename) == Path(__file__)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert em.load_head(tmp_path / "h", tiny, check=False) is not None
        assert em.load_head(tmp_path / "h") is not None, "without a target there is nothing to try"


@pytest.mark.usefixtures("_short")
def test_a_command_says_it_in_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    tiny = saved(tmp_path / "h")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert Speculation(head=str(tmp_path / "h")).proposer(tiny) is not None
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) == 1
    assert lines[0].startswith("warning: in ")


def test_a_head_that_is_right_by_construction_passes() -> None:
    """With layers that add nothing and a target that maps each token to another, the embedding alone is right."""
    tiny = bigram_target(tiny_target())
    head = eagle(tiny, bias=False)
    silence(head.layers[0].self_attn.o_proj, head.layers[0].mlp.down_proj)
    size = tiny.hidden_size
    head.fc.weight = mx.concatenate([mx.eye(size), mx.zeros((size, size))], axis=1)
    head.attach(tiny)
    scale = mx.rsqrt(mx.mean(mx.square(tiny.model.model.embed_tokens.weight), axis=-1, keepdims=True))
    tiny.model.model.embed_tokens.weight = tiny.model.model.embed_tokens.weight * scale
    trial = try_out(head, tiny)
    assert trial.both == trial.rounds > 60
    assert head_warning(head, tiny) is None


@pytest.mark.parametrize("name", in_turn(ALL, of=3))
def test_heads_of_every_kind_are_tried(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """These heads know nothing, but each of them works."""
    tokens = in_full(head_check.TOKENS, 16)
    monkeypatch.setattr(head_check, "TOKENS", tokens)
    tiny = tiny_target(vocab=64)
    assert try_out(ALL[name](tiny), tiny).rounds > 1.6 * tokens


@pytest.mark.parametrize(
    ("trial", "expected"),
    [
        (HeadTrial(100, 90, 70), None),
        (HeadTrial(100, 40, 20), None),
        (HeadTrial(100, 25, 11), None),
        (HeadTrial(0, 0, 0), None),
        (HeadTrial(190, 2, 0), "accepted 1% of first draft tokens, and two in 0%"),
        (HeadTrial(190, 47, 15), "Likely causes: layer ids"),
        (HeadTrial(100, 60, 4), "good at depth 1 and poor after it. Likely causes: norm_output"),
    ],
)
def test_what_is_said_of_a_trial(trial: HeadTrial, expected: str | None) -> None:
    warning = warning_of(trial)
    assert (warning is None) if expected is None else (warning is not None and expected in warning)


@pytest.mark.usefixtures("_short")
def test_nothing_random_is_disturbed() -> None:
    tiny = tiny_target()
    head = tiny_head(tiny)
    mx.random.seed(3)
    np.random.seed(3)
    random.seed(3)
    before = [mx.random.state[0].tolist(), np.random.get_state()[1].tolist(), random.getstate()]
    head_warning(head, tiny)
    after = [mx.random.state[0].tolist(), np.random.get_state()[1].tolist(), random.getstate()]
    assert before == after


def test_a_failure_of_the_trial_is_told_and_not_raised(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    tiny = saved(tmp_path / "h")

    def broken(_: Target) -> None:
        raise RuntimeError("no memory\nleft")

    monkeypatch.setattr(head_check, "trial_prompts", broken)
    with pytest.warns(em.HeadWarning, match="could not be tried on its target: RuntimeError: no memory left"):
        assert em.load_head(tmp_path / "h", tiny) is not None


def test_a_short_context_and_a_template_that_fails() -> None:
    tiny = tiny_target(tokenizer=True)
    tiny.context_length = 70
    assert [len(prompt) for prompt in head_check.trial_prompts(tiny)] == [5] * 4
    assert tiny.tokenizer is not None
    tiny.context_length = 512
    with_template = head_check.trial_prompts(tiny)
    tiny.tokenizer.chat_template = "{{ raise_exception('no users here') }}"
    plain = head_check.trial_prompts(tiny)
    assert [tiny.tokenizer.decode(prompt) for prompt in plain] == list(head_check.PROMPTS)
    assert all(len(a) > len(b) for a, b in zip(with_template, plain, strict=True))


def test_a_head_that_does_not_fit_is_still_refused(tmp_path: Path) -> None:
    save_eagle(eagle(tiny_target(), own_embedding=True), tmp_path / "h")
    with pytest.raises(em.EagleError, match="hidden size 32 but the target has 64"):
        em.load_head(tmp_path / "h", tiny_target(hidden=64))
