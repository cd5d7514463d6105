"""Batches do not change the captured hidden states."""

from __future__ import annotations

from pathlib import Path

import mlx.core as mx
import numpy as np
import pytest

from eagle_mlx.data_pipelines import ShardCapture, capture, capturing
from eagle_mlx.errors import OutputError, TargetError
from eagle_mlx.hidden_states import Example, from_16_bits, widened
from eagle_mlx.shards import ShardReader
from tests.data_pipelines.rows import AUX, conversations
from tests.fakes import tiny_target


def by_tokens(samples: list[Example]) -> dict[tuple[int, ...], Example]:
    return {tuple(s.tokens.tolist()): s for s in samples}


@pytest.mark.parametrize("streams", [1, 2])
@pytest.mark.parametrize("batch_tokens", [1, 64, 4096])
def test_batching_changes_nothing(batch_tokens: int, streams: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(capturing, "default_streams", lambda: streams)
    target = tiny_target()
    captured = by_tokens(list(capture(target, AUX, conversations(), batch_tokens)))
    assert len(captured) == 9
    for tokens, mask in conversations():
        sample = captured[tuple(tokens)]
        alone = target.forward(mx.array([tokens]), aux_layers=(*AUX, 3)).aux
        expected = [np.array(a[0]) for a in alone]
        assert sample.loss_mask.tolist() == mask
        assert (sample.tokens.dtype, sample.loss_mask.dtype) == (np.int32, np.uint8)
        assert (sample.states.features.dtype, sample.states.last.dtype) == (np.uint16, np.uint16)
        np.testing.assert_allclose(
            widened(sample.states.features), np.concatenate(expected[:2], -1), rtol=1e-2, atol=2e-3
        )
        np.testing.assert_allclose(widened(sample.states.last), expected[2], rtol=1e-2, atol=2e-3)


def test_the_last_layer_gives_the_target_s_own_logits() -> None:
    target = tiny_target()
    [(tokens, mask)] = conversations(1)
    [sample] = capture(target, AUX, [(tokens, mask)])
    logits = target.logits(target.norm(from_16_bits(sample.states.last).astype(mx.float32)))
    np.testing.assert_allclose(logits, target.forward(mx.array([tokens])).logits[0], rtol=2e-2, atol=2e-2)


def test_batches_stay_within_their_tokens(monkeypatch: pytest.MonkeyPatch) -> None:
    target, shapes = tiny_target(), []
    forward = target.forward

    def watched(tokens: mx.array, **kwargs: object) -> object:
        shapes.append(tokens.shape)
        return forward(tokens, **kwargs)  # type: ignore[arg-type]

    monkeypatch.setattr(target, "forward", watched)
    list(capture(target, AUX, conversations(30), 100))
    assert all(rows * length <= 100 for rows, length in shapes)
    assert len(shapes) < 15


def test_windows_bound_what_is_read_ahead(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(capturing, "WINDOW", 4)
    monkeypatch.setattr(capturing, "default_streams", lambda: 1)
    rows = iter(conversations(9))
    first = next(capture(tiny_target(), AUX, rows))
    assert len(list(rows)) == 5
    assert len(first.tokens) == min(len(tokens) for tokens, _ in conversations(9)[:4])


def test_values_beyond_float16_are_kept() -> None:
    target = tiny_target()
    embedding = target.model.model.embed_tokens
    embedding.weight = embedding.weight * 1e6
    [(tokens, mask)] = conversations(1)
    [sample] = capture(target, AUX, [(tokens, mask)])
    alone = np.concatenate([x[0] for x in target.forward(mx.array([tokens]), aux_layers=AUX).aux], -1)
    assert np.abs(alone).max() > 1e5
    np.testing.assert_allclose(widened(sample.states.features), alone, rtol=1e-2, atol=2e-3)


def test_shards_hold_what_memory_holds(tmp_path: Path) -> None:
    target = tiny_target()
    ShardCapture(target, AUX, conversations()).write(tmp_path / "s")
    reader = ShardReader(tmp_path / "s")
    assert (reader.meta.target, reader.meta.hidden_size, reader.meta.vocab_size) == ("tiny", 32, 128)
    assert reader.meta.aux_layers == AUX
    expected = by_tokens(list(capture(target, AUX, conversations())))
    for tokens, sample in by_tokens(list(reader)).items():
        assert (sample.states.features == expected[tokens].states.features).all()
        assert (sample.states.last == expected[tokens].states.last).all()
    with pytest.raises(OutputError, match="exists already"):
        ShardCapture(target, AUX, conversations()).write(tmp_path / "s")


def test_a_layer_that_there_is_not(tmp_path: Path) -> None:
    with pytest.raises(TargetError, match="layer 9"):
        ShardCapture(tiny_target(), (0, 9), conversations()).write(tmp_path / "s")
    assert list(tmp_path.iterdir()) == []
