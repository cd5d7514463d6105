"""The engine's text equals mlx-lm's for every architecture: single rows, and batches whose rows join and leave."""

from __future__ import annotations

import re
from functools import cache
from pathlib import Path

import mlx.core as mx
import mlx.nn as nn
import numpy as np
import pytest
from mlx_lm.generate import generate_step

import eagle_mlx as em
from eagle_mlx.cache.kinds import ONE_ROW, REFUSED, may_pad
from eagle_mlx.cache.tree_support import why_no_trees
from eagle_mlx.decoding.sampling import SamplingBatch, gumbel, sample
from tests.architectures import CONFIGS, VOCAB, tiny_model
from tests.eagle_mlx.heads import IN_BLOCKS
from tests.fakes import Oracle, generate, randomize, tiny_head
from tests.full import FULL, diagonal, in_full, in_turn

MARGIN = 1e-3
"""Scores closer than this may be decided by rounding in a verify of several tokens."""
LENGTHS = (3, 30, 11, 1, 18)
EMITTED = in_full((14, 8, 18, 5, 12), (8, 5, 11, 4, 7))
PROMPTS = [[int(t) for t in np.random.default_rng(n).integers(0, VOCAB, n)] for n in LENGTHS]
GREEDY = [em.SamplingParams(max_tokens=n) for n in EMITTED]
SEEDED = [em.SamplingParams(temperature=0.7, seed=n, max_tokens=n) for n in EMITTED]


@cache
def target(name: str) -> em.Target:
    model = tiny_model(name)
    randomize(model, 0, 0.2)
    return em.Target(model, name=name)


def plain(name: str, prompt: list[int], params: em.SamplingParams) -> tuple[list[int], list[float]]:
    """Decode one sequence with mlx-lm. Also return the margin between the two best scores at each step."""
    batch = SamplingBatch.of([params], [params.seed or 0])
    margins: list[float] = []

    def choose(logprobs: mx.array) -> mx.array:
        at = mx.array([[len(prompt) + len(margins)]])
        noise = gumbel(batch, at, logprobs.shape[-1])
        scores = logprobs.astype(mx.float32)[None] + batch.temperature[:, None, None] * noise
        best = np.sort(np.array(scores).ravel())[-2:]
        margins.append(float(best[1] - best[0]))
        return sample(logprobs[None], batch, at)[0]

    steps = generate_step(mx.array(prompt), target(name).model, max_tokens=params.max_tokens, sampler=choose)
    return [int(token) for token, _ in steps], margins


def first_difference(got: list[int], want: list[int], margins: list[float]) -> str | None:
    """Return where the texts first differ, unless two tokens were equally good there."""
    for index, (a, b) in enumerate(zip(got, want, strict=True)):
        if a != b:
            return None if margins[index] < MARGIN else f"token {index}: {a}, not {b} (margin {margins[index]:.4f})"
    return None


def chains_only() -> set[str]:
    """Return the files that cannot read trees by the documentation: some by name, and all with a recurrent state."""
    text = (Path(__file__).parents[2] / "docs" / "architectures.md").read_text(encoding="utf-8")
    [named] = re.findall(r"^Chains only: (.*)\.$", text, re.MULTILINE)
    states = re.findall(r"^\| state, [^|]*\| (.*) \|$", text, re.MULTILINE)
    return {file for files in (named, *states) for file in files.replace(",", " ").split()}


CHAINS_ONLY = [name for name in sorted(CONFIGS) if name.split(":")[0] in chains_only()]
REPRESENTATIVE = ("gpt_oss", "granitemoehybrid", "llama4", "qwen3", "rwkv7")
"""Windows; a state with one call for all rows; chunks; full attention only; a state token by token."""
WITH_TREES = [name for name in sorted(CONFIGS) if name not in CHAINS_ONLY]
"""Unless in full, each architecture decodes in only one test: here, in the test of trees or in test_fresh_forwards.py.
"""


def decodings(name: str) -> list[tuple[list[em.SamplingParams], int, int, int]]:
    """Return two ways to decode. Unless in full, architectures alternate between them."""
    rows = 1 if name in ONE_ROW else 3
    both = [(GREEDY, rows, 3, 512), (SEEDED, rows, 5, 16)]
    turn = CHAINS_ONLY.index(name) if name in CHAINS_ONLY else WITH_TREES.index(name) // 2
    return both if FULL else [both[turn % 2]]


@pytest.mark.parametrize("name", sorted({*REPRESENTATIVE, *in_turn(CHAINS_ONLY, of=6), *in_turn(WITH_TREES, of=12)}))
def test_text_is_mlx_lms_own(name: str) -> None:
    check_text_is_mlx_lms_own(name)


@pytest.mark.parametrize(
    ("name", "kept", "exact"),
    diagonal(in_full([*CHAINS_ONLY, *WITH_TREES], REPRESENTATIVE[:4]), [0, 1 << 20], [True, True, False]),
)
def test_text_of_rows_that_are_paused_is_mlx_lms_own(name: str, kept: int, exact: bool) -> None:
    check_text_is_mlx_lms_own(name, pauses=0.3, kept=kept, exact=exact)


def check_text_is_mlx_lms_own(name: str, pauses: float = 0.0, kept: int = 0, exact: bool = False) -> None:
    distinct: set[int] = set()
    for params, rows, depth, chunk in decodings(name):
        plains = [plain(name, prompt, p) for prompt, p in zip(PROMPTS, params, strict=True)]
        distinct |= {token for tokens, _ in plains for token in tokens}
        oracle = Oracle({tuple(p): text for p, (text, _) in zip(PROMPTS, plains, strict=True)}, wrong=0.3)
        policy = em.FixedPolicy(depth)
        engine = em.Engine(
            target(name),
            oracle,
            policy=policy,
            max_batch=rows,
            prefill_chunk=chunk,
            prefix_cache_bytes=kept,
            exact=exact,
        )
        outputs = generate(engine, PROMPTS, params, pauses)
        assert (engine.pauses > 0) == (pauses > 0)
        differences = [first_difference(o.tokens, *p) for o, p in zip(outputs, plains, strict=True)]
        assert differences == [None] * len(PROMPTS)
        assert sum(output.accepted for output in outputs) > 10
    assert len(distinct) > 5  # long enough to go wrong


@pytest.mark.usefixtures("as_on_a_gpu")
@pytest.mark.parametrize("name", in_turn(REPRESENTATIVE, of=4))
def test_text_is_mlx_lms_own_as_on_a_gpu(name: str) -> None:
    test_text_is_mlx_lms_own(name)


@pytest.mark.parametrize("name", in_turn(sorted(CONFIGS), of=9))
def test_the_models_that_read_trees_are_documented(name: str) -> None:
    assert (why_no_trees(target(name)) is None) == (name in WITH_TREES)


@pytest.mark.parametrize("name", in_turn(WITH_TREES, 2, of=12))
def test_trees_give_the_text_of_mlx_lm(name: str) -> None:
    for params, rows, depth, chunk in decodings(name):
        plains = [plain(name, prompt, p) for prompt, p in zip(PROMPTS, params, strict=True)]
        oracle = Oracle({tuple(p): text for p, (text, _) in zip(PROMPTS, plains, strict=True)}, wrong=0.5)
        policy = em.FixedPolicy(depth, nodes=9)
        engine = em.Engine(target(name), oracle, policy=policy, max_batch=rows, prefill_chunk=chunk)
        outputs = engine.generate(PROMPTS, params)
        assert [first_difference(o.tokens, *p) for o, p in zip(outputs, plains, strict=True)] == [None] * len(PROMPTS)
        assert sum(output.accepted for output in outputs) > 10


@pytest.mark.usefixtures("as_on_a_gpu")
@pytest.mark.parametrize("name", in_turn(["deepseek_v3", "gemma3_text", "qwen3"], 1, of=3))
def test_trees_give_the_text_of_mlx_lm_as_on_a_gpu(name: str) -> None:
    test_trees_give_the_text_of_mlx_lm(name)


NO_TREES = ["afm7", "gpt2", "gpt_bigcode", "ministral3", "minimax_m3_vl", "mistral4"]


@pytest.mark.parametrize(("by_type", "name"), diagonal([True, False], NO_TREES))
def test_trees_are_refused_whatever_the_weights(name: str, by_type: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """By the model's type, or by its outputs if the type is unknown."""
    if not by_type:
        monkeypatch.setattr("eagle_mlx.cache.tree_support.ONE_ROW", {})
        monkeypatch.setattr("eagle_mlx.cache.tree_support.OWN_POSITIONS", {})
    for spread in in_full((None, 0.02, 0.2), (0.2,)):
        model = tiny_model(name)
        if spread is not None:
            randomize(model, 1, spread)
        for dtype in (mx.float32, mx.bfloat16) if by_type else (mx.float32,):  # low precision hides small differences
            model.set_dtype(dtype)
            assert why_no_trees(em.Target(model)) is not None


@pytest.mark.parametrize(
    ("name", "dtype"),
    [
        *(
            (name, mx.float32)
            for name in in_turn(["qwen3", "gemma4_text", "gpt_oss", "deepseek_v3", "qwen3_moe"], of=3)
        ),
        *((name, mx.bfloat16) for name in in_turn(["qwen3", "gemma4_text", "llama:sliding", "olmo2"], 1)),
    ],
)
def test_rounding_errors_do_not_disable_trees(name: str, dtype: mx.Dtype) -> None:
    for spread in (None, 0.02, 0.2):
        model = tiny_model(name)
        if spread is not None:
            randomize(model, 1, spread)
        model.set_dtype(dtype)
        assert why_no_trees(em.Target(model)) is None


MAKERS = {"eagle3": tiny_head, **IN_BLOCKS}


@pytest.mark.parametrize(("kind", "name"), diagonal(MAKERS, ["gemma3_text", "qwen3_next"]))
def test_a_head_drafts_for_windows_and_states(kind: str, name: str) -> None:
    plains = [plain(name, prompt, p) for prompt, p in zip(PROMPTS, GREEDY, strict=True)]
    head = em.HeadProposer(MAKERS[kind](target(name)))
    outputs = em.Engine(target(name), head, policy=em.FixedPolicy(4), max_batch=3).generate(PROMPTS, GREEDY)
    assert [first_difference(o.tokens, *p) for o, p in zip(outputs, plains, strict=True)] == [None] * len(PROMPTS)


@pytest.mark.usefixtures("as_on_a_gpu")
def test_a_head_drafts_as_on_a_gpu() -> None:
    test_a_head_drafts_for_windows_and_states("dspark", "gemma3_text")


class Strict(nn.Embedding):
    """A table of positions with NaN after its end."""

    def __call__(self, x: mx.array) -> mx.array:
        end = self.weight.shape[0]
        return mx.where((x < end)[..., None], super().__call__(mx.minimum(x, end - 1)), mx.array(mx.nan))


@pytest.mark.parametrize(
    ("name", "rows", "drafting"),
    [
        *diagonal(["gpt2"], in_full([3, 1], [3]), in_full(["oracle", "model"], ["oracle"])),
        *diagonal(["gpt_bigcode"], [1], in_full(["oracle", "model"], ["model"])),  # it decodes one row at a time
    ],
)
def test_rows_near_the_end_of_the_context_read_nothing_after_it(name: str, rows: int, drafting: str) -> None:
    context = 48
    model = tiny_model(name)
    backbone = model.model if name == "gpt2" else model.transformer
    backbone.wpe = Strict(context, 32)
    randomize(model, 0, 0.2)
    short = em.Target(model, name=name)
    assert short.context_length == context
    prompts = [PROMPTS[1], [*PROMPTS[4], *PROMPTS[2]], PROMPTS[0], [*PROMPTS[1], *PROMPTS[2]]]
    params = em.SamplingParams(max_tokens=44)
    plains = [em.Engine(short, max_batch=1).generate([prompt], params)[0] for prompt in prompts]
    assert [(len(o.tokens), o.error) for o in plains] == [(min(44, context - len(p)), None) for p in prompts]
    texts = {tuple(p): o.tokens for p, o in zip(prompts, plains, strict=True)}
    proposer = Oracle(texts, wrong=0.5) if drafting == "oracle" else em.DraftModelProposer(short)
    engine = em.Engine(short, proposer, policy=em.FixedPolicy(8), max_batch=rows, exact=drafting == "oracle")
    outputs = engine.generate(prompts, params)
    assert [(o.error, o.tokens) for o in outputs] == [(None, o.tokens) for o in plains]


@pytest.mark.parametrize(("name", "exact"), diagonal(["gpt_oss", "granitemoehybrid", "rwkv7"], [False, True]))
def test_plain_rounds_after_the_end_of_a_row_are_undone(name: str, exact: bool) -> None:
    plains = [plain(name, prompt, em.SamplingParams(max_tokens=12)) for prompt in PROMPTS]
    params = [em.SamplingParams(max_tokens=12, stop_token_ids=[text[n]]) for n, (text, _) in enumerate(plains)]
    outputs = em.Engine(target(name), max_batch=5, exact=exact).generate(PROMPTS, params)
    for output, (text, margins) in zip(outputs, plains, strict=True):
        assert first_difference(output.tokens, text[: len(output.tokens)], margins) is None


def test_the_table_of_architectures_is_true() -> None:
    text = (Path(__file__).parents[2] / "docs" / "architectures.md").read_text(encoding="utf-8")
    rows = {line.split("|")[1].strip(): line.split("|")[2] for line in text.splitlines() if line.startswith("| ")}
    supported = {kind: re.sub(r" \(.*?\)", "", files).replace(",", " ").split() for kind, files in rows.items()}
    kinds = ("full", "sliding", "state", "one row")
    named = {file for kind, files in supported.items() if kind.startswith(kinds) for file in files}
    assert named == {name.split(":")[0] for name in CONFIGS}
    assert set(supported["one row at a time (`max_batch=1`)"]) == set(ONE_ROW)
    assert set(REFUSED) <= set(rows)
    by_masks = {file for file in supported["state, one call for all rows"] if may_pad(target(file).model)}
    assert by_masks == set(supported["state, one call for all rows"])
    assert not any(may_pad(target(file).model) for file in supported["state, token by token"])


@pytest.mark.parametrize("name", ["llama", "mistral3", "qwen3_vl"])
def test_the_context_ends_where_the_config_of_the_text_part_says(name: str) -> None:
    assert em.Target(tiny_model(name), name=name).context_length == 1024
