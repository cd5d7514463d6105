"""Texts by a target without a chat template depend only on the seed, as conversations do."""

from __future__ import annotations

import json
import random
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
from mlx_lm.tokenizer_utils import TokenizerWrapper
from tokenizers.processors import TemplateProcessing
from transformers import AutoTokenizer

from eagle_mlx.data_pipelines import beginning, cli
from eagle_mlx.data_pipelines.capturing import ShardPlace, capture_to_shards, shard_meta
from eagle_mlx.data_pipelines.jsonl import partial_path
from eagle_mlx.data_pipelines.options import MakeConfig
from eagle_mlx.data_pipelines.rendering import render
from eagle_mlx.data_pipelines.sources.rows import parse_row
from eagle_mlx.data_pipelines.synthesis.file import Wanted, make_to_file
from eagle_mlx.engine import Engine
from eagle_mlx.errors import TargetError
from eagle_mlx.hidden_states import widened
from eagle_mlx.policy import FixedPolicy
from eagle_mlx.proposers.capturing import CapturingProposer
from eagle_mlx.proposers.head import HeadProposer
from eagle_mlx.shards import ShardReader
from eagle_mlx.target import Target
from tests.fakes import EMBEDDED_TARGET, interrupt_after, talking_target_folder, tiny_head, tiny_target

CONFIG = MakeConfig(seed=3, max_tokens=24)
ROWS = 8
LAYERS = (0, 2)


def tokenizer(ends: Sequence[int] = (2,)) -> TokenizerWrapper:
    """Return the embedded tokenizer without its template."""
    inner = AutoTokenizer.from_pretrained(EMBEDDED_TARGET)
    inner.chat_template = None
    return TokenizerWrapper(inner, eos_token_ids=list(ends))


@pytest.fixture(scope="module")
def target() -> Target:
    return Target(tiny_target(vocab=4096).model, tokenizer((2, *range(5, 4096, 40))), name="base")


@pytest.fixture(scope="module")
def whole(target: Target, tmp_path_factory: pytest.TempPathFactory) -> bytes:
    """Return the file of an uninterrupted run."""
    path = tmp_path_factory.mktemp("whole") / "a.jsonl"
    make_to_file(Engine(target, max_batch=4), CONFIG, Wanted(rows=ROWS), path)
    return path.read_bytes()


def engines(target: Target) -> list[Engine]:
    head = HeadProposer(tiny_head(target))
    return [
        Engine(target, max_batch=1),
        Engine(target, max_batch=7),
        Engine(target, head, policy=FixedPolicy(3), max_batch=3),
    ]


class Stop(Exception):
    """An exception that nothing handles."""


def test_the_file_is_the_same_in_any_company_and_after_any_interruption(
    target: Target, whole: bytes, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rows = [parse_row(json.loads(line), "x") for line in whole.splitlines()]
    assert len({row.text for row in rows}) == len(rows) == ROWS
    assert target.tokenizer is not None
    for row in rows:
        assert all(render(target.tokenizer, row).loss_mask)
    rng, path = random.Random(0), tmp_path / "a.jsonl"
    while not path.exists():
        with monkeypatch.context() as patch:
            interrupt_after(rng.randint(1, 6), Stop, patch)
            try:
                report = make_to_file(engines(target)[rng.randrange(3)], CONFIG, Wanted(rows=ROWS), path)
            except Stop:
                assert partial_path(path).exists()
    assert path.read_bytes() == whole
    assert report.answers == ROWS
    assert report.heldout == sum(row.is_held_out for row in rows)
    make_to_file(Engine(target), MakeConfig(seed=4, max_tokens=24), Wanted(rows=2), tmp_path / "other.jsonl")
    assert not set((tmp_path / "other.jsonl").read_bytes().splitlines()) & set(whole.splitlines())


def test_captured_states_are_those_of_a_capture_afterwards(target: Target, whole: bytes, tmp_path: Path) -> None:
    capture = CapturingProposer((*LAYERS, target.num_layers - 1))
    engine = Engine(target, capture, policy=FixedPolicy(0), max_batch=3)
    place = ShardPlace(tmp_path / "s", shard_meta(target, LAYERS))
    make_to_file(engine, CONFIG, Wanted(rows=ROWS), tmp_path / "a.jsonl", place=place)
    assert (tmp_path / "a.jsonl").read_bytes() == whole
    found = list(ShardReader(tmp_path / "s"))
    rows = [parse_row(json.loads(line), "x") for line in whole.splitlines()]
    assert len(found) == sum(not row.is_held_out for row in rows)
    texts = [(one.tokens.tolist(), one.loss_mask.tolist()) for one in found]
    assert all(tokens[0] == 2 and mask == [0] + [1] * (len(tokens) - 1) for tokens, mask in texts)
    capture_to_shards(target, LAYERS, texts, tmp_path / "again")
    read = {tuple(one.tokens.tolist()): one for one in ShardReader(tmp_path / "again")}
    for one in found:
        other = read[tuple(one.tokens.tolist())]
        assert np.allclose(widened(one.states.features[:-1]), widened(other.states.features[:-1]), rtol=1e-2, atol=2e-3)
        assert np.allclose(widened(one.states.last[:-1]), widened(other.states.last[:-1]), rtol=1e-2, atol=2e-3)


def test_the_command_says_what_is_of_no_effect(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model = talking_target_folder(tmp_path / "base")
    (model / "chat_template.jinja").unlink()
    out = tmp_path / "a.jsonl"
    assert cli.main(["make", "--target", str(model), "--rows", "3", "--max-tokens", "12", "--output", str(out)]) == 0
    said = capsys.readouterr()
    assert "writes texts from their beginning ('<|im_end|>')" in said.err
    assert "3 conversations of " in said.out
    assert cli.main(["inspect", str(out), "--target", str(model)]) == 0


def test_where_a_text_begins() -> None:
    """With the tokenizer's prefix, else its BOS token, else the token between texts."""
    plain = tokenizer()
    assert beginning(plain, "M") == [2]
    plain.bos_token = "<|endoftext|>"
    assert beginning(plain, "M") == [0]
    plain.backend_tokenizer.post_processor = TemplateProcessing(
        single="<|im_start|> $A <|im_end|>", special_tokens=[("<|im_start|>", 1), ("<|im_end|>", 2)]
    )
    assert beginning(plain, "M") == [1]
    silent = tokenizer()
    silent.eos_token = None
    with pytest.raises(TargetError, match="M has neither a chat template nor a token that begins or ends a text"):
        beginning(silent, "M")
