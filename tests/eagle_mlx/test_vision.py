"""Images: text equals that of mlx-vlm, however it is drafted, read, batched and cached."""

from __future__ import annotations

import importlib
import subprocess
import sys
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import cache
from io import BytesIO
from itertools import pairwise
from pathlib import Path
from typing import Any
from weakref import ref

import mlx.core as mx
import pytest

import eagle_mlx as em
from eagle_mlx.cache import RaggedCache
from eagle_mlx.cache.lengths import RowLengths
from eagle_mlx.engine.batch import Batch
from eagle_mlx.engine.collector import Collector
from eagle_mlx.engine.disk import DiskTier
from eagle_mlx.engine.prefill import Prefill
from eagle_mlx.engine.prefix_tree import keys_of
from eagle_mlx.errors import PromptError, TargetError
from eagle_mlx.hidden_states import from_16_bits
from eagle_mlx.plan import RoundResult
from eagle_mlx.proposers.head import HeadState
from eagle_mlx.request import read_prompt
from eagle_mlx.vision.spans import ImageSpan, ImageTokens
from eagle_mlx.vision.tower import Vision
from tests.eagle_mlx.heads import IN_BLOCKS, mtp
from tests.eagle_mlx.test_groups import ALWAYS, NEVER, grouped
from tests.fakes import tiny_head, tiny_target
from tests.full import diagonal, in_full, in_turn
from tests.vision_targets import picture, vision_folder

pytest.importorskip("mlx_vlm")
from mlx_vlm import utils as mlx_vlm
from mlx_vlm.generate.ar import generate_step

QWEN = ("qwen3_vl", "qwen3_vl_moe", "qwen3_5", "qwen3_5_moe")
KINDS = ("mistral3", "pixtral", "gemma3", "gemma4", *QWEN)
TOKENS = in_full(24, 12)
GREEDY = em.SamplingParams(max_tokens=TOKENS, ignore_eos=True)


def asks(*images: bytes, text: str = "def median(values):", before: str = "Look at ") -> list[dict[str, Any]]:
    parts = [{"type": "image", "image": image} for image in images]
    return [{"role": "user", "content": [{"type": "text", "text": before}, *parts, {"type": "text", "text": text}]}]


A, B = asks(picture(1, 48, 64)), asks(picture(2, 64, 40))
TEXT = [{"role": "user", "content": "import numpy as np\n\n\ndef sort(values):"}]


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    return cache(lambda kind: vision_folder(tmp_path_factory.mktemp("vision") / kind, kind))


class Reference:
    """mlx-vlm's own reading and greedy decoding of a folder's model."""

    def __init__(self, folder: Path, kind: str):
        from tests.vision_targets import TOKENS as NAMES

        self.model = mlx_vlm.load_model(folder)
        family = "qwen3_vl" if kind in QWEN else kind
        module = importlib.import_module(f"mlx_vlm.models.{family}.processing_{family}")
        names = (name for name in vars(module) if name.lower() == f"{family.replace('_', '')}processor")
        self.processor = getattr(module, next(names)).from_pretrained(str(folder))
        self.placeholder = NAMES[kind]["boi_token" if kind == "gemma3" else "image_token"]
        if kind in QWEN:
            self.placeholder = f"<|vision_start|>{self.placeholder}<|vision_end|>"
        self.texts: dict[str, list[tuple[int, mx.array]]] = {}

    def inputs(self, messages: Sequence[dict[str, Any]]) -> dict[str, Any]:
        from PIL import Image

        text, images = "", []
        for message in messages:
            parts = message["content"]
            parts = [{"type": "text", "text": parts}] if isinstance(parts, str) else parts
            text += f"<{message['role']}>"
            for part in parts:
                text += part["text"] if part["type"] == "text" else self.placeholder
                images += [Image.open(BytesIO(part["image"]))] if part["type"] == "image" else []
            text += "\n"
        more = {"images": images} if images else {}
        return dict(self.processor(text=[f"{text}<assistant>"], add_special_tokens=False, **more))

    def text(self, messages: Sequence[dict[str, Any]]) -> list[tuple[int, mx.array]]:
        """Return the tokens of an answer with the log probabilities [V] of all tokens in their place."""
        if (key := repr(messages)) not in self.texts:
            inputs = self.inputs(messages)
            ids, pixels, mask = (inputs.pop(name, None) for name in ("input_ids", "pixel_values", "attention_mask"))
            steps = generate_step(ids, self.model, pixels, mask, max_tokens=TOKENS, temperature=0.0, **inputs)
            self.texts[key] = [(int(token), logprobs) for token, logprobs in steps]
        return self.texts[key]

    def tokens(self, messages: Sequence[dict[str, Any]], count: int = TOKENS) -> list[int]:
        return [token for token, _ in self.text(messages)[:count]]


@pytest.fixture(scope="module")
def references(folders: Callable[[str], Path]) -> Callable[[str], Reference]:
    return cache(lambda kind: Reference(folders(kind), kind))


def proposers(target: em.Target) -> dict[str, Any]:
    draft = tiny_target(3, vocab=target.vocab_size)
    draft.tokenizer = target.tokenizer
    return {
        "nothing": lambda: None,
        "n-grams": em.NgramProposer,
        "a draft model": lambda: em.DraftModelProposer(draft),
        "EAGLE-3": lambda: em.HeadProposer(tiny_head(target)),
        "MTP": lambda: em.HeadProposer(mtp(target)),
        "a block": lambda: em.HeadProposer(IN_BLOCKS["dspark"](target)),
    }


loaded = cache(em.load_target)


def drafting(kind: str, folders: Callable[[str], Path], drafter: str = "nothing", **settings: Any) -> em.Engine:
    target = loaded(folders(kind))
    return em.Engine(target, proposers(target)[drafter](), policy=em.FixedPolicy(3), **settings)


@pytest.mark.parametrize(("kind", "drafter"), diagonal(KINDS, ["nothing", "n-grams", "a draft model", "EAGLE-3"]))
def test_a_batch_of_two_images_and_text_equals_mlx_vlm(
    kind: str, drafter: str, folders: Callable[[str], Path], references: Callable[[str], Reference]
) -> None:
    engine, reference = drafting(kind, folders, drafter), references(kind)
    prompts = [A, B, TEXT]
    outputs = engine.generate(prompts, GREEDY)
    wanted = [reference.tokens(messages) for messages in prompts]
    assert [output.tokens for output in outputs] == wanted
    assert wanted[0] != wanted[1]
    lengths = [reference.inputs(messages)["input_ids"].shape[1] for messages in prompts]
    assert [output.prompt_tokens for output in outputs] == lengths


@pytest.mark.parametrize(("kind", "chunk"), diagonal(["mistral3", "gemma3", "gemma4", "qwen3_vl", "qwen3_5"], [7, 1]))
def test_an_image_may_be_read_in_any_chunks(
    kind: str, chunk: int, folders: Callable[[str], Path], references: Callable[[str], Reference]
) -> None:
    engine = drafting(kind, folders, "EAGLE-3", prefill_chunk=chunk)
    two = asks(picture(1, 48, 64), picture(2, 64, 40))
    outputs = engine.generate([two, A, TEXT], GREEDY)
    assert [output.tokens for output in outputs] == [references(kind).tokens(prompt) for prompt in (two, A, TEXT)]


@pytest.mark.parametrize("kind", in_turn(["qwen3_vl", "gemma3", "qwen3_5", "mistral3", "gemma4"]))
def test_log_probabilities_after_images_are_mlx_vlms(
    kind: str, folders: Callable[[str], Path], references: Callable[[str], Reference]
) -> None:
    """After one wide, one tall and several images, of which each moves the positions of all that follows."""
    prompts = [A, B, asks(picture(1, 48, 64), picture(2, 64, 40)), [*A, *asks(picture(3, 96, 32))]]
    params = replace(GREEDY, top_logprobs=20)
    for prompt, output in zip(prompts, drafting(kind, folders, "EAGLE-3").generate(prompts, params), strict=True):
        for own, (_, logprobs) in zip(output.logprobs, references(kind).text(prompt), strict=True):
            top = dict(own.top)
            assert mx.allclose(mx.array([*top.values()]), logprobs.flatten()[mx.array([*top])], atol=1e-4).item()


@pytest.mark.parametrize("kind", in_turn(["mistral3", "qwen3_vl", "qwen3_5"]))
def test_rows_with_images_move_between_groups(
    kind: str, folders: Callable[[str], Path], references: Callable[[str], Reference]
) -> None:
    engine = grouped(drafting(kind, folders, "EAGLE-3"), NEVER)
    prompts = [A, TEXT, B, TEXT]
    requests = [engine.prepare(prompt, GREEDY) for prompt in prompts]
    for request in requests:
        engine.submit(request)
    groups = set[int]()
    while not engine.idle:
        engine.step()
        groups.add(len(engine.snapshot().groups))
        engine.groups.change()  # so that it looks now, not in some rounds
        grouped(engine, ALWAYS if engine.groups.reads is NEVER else NEVER)
    assert groups >= {1, 2}
    assert [request.tokens for request in requests] == list(map(references(kind).tokens, prompts))


@pytest.mark.parametrize("kind", in_turn(["mistral3", "qwen3_vl", "qwen3_5"]))
def test_rows_with_images_join_pause_and_leave(
    kind: str, folders: Callable[[str], Path], references: Callable[[str], Reference]
) -> None:
    engine = drafting(kind, folders, "n-grams", prefill_chunk=16)
    short = em.SamplingParams(max_tokens=6, ignore_eos=True)
    requests = [engine.prepare(A, GREEDY), engine.prepare(TEXT, short)]
    for request in requests:
        engine.submit(request)
    while engine.active < 2:
        engine.step()
    requests += [engine.prepare(B, GREEDY), engine.prepare(A, short)]
    for request in requests[2:]:
        engine.submit(request)
    engine.step()
    engine.pause(requests[0])
    while not engine.idle:
        engine.step()
    assert engine.pauses == 1
    tokens = references(kind).tokens
    assert [request.tokens for request in requests] == [tokens(A), tokens(TEXT, 6), tokens(B), tokens(A, 6)]


@pytest.mark.parametrize(
    ("kind", "drafter"), diagonal(["mistral3", "qwen3_vl"], ["n-grams", "EAGLE-3", "MTP", "a block"])
)
def test_seeded_text_after_images_does_not_depend_on_drafts(
    kind: str, drafter: str, folders: Callable[[str], Path], references: Callable[[str], Reference]
) -> None:
    params = [em.SamplingParams(max_tokens=TOKENS, seed=5, temperature=1.0, ignore_eos=True)] * 3
    plain = drafting(kind, folders).generate([A, B, TEXT], params)
    drafted = drafting(kind, folders, drafter).generate([A, B, TEXT, A], [*params, GREEDY])
    assert [output.tokens for output in drafted[:3]] == [output.tokens for output in plain]
    assert drafted[3].tokens == references(kind).tokens(A)


@pytest.mark.parametrize(("kind", "chunk"), diagonal(["qwen3_5", "gemma4"], [1000, 7]))
def test_mtp_heads_read_the_embeddings_of_images(kind: str, chunk: int, folders: Callable[[str], Path]) -> None:
    target = em.load_target(folders(kind))
    head = mtp(target)
    proposer = em.HeadProposer(head)
    engine = em.Engine(target, proposer)
    request = engine.prepare(A, GREEDY)
    prefill = Prefill(Batch(target, proposer, [request]))
    while prefill.left:
        prefill.step(chunk)
    prefill.batch.observe([[5]], [len(request.prompt) - 1], [1], [mx.zeros((1, 1, target.hidden_size))])
    assert isinstance(prefill.batch.state, HeadState)
    cached_keys, _ = prefill.batch.state.cache[0].keys_and_values()
    reading = Collector((), target.num_layers - 1, 1 << 30, context=1000, most=1000)
    em.Engine(target, collector=reading).generate(A, em.SamplingParams(max_tokens=1, ignore_eos=True))
    [served] = reading.take()
    assert served.states is not None
    states = from_16_bits(served.states.last)[None, :-2].astype(target.dtype)
    (span,) = request.request.images
    embeddings = target.embed(mx.array([request.prompt[1:]]))
    assert head.reads_images
    plain, merged = mx.array(embeddings), mx.array(embeddings)
    merged[:, span.start - 1 : span.end - 1] = span.image.features[0]

    def keys(embeddings: mx.array) -> mx.array:
        cache = RaggedCache(1, 1)
        head(embeddings, head.features([states]), cache)
        cache.lengths.advance(states.shape[1])
        return cache[0].keys_and_values()[0][:, :, : states.shape[1]]

    wanted = keys(merged)
    assert mx.allclose(cached_keys[:, :, : states.shape[1]], wanted, atol=0.1).item()
    assert not mx.allclose(keys(plain), wanted, atol=0.1).item()


def test_embeddings_of_images_count_in_the_memory_of_rows(folders: Callable[[str], Path]) -> None:
    engine = drafting("mistral3", folders)
    request = engine.prepare(A, GREEDY)
    (span,) = request.request.images
    text = engine.prepare(request.prompt, GREEDY)
    nbytes = engine.kv_budget.set_aside([request]) - engine.kv_budget.set_aside([text])
    assert nbytes == span.image.nbytes == span.image.features.nbytes


@pytest.mark.parametrize("pauses", [True, False])
def test_embeddings_of_images_are_freed_when_their_row_leaves(
    pauses: bool, folders: Callable[[str], Path], references: Callable[[str], Reference]
) -> None:
    engine = drafting("mistral3", folders)
    request = engine.prepare(A, GREEDY)
    engine.submit(request)
    while not request.tokens:
        engine.step()
    embeddings = ref(request.request.images[0].image.features)
    if pauses:
        engine.pause(request)
    while not (engine.pauses or engine.idle):
        engine.step()
    assert embeddings() is None
    while not engine.idle:
        engine.step()
    assert request.tokens == references("mistral3").tokens(A)


CACHED = {"prefix_cache_bytes": 1 << 24}
LONG = "def median(values):\n    # " + "sorted values " * 8


@pytest.mark.parametrize(
    ("kind", "drafter"),
    [
        *in_full([("mistral3", "nothing"), ("mistral3", "EAGLE-3")], []),
        ("mistral3", "a draft model"),
        ("qwen3_vl", "EAGLE-3"),
    ],
)
def test_the_prefix_cache_distinguishes_images(
    kind: str, drafter: str, folders: Callable[[str], Path], references: Callable[[str], Reference]
) -> None:
    engine = drafting(kind, folders, drafter, **CACHED)
    first, other = (asks(picture(seed, 48, 64), before=LONG, text=LONG) for seed in (1, 2))
    tokens = references(kind).tokens
    start = engine.prepare(first, GREEDY).request.images[0].start
    fresh = engine.generate(first, GREEDY)
    again = engine.generate(first, GREEDY)
    another = engine.generate(other, GREEDY)
    assert fresh.cached_tokens == 0
    assert again.cached_tokens >= again.prompt_tokens - 3
    assert start - 1 <= another.cached_tokens <= start, "it shares no more than the text before the image"
    assert [fresh.tokens, again.tokens, another.tokens] == [tokens(first), tokens(first), tokens(other)]


@pytest.mark.parametrize("kind", in_turn(["mistral3", "qwen3_vl", "qwen3_5"]))
def test_a_second_screenshot_reuses_the_first(
    kind: str, folders: Callable[[str], Path], references: Callable[[str], Reference]
) -> None:
    engine = drafting(kind, folders, "n-grams", **CACHED)
    turn = asks(picture(1, 48, 64), before=LONG)
    end = engine.prepare(turn, GREEDY).request.images[0].end
    engine.submit(engine.prepare(turn, GREEDY, boundaries=[end + 2]))
    while not engine.idle:
        engine.step()
    later = [*turn, *asks(picture(2, 64, 40), before="and this: ")]
    output = engine.generate(later, GREEDY)
    assert output.cached_tokens >= end
    assert output.tokens == references(kind).tokens(later)


@pytest.mark.parametrize("kind", in_turn(["mistral3", "qwen3_vl"], 1))
def test_files_of_the_prefix_cache_distinguish_images_and_vision_weights(
    kind: str, folders: Callable[[str], Path], tmp_path: Path
) -> None:
    def engine(folder: Path) -> em.Engine:
        target = em.load_target(folder)
        files = DiskTier(tmp_path / "cache", 1 << 30, target)
        return em.Engine(target, prefix_files=files, **CACHED)

    first, other = (asks(picture(seed, 48, 64), before=LONG, text=20 * LONG) for seed in (1, 2))
    writer = engine(folders(kind))
    wanted = writer.generate([first, other], GREEDY)
    assert writer.prefixes is not None
    assert writer.prefixes.disk is not None
    assert writer.prefixes.disk.close(20.0)
    again = engine(folders(kind))
    assert [output.tokens for output in again.generate([first, other], GREEDY)] == [o.tokens for o in wanted]
    cached = again.generate(first, GREEDY).cached_tokens
    assert cached > again.prepare(first, GREEDY).request.images[0].end
    changed = vision_folder(tmp_path / "changed", kind)
    weights = mx.load(str(changed / "model.safetensors"))
    name = next(name for name in weights if name.startswith("vision_tower") and name.endswith("weight"))
    weights[name] += 0.01
    mx.save_safetensors(str(changed / "model.safetensors"), weights, metadata={"format": "mlx"})
    output = engine(changed).generate(first, GREEDY)
    assert output.cached_tokens <= again.prepare(first, GREEDY).request.images[0].start


def test_keys_of_two_images_share_no_number() -> None:
    images = [ImageTokens("", [7] * 200, bytes([seed]), 0, False, None, lambda: mx.zeros((1,))) for seed in range(3)]
    keys = [keys_of([*range(40), *[7] * 200, 1, 2], [ImageSpan(40, image)]) for image in images]
    assert all((some[:39] == keys[0][:39]).all() for some in keys)
    assert all(not set(a[40:239]) & set(b[40:239]) for a, b in pairwise(keys))
    assert all((some >= 0).all() for some in keys)


@pytest.mark.parametrize("kind", ["qwen3_vl", "qwen3_5"])
def test_an_image_moves_the_positions_of_its_own_row_only(kind: str, folders: Callable[[str], Path]) -> None:
    target = em.load_target(folders(kind))
    texts = mx.array([[5, 6, 7, 8], [9, 10, 11, 12]])

    def logits(shifts: list[int]) -> mx.array:
        cache = RaggedCache.of(target.model, 2)
        cache.lengths.shift(shifts)
        target.forward(texts, cache)
        cache.advance(mx.array([4, 3], mx.int32), at_most=4)
        return target.forward(texts[:, :1], cache).logits

    plain, moved = logits([0, 0]), logits([0, -2])
    assert mx.array_equal(plain[0], moved[0])
    assert not mx.allclose(plain[1], moved[1])


def test_trees_are_not_drafted_for_images(
    folders: Callable[[str], Path], references: Callable[[str], Reference]
) -> None:
    target = em.load_target(folders("qwen3_vl"))
    results = list[RoundResult]()
    policy = em.FixedPolicy(3, nodes=8)
    engine = em.Engine(target, em.HeadProposer(tiny_head(target)), policy=policy, observer=results.append)
    tokens = references("qwen3_vl").tokens
    assert engine.generate(TEXT, GREEDY).tokens == tokens(TEXT)
    assert any(result.plan.is_tree for result in results)
    results.clear()
    assert [output.tokens for output in engine.generate([A, TEXT], GREEDY)] == [tokens(A), tokens(TEXT)]
    assert not any(result.plan.is_tree for result in results)


def test_image_tokens_of_gemma_4_see_one_another(
    folders: Callable[[str], Path], references: Callable[[str], Reference], monkeypatch: pytest.MonkeyPatch
) -> None:
    wanted = references("gemma4").tokens(A)
    assert drafting("gemma4", folders).generate(A, GREEDY).tokens == wanted
    monkeypatch.setattr(RowLengths, "see_blocks", lambda self, blocks: None)
    assert drafting("gemma4", folders).generate(A, GREEDY).tokens != wanted


def test_a_vision_tower_that_cannot_be_loaded_ends_only_requests_with_images(
    folders: Callable[[str], Path], references: Callable[[str], Reference], tmp_path: Path
) -> None:
    folder = vision_folder(tmp_path / "damaged", "mistral3")
    weights = mx.load(str(folder / "model.safetensors"))
    assert isinstance(weights, dict)
    del weights["multi_modal_projector.linear_1.weight"]
    mx.save_safetensors(str(folder / "model.safetensors"), weights, metadata={"format": "mlx"})
    engine = em.Engine(em.load_target(folder))
    requests = [engine.prepare(TEXT, GREEDY), engine.prepare(A, GREEDY)]
    for request in requests:
        engine.submit(request)
    errors = []
    while not engine.idle:
        try:
            engine.step()
        except TargetError as e:
            errors.append(str(e))
    assert requests[0].tokens == references("mistral3").tokens(TEXT)
    assert requests[1].error == "the engine failed: TargetError"
    assert "vision tower" in errors[0]


def test_types_without_support_and_missing_packages_are_named(
    folders: Callable[[str], Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def reason(folder: Path) -> str:
        target = em.Engine(em.load_target(folders("mistral3"))).target
        target.vision = Vision.of(folder, target.embed, target.dtype)
        with pytest.raises(PromptError) as e:
            read_prompt(target, A)
        return str(e.value)

    (tmp_path / "config.json").write_text('{"model_type": "llava", "vision_config": {"patch_size": 14}}')
    assert "models of type llava, only for gemma3, gemma4, mistral3, pixtral, qwen3_5" in reason(tmp_path)
    (tmp_path / "config.json").write_text('{"model_type": "gemma3", "vision_config": {"patch_size": 14}}')
    assert "have no weights of a vision tower" in reason(tmp_path)
    (tmp_path / "config.json").write_text('{"model_type": "gemma3"}')
    assert "reads only text" in reason(tmp_path)
    monkeypatch.setattr("eagle_mlx.vision.tower.find_spec", lambda name: None)
    assert "pip install 'eagle-mlx[vision]'" in reason(folders("mistral3"))


def test_images_are_refused_by_name_over_several_processes(folders: Callable[[str], Path]) -> None:
    target = em.load_target(folders("mistral3"), shard=lambda model: None)
    with pytest.raises(PromptError, match="leave out --shard"):
        read_prompt(target, A)
    assert read_prompt(target, TEXT).tokens


def test_text_for_a_model_that_sees_imports_no_mlx_vlm(folders: Callable[[str], Path]) -> None:
    program = (
        "import sys, eagle_mlx as em\n"
        f"engine = em.Engine(em.load_target({str(folders('mistral3'))!r}))\n"
        "engine.generate([{'role': 'user', 'content': 'hi'}], em.SamplingParams(max_tokens=2))\n"
        "assert 'mlx_vlm' not in sys.modules"
    )
    ended = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=120, check=False)
    assert ended.returncode == 0, ended.stderr
