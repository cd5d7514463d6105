"""Conversations with images: what is captured of them are the states that decoding has, and their text is learned."""

from __future__ import annotations

import json
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import eagle_mlx as em
from eagle_mlx.data_pipelines import Conversation, capture, cli, render_all
from eagle_mlx.data_pipelines.capturing import ShardCapture
from eagle_mlx.data_pipelines.rendering import Sample, all_tokens, examine, prompt_tokens
from eagle_mlx.data_pipelines.sources.rows import parse_row
from eagle_mlx.engine.collector import Collector
from eagle_mlx.errors import DataError
from eagle_mlx.hidden_states import widened
from eagle_mlx.shards import ShardReader
from eagle_mlx.train import cli as train
from tests.full import in_turn
from tests.vision_targets import data_url, picture, vision_folder

pytest.importorskip("mlx_vlm")
LAYERS = (0, 2)
ANSWER = "It sorts the values, then it returns the one in the middle."


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    return cache(lambda kind: vision_folder(tmp_path_factory.mktemp("vision") / kind, kind))


def question(*images: object, text: str = "what does this show?") -> dict[str, Any]:
    parts = [{"type": "image", "image": image} for image in images]
    return {"role": "user", "content": [{"type": "text", "text": "Look at "}, *parts, {"type": "text", "text": text}]}


def conversation(*images: object, **more: str) -> Conversation:
    turns = [question(*images, **more), {"role": "assistant", "content": ANSWER}]
    return parse_row({"messages": turns}, "chats.jsonl:7")


def rendered(target: em.Target, *conversations: Conversation, length: int = 1000) -> list[Sample]:
    assert target.tokenizer is not None
    return render_all(target.tokenizer, conversations, length, vision=target.vision)[0]


@pytest.mark.parametrize("kind", in_turn(["gemma4", "mistral3", "qwen3_vl", "qwen3_5"]))
def test_states_are_those_of_decoding(kind: str, folders: Callable[[str], Path]) -> None:
    target = em.load_target(folders(kind))
    a, b = picture(1, 48, 64), picture(2, 64, 40)
    samples = rendered(target, conversation(a, b), conversation(b, a), conversation())
    captured = {example.key: example for example in capture(target, LAYERS, samples)}
    first, other, text = (captured[sample.key] for sample in samples)
    collector = Collector(LAYERS, target.num_layers - 1, 1 << 30, context=1000, most=1000)
    engine = em.Engine(target, prefill_chunk=16, collector=collector)
    output = engine.generate([question(a, b)], em.SamplingParams(max_tokens=4, ignore_eos=True))
    [served] = collector.take()
    count = output.prompt_tokens - 1
    assert first.tokens[: count + 1].tolist() == served.tokens[: count + 1].tolist()
    for example in (first, served, other, text):
        assert example.states is not None
    mine, theirs = (widened(example.states.whole[:count]) for example in (first, served) if example.states)
    np.testing.assert_allclose(mine, theirs, rtol=2e-2, atol=2e-2)
    assert not np.allclose(mine[-1], widened(other.states.whole[count - 1]), rtol=2e-2, atol=2e-2)  # type: ignore[union-attr]


def test_only_text_is_learned(folders: Callable[[str], Path]) -> None:
    target = em.load_target(folders("mistral3"))
    assert target.tokenizer is not None
    [sample] = rendered(target, conversation(picture(1, 48, 64), picture(2, 64, 40)))
    learned = [token for token, mask in zip(sample.tokens, sample.loss_mask, strict=True) if mask]
    assert target.tokenizer.decode(learned).strip() == ANSWER
    assert [sample.tokens[span.start : span.end] for span in sample.images] == [s.image.tokens for s in sample.images]
    assert len(sample.images) == 2
    shown = parse_row({"messages": [question(), {**question(picture(1)), "role": "assistant"}]}, "x:1")
    [answered] = rendered(target, shown)
    assert not any(answered.loss_mask[answered.images[0].start : answered.images[0].end])


def test_a_conversation_is_cut_before_an_image_that_does_not_fit(folders: Callable[[str], Path]) -> None:
    target = em.load_target(folders("mistral3"))
    turns = [question(picture(1)), {"role": "assistant", "content": ANSWER}, question(picture(2))]
    row = parse_row({"messages": [*turns, {"role": "assistant", "content": ANSWER}]}, "x:1")
    [whole] = rendered(target, row)
    second = whole.images[1]
    for length in (second.start + 1, second.end, second.end + 1):
        [cut] = rendered(target, row, length=length)
        assert len(cut.tokens) == second.start
        assert len(cut.images) == 1
    [cut] = rendered(target, row, length=second.end + 2)
    assert len(cut.images) == 2
    assert len(list(capture(target, LAYERS, [cut]))) == 1


def test_another_image_is_another_prompt(folders: Callable[[str], Path]) -> None:
    first, other = (conversation(data_url(picture(seed))) for seed in (1, 2))
    assert first.prompt_key() != other.prompt_key()
    assert first.whole_key() != other.whole_key()
    target = em.load_target(folders("mistral3"))
    made = [ShardCapture(target, LAYERS, rendered(target, chat)).made_from for chat in (first, other)]
    assert made[0] != made[1], "a capture of other images is not continued"


def test_conversations_with_images_are_refused_by_name_where_only_text_is_read(
    folders: Callable[[str], Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    target = em.load_target(folders("mistral3"))
    chat = conversation(picture(1))
    assert target.tokenizer is not None
    for read in (examine, all_tokens, prompt_tokens):
        with pytest.raises(DataError, match=r"^chats.jsonl:7: conversations with images.*eagle-data collect"):
            read(target.tokenizer, chat)  # type: ignore[operator]
    with pytest.raises(DataError, match=r"chats.jsonl:7: the image no.png cannot be read"):
        examine(target.tokenizer, conversation("no.png"), target.vision)
    file = tmp_path / "chats.jsonl"
    file.write_text(json.dumps({"messages": [question("a.png"), {"role": "assistant", "content": ANSWER}]}) + "\n")
    assert cli.main(["regenerate", "--target", "none", "--data", str(file), "--output", f"{tmp_path}/o.jsonl"]) == 2
    assert train.main(["--target", "none", "--data", str(file), "--output", f"{tmp_path}/head"]) == 2
    assert capsys.readouterr().err.count("conversations with images can only be inspected or captured") == 2


def test_a_head_learns_from_conversations_with_images(
    folders: Callable[[str], Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    target = str(folders("qwen3_5"))
    image = tmp_path / "a.png"
    image.write_bytes(picture(1, 48, 64))
    sources = [str(image), data_url(picture(2, 64, 40))]
    rows = [[question(*sources[:n], text=f"question {n}"), {"role": "assistant", "content": ANSWER}] for n in range(3)]
    images, texts = tmp_path / "images.jsonl", tmp_path / "texts.jsonl"
    images.write_text("".join(json.dumps({"messages": row}) + "\n" for row in rows))
    texts.write_text("".join(json.dumps({"prompt": f"say {n}", "completion": ANSWER}) + "\n" for n in range(4)))
    assert cli.main(["inspect", str(images), "--target", target, "--split", "all"]) == 0
    assert f"<|vision_start|><|image_pad|><|vision_end|>question 1\n<assistant>⟦{ANSWER}" in capsys.readouterr().out
    assert cli.main(["inspect", str(images), "--split", "all"]) == 0
    assert "[user] Look at [image][image]question 2" in capsys.readouterr().out
    shards = ["--data", str(images), "--split", "all", "--aux-layers", "0,2", "--output", f"{tmp_path}/s"]
    assert cli.main(["collect", "--target", target, *shards]) == 0
    assert len(ShardReader(tmp_path / "s")) == 3
    learned = ["--shards", f"{tmp_path}/s", "--eval-data", str(texts), "--max-steps", "3", "--eval-tokens", "8"]
    sizes = ["--rows", "2", "--length", "64", "--unroll", "2", "--draft-vocab", "64"]
    assert train.main(["--target", target, *learned, *sizes, "--output", f"{tmp_path}/head"]) == 0
    model = em.load_target(target)
    head = em.load_head(tmp_path / "head" / "best", model)
    greedy = em.SamplingParams(max_tokens=12, ignore_eos=True)
    prompts = [[question(image.read_bytes())], [question()]]
    plain = em.Engine(model).generate(prompts, greedy)
    drafted = em.Engine(model, head, policy=em.FixedPolicy(3)).generate(prompts, greedy)
    assert [output.tokens for output in drafted] == [output.tokens for output in plain]
