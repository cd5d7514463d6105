"""Heads of every kind through the one proposer: the text is the target's, and drafts are the head's."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache

import mlx.core as mx
import numpy as np
import pytest

import eagle_mlx as em
from eagle_mlx.decoding.sampling import SamplingBatch
from eagle_mlx.errors import ConfigError, HeadError
from eagle_mlx.heads.base import DraftHead
from eagle_mlx.heads.block import BlockHead
from eagle_mlx.heads.eagle3 import PEagleHead, default_aux_layers
from eagle_mlx.heads.mtp import MTPConfig
from eagle_mlx.plan import Plan
from eagle_mlx.proposers.base import Observation
from tests.architectures import tiny_model
from tests.eagle_mlx.heads import ALL, bigram_target, eagle, eagle3, mtp, silence
from tests.fakes import randomize, tiny_target
from tests.full import in_full, in_turn

TARGET = tiny_target(vocab=64)
HEADS = {name: make(TARGET) for name, make in ALL.items()}
PROMPTS = [[1, 2, 3, 4, 5], [9], [7, 7, 8, 50, 3, 2, 1, 60, 33], list(range(30))]
PARAMS = [
    em.SamplingParams(max_tokens=14),
    em.SamplingParams(max_tokens=11, temperature=0.9, seed=3),
    em.SamplingParams(max_tokens=17, temperature=1.3, seed=4, top_k=20),
    em.SamplingParams(max_tokens=9),
]


@cache
def alone() -> list[list[int]]:
    """Return each request's text alone, without drafts."""
    return [em.Engine(TARGET).generate([p], params)[0].tokens for p, params in zip(PROMPTS, PARAMS, strict=True)]


@pytest.mark.parametrize("name", in_turn(ALL, of=3))
def test_the_text_is_that_of_plain_decoding(name: str) -> None:
    engine = em.Engine(TARGET, em.HeadProposer(HEADS[name]), policy=em.FixedPolicy(4), max_batch=3, prefill_chunk=8)
    outputs = engine.generate(PROMPTS, PARAMS)
    assert [output.tokens for output in outputs] == alone()
    assert sum(output.drafted for output in outputs) > 50


@pytest.mark.parametrize(("layers", "ids"), [(5, (0, 2, 4)), (6, (1, 2, 2)), (12, (1, 5, 8)), (32, (1, 15, 28))])
def test_the_default_layers_are_those_of_the_fields_trainers(layers: int, ids: tuple[int, ...]) -> None:
    """Even if two are the same. For fewer than six, they are our own."""
    assert default_aux_layers(layers) == ids


def test_only_mtp_heads_with_the_targets_embedding_read_those_of_images() -> None:
    readers = {name for name in HEADS if "mtp" in name} - {"mtp, own ends"}
    assert {name for name, head in HEADS.items() if head.reads_images} == readers


@pytest.mark.parametrize("name", ALL)
def test_drafts_are_those_of_a_head_without_a_cache(name: str) -> None:
    """Rows of different lengths, with a second round after a partly accepted one, against the whole sequence."""
    head = HEADS[name]
    proposer = em.HeadProposer(head)
    proposer.bind(TARGET)
    texts = [[int(t) for t in np.random.default_rng(row).integers(0, 64, 9 + 4 * row)] for row in range(3)]
    lengths = [5 + 3 * row for row in range(3)]
    state = proposer.open([text[:n] for text, n in zip(texts, lengths, strict=True)])
    state.prefill(seen(head, texts, [0, 0, 0], [n - 1 for n in lengths]))
    batch, depth = SamplingBatch.of([em.SamplingParams()] * 3, [0] * 3), 4
    for gains in ([1, 3, 2], None):
        draft = state.draft(Plan(depth), batch, mx.array(lengths))
        for row, (text, n) in enumerate(zip(texts, lengths, strict=True)):
            assert draft.tokens[row].tolist() == slow_draft(head, text[:n], depth)
        if gains:
            before, lengths = lengths, [n + gain for n, gain in zip(lengths, gains, strict=True)]
            state.observe(seen(head, texts, [n - 1 for n in before], [n - 1 for n in lengths]))
    for part, rows in ((state.take(1), [1]), (state, [0, 2])):  # a row that moves keeps what the head has read of it
        batch = SamplingBatch.of([em.SamplingParams()] * len(rows), [0] * len(rows))
        draft = part.draft(Plan(depth), batch, mx.array([lengths[row] for row in rows]))
        for at, row in enumerate(rows):
            assert draft.tokens[at].tolist() == slow_draft(head, texts[row][: lengths[row]], depth)


def slow_draft(head: DraftHead, text: list[int], depth: int) -> list[int]:
    tokens = list(text)
    features = head.features(TARGET.forward(mx.array([text[:-1]]), aux_layers=head.aux_layers).aux)
    if isinstance(head, BlockHead):
        return slow_block(head, features, text[-1])[:depth]
    if isinstance(head, PEagleHead):
        masks = head.features(mx.split(head.mask_hidden, len(head.aux_layers), axis=-1))
        masks = mx.broadcast_to(masks, (1, depth - 1, head.hidden_size))
        read = [*text[1:], *[head.mask_token_id] * (depth - 1)]
        hidden = head(head.embed(mx.array([read])), mx.concatenate([features, masks], axis=1), mask="causal")
        best = mx.argmax(head.logits(hidden[0, -depth:]), axis=-1)
        return (best if head.token_ids is None else head.token_ids[best]).tolist()
    for _ in range(depth):
        hidden = head(head.embed(mx.array([tokens[1:]])), features, mask="causal")
        best = int(mx.argmax(head.logits(hidden[0, -1])).item())
        tokens.append(best if head.token_ids is None else int(head.token_ids[best].item()))
        features = mx.concatenate([features, hidden[:, -1:]], axis=1)
    return tokens[len(text) :]


def slow_block(head: BlockHead, features: mx.array, newest: int) -> list[int]:
    """Draft a block greedily after context features [1, L, H], slot by slot."""
    block = [newest] + [head.config.mask_token_id] * (head.config.block_size - 1)
    h = head(head.embed(mx.array([block])), features)[0]
    tokens, state = [newest], None
    for slot in range(head.config.block_size):
        logits = head.logits(h[slot])
        if head.is_sequential:
            count = head.config.selector_top_k
            candidates = mx.argsort(-logits)[:count] if count else None
            logits, state = head.slot_logits(mx.array(tokens[-1]), h[slot], logits, state, candidates)
        if slot == 0 and not head.config.first_slot_drafts:
            continue
        best = int(mx.argmax(logits).item())
        tokens.append(best if head.token_ids is None else int(head.token_ids[best].item()))
    return tokens[1:]


def seen(head: DraftHead, texts: list[list[int]], starts: list[int], stops: list[int]) -> Observation:
    width = max(b - a for a, b in zip(starts, stops, strict=True))
    rows = []
    for text, start, stop in zip(texts, starts, stops, strict=True):
        aux = TARGET.forward(mx.array([text[:stop]]), aux_layers=head.aux_layers).aux
        rows.append([mx.pad(x[:, start:], ((0, 0), (0, width - (stop - start)), (0, 0))) for x in aux])
    following = [text[a + 1 : b + 1] for text, a, b in zip(texts, starts, stops, strict=True)]
    return Observation(following, tuple(mx.concatenate(list(layer)) for layer in zip(*rows, strict=True)))


@pytest.mark.parametrize("name", in_turn(ALL, 1, of=3))
def test_the_next_turn_reuses_the_cache(name: str) -> None:
    params = em.SamplingParams(max_tokens=in_full(12, 8))
    proposer = em.HeadProposer(HEADS[name])
    with_cache = em.Engine(TARGET, proposer, policy=em.FixedPolicy(3), prefix_cache_bytes=1 << 30)
    without = em.Engine(TARGET, proposer, policy=em.FixedPolicy(3))
    prompt = [(7 * i * i + 3 * i) % 64 for i in range(40)]
    for turn in range(in_full(3, 2)):
        got, wanted = with_cache.generate([prompt], params)[0], without.generate([prompt], params)[0]
        assert (got.tokens, got.accepted_by_position) == (wanted.tokens, wanted.accepted_by_position)
        assert (got.cached_tokens > 0) == (turn > 0)
        prompt = [*prompt, *got.tokens, turn]


def right_eagle(target: em.Target) -> DraftHead:
    """Return a head whose fc passes the next embedding on, normed to match the target's final norm."""
    head = eagle(target, bias=False)
    head.fc.weight = mx.concatenate([mx.eye(target.hidden_size), mx.zeros((target.hidden_size,) * 2)], axis=1)
    silence(head.layers[0].self_attn.o_proj, head.layers[0].mlp.down_proj)
    return head


def right_mtp(target: em.Target) -> DraftHead:
    head = mtp(target)
    head.eh_proj.weight = mx.concatenate([mx.eye(target.hidden_size), mx.zeros((target.hidden_size,) * 2)], axis=1)
    silence(head.block.self_attn.o_proj, head.block.mlp.down_proj)
    for norm in (head.enorm, head.norm):
        norm.weight = mx.ones_like(norm.weight)
    return head


def right_eagle3(target: em.Target) -> DraftHead:
    """Return a head whose attention sees only its own position and passes the embedding on in its values."""
    size = target.hidden_size
    shape = {"num_attention_heads": 1, "num_key_value_heads": 1, "head_dim": size, "windows": (1,)}
    head = eagle3(target, norm_before_residual=True, **shape)
    attention = head.midlayer.self_attn
    attention.v_proj.weight = mx.concatenate([mx.eye(size), mx.zeros((size, size))], axis=1)
    attention.o_proj.weight = mx.eye(size)
    silence(head.midlayer.hidden_norm, head.midlayer.mlp.down_proj)
    for norm in (head.midlayer.input_layernorm, head.norm):
        norm.weight = mx.ones_like(norm.weight)
    head.lm_head.weight = target.lm_head(mx.eye(size)).T
    return head


@pytest.mark.parametrize("make", [right_eagle, right_mtp, right_eagle3])
def test_a_head_that_is_right_is_accepted(make: Callable[[em.Target], DraftHead]) -> None:
    target = bigram_target(tiny_target(vocab=64))
    head = make(target)
    params = em.SamplingParams(max_tokens=20)
    outputs = em.Engine(target, em.HeadProposer(head), policy=em.FixedPolicy(4)).generate(PROMPTS, params)
    for prompt, output in zip(PROMPTS, outputs, strict=True):
        assert output.tokens == em.Engine(target).generate([prompt], params)[0].tokens
        assert len(set(output.tokens)) > 3
        assert output.accepted == output.drafted > 10


LAYERS_OF = ["deepseek_v3", "glm4_moe", "qwen3_5", "llama", "qwen3_moe", "mimo", "qwen3_next"]


@pytest.mark.parametrize("name", in_turn(LAYERS_OF))
def test_models_draft_with_layers_of_their_own_kind(name: str) -> None:
    """Their own caches work with the head's: latent keys, recurrent states, experts."""
    model = tiny_model(name)
    randomize(model, 0, 0.2)
    target = em.Target(model)
    head = em.HeadProposer(mtp(target, model_type=name))
    prompts = [[t % 60 + 1 for t in prompt] for prompt in PROMPTS]
    engine = em.Engine(target, head, policy=em.FixedPolicy(3), max_batch=3, prefix_cache_bytes=1 << 30)
    for prompt, params, output in zip(prompts, PARAMS, engine.generate(prompts, PARAMS), strict=True):
        assert output.tokens == em.Engine(target).generate([prompt], params)[0].tokens
        assert output.drafted > 0


def test_a_head_of_another_target_is_refused() -> None:
    for head in (eagle(TARGET), mtp(TARGET)):
        with pytest.raises(HeadError, match="vocabulary 64 but the target has 128"):
            em.Engine(tiny_target(), em.HeadProposer(head))
        with pytest.raises(HeadError, match="hidden size 32 but the target has 64"):
            em.Engine(tiny_target(vocab=64, hidden=64), em.HeadProposer(head))
    with pytest.raises(HeadError, match="embedding width 24 but the target has 32"):
        em.Engine(TARGET, em.HeadProposer(eagle3(TARGET, hidden_size=24)))


def test_a_head_without_its_target_says_so() -> None:
    for head in (eagle(TARGET), mtp(TARGET)):
        with pytest.raises(HeadError, match="this head needs its target"):
            head.embed(mx.array([[1]]))


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"norm_before_fc": True, "fc_norm": True}, "both set"),
        ({"aux_layers": ()}, "aux_layers is empty"),
        ({"use_aux_hidden_state": False}, "has no aux_layers"),
        ({"use_aux_hidden_state": False, "aux_layers": (), "hidden_size": 24}, "has its target's hidden size"),
        ({"windows": (4, 4)}, "windows are given for 2 of 1 layers"),
        ({"num_hidden_layers": 0}, "at least one layer"),
    ],
)
def test_configs_that_contradict_themselves(fields: dict[str, object], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        eagle3(TARGET, **fields)


def test_mtp_layers_that_are_not_known() -> None:
    layer = HEADS["mtp"].config.layer  # type: ignore[attr-defined]
    with pytest.raises(ConfigError, match="model_type gpt2 are not supported, only those of deepseek_v3, glm4_moe"):
        MTPConfig("gpt2", layer)
    with pytest.raises(ConfigError, match="lacks vocab_size"):
        MTPConfig("qwen3", {"hidden_size": 4, "rms_norm_eps": 1e-6})
    with pytest.raises(ConfigError, match="quantization is .*; give group_size and bits"):
        MTPConfig("qwen3", layer, quantization={"bits": 4})
