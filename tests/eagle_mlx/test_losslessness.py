"""Speculation never changes the text: whole decoding of a toy target, compared exactly and statistically.

The bar: 100,000 draws, total variation at most 0.02, chi-square p above 1e-4. Deliberately broken samplers must miss
it. The target is a Markov chain: the next token's logits depend only on the last token, so a text's probability is a
product of table entries.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cache, partial, reduce
from itertools import product
from typing import Any

import mlx.core as mx
import numpy as np
import pytest

import eagle_mlx as em
from eagle_mlx.decoding import filters
from eagle_mlx.decoding.sampling import SamplingBatch, Stream, distribution, draft_sample, gumbel, sample
from eagle_mlx.decoding.verify import Verdict, match, rejection, verify
from eagle_mlx.heads.block import BlockHead
from eagle_mlx.heads.eagle3 import PEagleHead
from eagle_mlx.plan import Context, Plan, RoundResult
from eagle_mlx.policy import Policy
from eagle_mlx.proposers.drafting import draft_chain, draw_block
from eagle_mlx.sampling_params import Acceptance, SamplingParams
from tests.eagle_mlx.heads import dflash2, dspark, peagle
from tests.eagle_mlx.test_filters import one_step_short
from tests.fakes import tiny_target
from tests.full import diagonal, in_full
from tests.grammars import Steps

Array = np.ndarray[Any, Any]
Verify = Callable[[mx.array, mx.array, mx.array, mx.array | None, SamplingBatch, mx.array], Verdict]

DRAWS = 100_000
PART = DRAWS // 8
LEAST_P = 1e-4
FEW = in_full(DRAWS, DRAWS // 8)
"""Draws for broken samplers. They miss the bar by chi-square alone, which accounts for the number of draws."""
LARGE = in_full(64, 32)
"""Size of the larger vocabulary; most of the time goes into its probabilities."""
COUPLED = SamplingParams(temperature=0.9, acceptance="coupled")
REJECTION = SamplingParams(temperature=0.9)
FILTERED = replace(REJECTION, top_p=0.8)
THRESHOLD = replace(REJECTION, acceptance="threshold", threshold=0.05)


@dataclass(frozen=True)
class Toy:
    """A target and a similar proposer, as tables of logits [V, V]; token 0 begins every text."""

    target: mx.array
    draft: mx.array

    @classmethod
    def random(cls, vocab: int, scale: float = 1.5, error: float = 1.0) -> "Toy":
        rng = np.random.default_rng(vocab)
        target = rng.normal(scale=scale, size=(vocab, vocab))
        draft = target + rng.normal(scale=error, size=target.shape)
        return cls(mx.array(target.astype(np.float32)), mx.array(draft.astype(np.float32)))

    @property
    def vocab(self) -> int:
        return self.target.shape[0]

    def law(self, params: SamplingParams, length: int) -> Array:
        """Return the probability of every text of `length` tokens, [V ** length]."""
        p = np.array(distribution(self.target[None], SamplingBatch.of([params], [0]))[0], np.float64)
        p /= p.sum(axis=1, keepdims=True)
        return reduce(lambda texts, _: (texts[..., None] * p).reshape(-1, self.vocab), range(length - 1), p[:1]).ravel()

    def propose(
        self, last: mx.array, depth: int, batch: SamplingBatch, position: mx.array, certain: bool
    ) -> tuple[mx.array, mx.array | None]:
        """Return drafts [B, depth] and their q. `certain`: the likeliest tokens, without chance and without q."""
        drafts: list[mx.array] = []
        qs: list[mx.array] = []
        for i in range(depth):
            logits = self.draft[drafts[-1] if drafts else last]
            if certain:
                drafts.append(mx.argmax(logits, axis=-1).astype(mx.int32))
                continue
            token, q = draft_sample(logits[:, None], batch, position[:, None] + i, self.vocab)
            drafts.append(token[:, 0])
            qs += [] if q is None else [q]
        tokens = mx.stack(drafts, axis=1) if drafts else mx.zeros((last.shape[0], 0), mx.int32)
        return tokens, mx.concatenate(qs, axis=1) if qs else None


@dataclass(frozen=True)
class BlockToy(Toy):
    """The same target, with a random head that drafts a block after each token, without further context."""

    kind: str = "dspark"

    def propose(
        self, last: mx.array, depth: int, batch: SamplingBatch, position: mx.array, certain: bool
    ) -> tuple[mx.array, mx.array | None]:
        head, states = block_states(self.kind, self.vocab)
        draw = partial(draw_block, head, states[last], last[:, None], depth)
        draft = draft_chain(Plan(depth), draw, mx.ones(last.shape, mx.int32), batch, position, self.vocab)
        return draft.tokens, draft.probs


@cache
def block_states(kind: str, vocab: int) -> tuple[BlockHead | PEagleHead, mx.array]:
    """Return a head, and the states [V, n, H] of its block after each token."""
    target, fields = tiny_target(layers=1, vocab=vocab, hidden=16), {"mask_token_id": 0, "aux_layers": (0,)}
    newest = mx.arange(vocab)[:, None]
    if kind == "peagle":
        reader = peagle(target, **fields)
        reader.attach(target)
        embedding, g = reader.mask_inputs(vocab, 2)
        embeddings = mx.concatenate([reader.embed(newest), embedding[:, 1:]], axis=1)
        return reader, reader(embeddings, g, mask="causal")
    head = dspark(target, block_size=2, **fields) if kind == "dspark" else dflash2(target, block_size=3, **fields)
    head.attach(target)
    return head, head.block(newest, None, 2)


def decode(
    toy: Toy,
    batch: SamplingBatch,
    length: int,
    depth: int,
    *,
    certain: bool = False,
    ragged: bool = False,
    rule: Verify = verify,
    loses_bonus: bool = False,
    ends: Callable[[mx.array], mx.array] | None = None,
) -> tuple[Array, int]:
    """Decode `length` tokens per row, [B, length], in rounds of up to `depth` drafts; also return the number of rounds.

    `ends`: how many drafts [B] of [B, depth] count.
    """
    rows = batch.temperature.shape[0]
    last = position = written = mx.zeros((rows,), mx.int32)
    text = mx.zeros((rows, length + depth + 1), mx.int32)
    lengths = mx.arange(rows) % (depth + 1) if ragged else mx.full((rows,), depth)
    lengths = lengths.astype(mx.int32)
    rounds = 0
    while (np.array(written) < length).any():
        rounds += 1
        drafts, q = toy.propose(last, depth, batch, position, certain)
        lengths = lengths if ends is None else ends(drafts)
        logits = toy.target[mx.concatenate([last[:, None], drafts], axis=1)]
        steps = mx.arange(depth + 1, dtype=mx.int32)
        verdict = rule(logits, drafts, lengths, q, batch, position[:, None] + steps)
        text = mx.put_along_axis(text, written[:, None] + steps, verdict.tokens, axis=1)
        emitted = verdict.accepted + (verdict.accepted < lengths if loses_bonus else 1)
        last = mx.take_along_axis(verdict.tokens, verdict.accepted[:, None], axis=1)[:, 0]
        position = position + verdict.accepted + 1
        written = mx.minimum(written + emitted, length)
        mx.eval(last, position, written, text)
    return np.array(text[:, :length]), rounds


@cache
def many(params: SamplingParams, rows: int = DRAWS) -> SamplingBatch:
    return SamplingBatch.of([params] * rows, range(rows))


def threshold_law(toy: Toy, params: SamplingParams, length: int) -> Array:
    """Return the probability of every text of `length` tokens, [V ** length], whose rounds draft two tokens from q."""
    vocab = toy.vocab
    p = np.array(distribution(toy.target[None], SamplingBatch.of([params], [0]))[0], np.float64)
    last = mx.arange(1000 * vocab) % vocab
    drafts, q = toy.propose(last, 2, many(replace(params, acceptance="rejection"), len(last)), 0 * last, certain=False)
    slots = dict[tuple[int, ...], Array]()
    for (first, _), after, (first_law, second_law) in zip(
        drafts.tolist(), last.tolist(), np.array(q, np.float64), strict=True
    ):
        slots[after,], slots[after, first] = first_law, second_law

    def texts(left: int, *before: int) -> Array:
        """Return the law of `left` tokens after a token and the drafts that were accepted since."""
        own = p[before[-1]][:, None] * [texts(left - 1, token) for token in range(vocab)] if left else np.ones(1)
        if not left or before not in slots:
            return own.ravel()
        kept = p[before[-1]] >= params.threshold
        law = slots[before][~kept].sum() * own
        for token in np.flatnonzero(kept):
            law[token] += slots[before][token] * texts(left - 1, *before, token)
        return np.asarray(law.ravel())

    return texts(length, 0)


def chi_square_p(counts: Array, law: Array) -> float:
    """Return the chance of counts at least this far from the law (Wilson and Hilferty 1931); rare cells are pooled."""
    expected = law * counts.sum()
    if counts[law == 0].any():
        return 0.0
    common = expected >= 10
    pooled = [(counts[~common].sum(), expected[~common].sum())] if expected[~common].sum() >= 10 else []
    observed, wanted = np.array([*zip(counts[common], expected[common], strict=True), *pooled]).T
    statistic, freedom = float(((observed - wanted) ** 2 / wanted).sum()), len(wanted) - 1
    z = ((statistic / freedom) ** (1 / 3) - (1 - 2 / (9 * freedom))) / math.sqrt(2 / (9 * freedom))
    return 0.5 * math.erfc(z / math.sqrt(2))


def follows(texts: Array, law: Array, vocab: int) -> bool:
    """Return whether the texts [N, length] pass as draws from the law [vocab ** length]."""
    cells = texts @ vocab ** np.arange(texts.shape[1])[::-1]
    counts = np.bincount(cells, minlength=len(law))
    distance = 0.5 * np.abs(counts / len(texts) - law).sum()
    return bool(distance <= 0.02 and chi_square_p(counts, law) > LEAST_P)


def misses(texts: Array, law: Array, vocab: int) -> bool:
    """Return whether the texts [N, length] miss the bar by chi-square, for any N."""
    cells = texts @ vocab ** np.arange(texts.shape[1])[::-1]
    return chi_square_p(np.bincount(cells, minlength=len(law)), law) <= LEAST_P


@cache
def part_of(params: SamplingParams, start: int) -> SamplingBatch:
    return SamplingBatch.of([params] * PART, range(start, start + PART))


def chain_texts(toy: Toy, params: SamplingParams, draws: int = DRAWS, **options: Any) -> Array:
    """Return this many texts of three tokens, from rounds of two drafts. Runs in parts to save memory."""
    return np.concatenate([decode(toy, part_of(params, start), 3, 2, **options)[0] for start in range(0, draws, PART)])


def chain_laws(law: Array, vocab: int) -> dict[tuple[int, ...], Array]:
    """Return the laws of each of three tokens, and of each two neighbors."""
    joint = law.reshape(vocab, vocab, vocab)
    single = {(token,): joint.sum(axis=others) for token, others in enumerate(((1, 2), (0, 2), (0, 1)))}
    return single | {(0, 1): joint.sum(axis=2).ravel(), (1, 2): joint.sum(axis=0).ravel()}


def chain_follows(texts: Array, law: Array, vocab: int) -> bool:
    """Return whether each token of the texts [N, 3] passes by itself, and each two neighbors by chi-square."""
    return all(
        follows(texts[:, at], marginal, vocab) if len(at) == 1 else not misses(texts[:, at], marginal, vocab)
        for at, marginal in chain_laws(law, vocab).items()
    )


def chain_misses(texts: Array, law: Array, vocab: int) -> bool:
    """Return whether a token of the texts [N, 3], or two neighbors, miss the bar for any N."""
    return any(misses(texts[:, at], marginal, vocab) for at, marginal in chain_laws(law, vocab).items())


def test_the_bar_is_where_it_should_be() -> None:
    rng = np.random.default_rng(0)
    law = Toy.random(64).law(REJECTION, 1)
    assert math.sqrt(2 / (math.pi * DRAWS)) * np.sqrt(law * (1 - law)).sum() / 2 <= 0.010  # the expected distance
    fair = [chi_square_p(rng.multinomial(DRAWS, law), law) for _ in range(2000)]
    assert np.quantile(fair, [0.1, 0.5, 0.9]) == pytest.approx([0.1, 0.5, 0.9], abs=0.04)
    assert follows(rng.choice(64, (DRAWS, 1), p=law), law, 64)
    bent = law * np.where(np.arange(64) % 2, 1.06, 0.94)
    assert not follows(rng.choice(64, (DRAWS, 1), p=bent / bent.sum()), law, 64)


@pytest.mark.parametrize(
    ("params", "depth"), diagonal([COUPLED, REJECTION, FILTERED, replace(COUPLED, top_p=0.8)], [0, 1, 1])
)
def test_the_next_token_follows_the_target(params: SamplingParams, depth: int) -> None:
    toy = Toy.random(LARGE)
    texts, _ = decode(toy, many(params), 1, depth)
    assert follows(texts, toy.law(params, 1), LARGE)


@pytest.mark.parametrize(
    ("params", "certain", "ragged"),
    diagonal([COUPLED, REJECTION, replace(FILTERED, top_p=0.9)], [False, True], [False, True, True]),
)
def test_texts_of_several_rounds_follow_the_target(params: SamplingParams, certain: bool, ragged: bool) -> None:
    toy = Toy.random(5, scale=1.0)
    texts, _ = decode(toy, many(params), 3, 2, certain=certain, ragged=ragged)
    assert follows(texts[:, :2], toy.law(params, 2), 5)
    assert follows(texts, toy.law(params, 3), 5)


@pytest.mark.usefixtures("as_on_a_gpu", "compiled")
@pytest.mark.parametrize("params", in_full([COUPLED, REJECTION, replace(FILTERED, top_p=0.9)], [FILTERED]))
def test_texts_follow_the_target_as_on_a_gpu(params: SamplingParams) -> None:
    test_the_next_token_follows_the_target(params, depth=1)
    test_texts_of_several_rounds_follow_the_target(params, certain=False, ragged=True)


@pytest.mark.parametrize(
    ("params", "certain"),
    [
        *((COUPLED, False), (REJECTION, True)),
        *in_full([(COUPLED, True), (REJECTION, False), (FILTERED, False), (FILTERED, True)], []),
    ],
)
def test_chains_over_a_larger_vocabulary_follow_the_target(params: SamplingParams, certain: bool) -> None:
    toy = Toy.random(LARGE)
    assert chain_follows(chain_texts(toy, params, certain=certain), toy.law(params, 3), LARGE)


@pytest.mark.parametrize(
    ("kind", "params"),
    [
        *(("dspark", REJECTION), ("dflash2", COUPLED), ("dflash2", REJECTION), ("peagle", FILTERED)),
        *in_full([("dspark", COUPLED), ("dspark", FILTERED), ("peagle", COUPLED), ("peagle", REJECTION)], []),
    ],
)
def test_texts_drafted_in_blocks_follow_the_target(kind: str, params: SamplingParams) -> None:
    table = Toy.random(5, scale=1.0)
    toy = BlockToy(table.target, table.draft, kind)
    texts, _ = decode(toy, many(params), 3, 2)
    assert follows(texts[:, :2], toy.law(params, 2), 5)
    assert follows(texts, toy.law(params, 3), 5)


@pytest.mark.parametrize("kind", ["chain", "dspark", "dflash2", "peagle"])
def test_threshold_texts_follow_their_own_law(kind: str) -> None:
    toy, params = Toy.random(5, scale=1.0), replace(THRESHOLD, threshold=0.2)
    toy = toy if kind == "chain" else BlockToy(toy.target, toy.draft, kind)
    texts, _ = decode(toy, many(params), 3, 2)
    assert follows(texts, threshold_law(toy, params, 3), 5)
    assert misses(texts, toy.law(params, 3), 5)


@pytest.mark.parametrize("kind", ["dspark", "dflash2", "peagle"])
def test_blocks_with_a_broken_q_miss_the_bar(kind: str) -> None:
    table = Toy.random(5, scale=1.0)
    toy = BlockToy(table.target, table.draft, kind)
    texts, _ = decode(toy, many(REJECTION, FEW), 3, 2, rule=q_of_another_draft)
    assert misses(texts, toy.law(REJECTION, 3), 5)


def ends_by_the_token_before(drafts: mx.array) -> mx.array:
    """Keep a second token depending on the first, like early exit."""
    return 1 + (drafts[:, 0] % 2)


def ends_by_its_own_token(drafts: mx.array) -> mx.array:
    """Drop the second token depending on itself."""
    return 1 + (drafts[:, 1] % 2)


@pytest.mark.parametrize("params", [COUPLED, REJECTION])
def test_early_exits_follow_the_target(params: SamplingParams) -> None:
    toy = Toy.random(LARGE)
    if in_full(True, params is REJECTION):
        texts = chain_texts(toy, params, ends=ends_by_the_token_before)
        assert chain_follows(texts, toy.law(params, 3), LARGE)
    if params is COUPLED:  # these may also end by their own token
        texts = chain_texts(toy, params, ends=ends_by_its_own_token)
        assert chain_follows(texts, toy.law(params, 3), LARGE)
    else:
        texts = chain_texts(toy, params, FEW, ends=ends_by_its_own_token)
        assert chain_misses(texts, toy.law(params, 3), LARGE)


def residual_from_p(logits: mx.array, drafts: mx.array, lengths: mx.array, q: Any, batch: Any, at: mx.array) -> Verdict:
    accepted = verify(logits, drafts, lengths, q, batch, at).accepted
    p = distribution(logits, batch)[mx.arange(len(lengths)), accepted]
    token = mx.argmax(mx.log(p) + gumbel(batch, at[:, :1], p.shape[-1])[:, 0], axis=-1).astype(mx.int32)[:, None]
    keep = mx.arange(drafts.shape[1] + 1) < accepted[:, None]
    return Verdict(accepted, mx.where(keep, mx.concatenate([drafts, token], axis=1), token))


def always_accepted(logits: mx.array, drafts: mx.array, lengths: mx.array, q: Any, batch: Any, at: mx.array) -> Verdict:
    tokens = mx.concatenate([drafts, sample(logits, batch, at)[:, -1:]], axis=1)
    return Verdict(lengths, tokens)


def matched_independently(
    logits: mx.array, drafts: mx.array, lengths: mx.array, q: Any, batch: Any, at: mx.array
) -> Verdict:
    """Lossless but slow: an accepted draft is an independent sample of the target's."""
    return match(sample(logits, batch, at), drafts, lengths)


def every_match_counts(
    logits: mx.array, drafts: mx.array, lengths: mx.array, q: Any, batch: Any, at: mx.array
) -> Verdict:
    """Also count matches after the first difference."""
    samples = sample(logits, batch, at)
    return Verdict(mx.sum(samples[:, :-1] == drafts, axis=1).astype(mx.int32), samples)


def one_noise_for_all(
    logits: mx.array, drafts: mx.array, lengths: mx.array, q: Any, batch: Any, at: mx.array
) -> Verdict:
    return verify(logits, drafts, lengths, q, batch, mx.zeros_like(at))


def q_of_another_draft(
    logits: mx.array, drafts: mx.array, lengths: mx.array, q: mx.array | None, batch: Any, at: mx.array
) -> Verdict:
    return verify(logits, drafts, lengths, None if q is None else q[:, ::-1], batch, at)


def bonus_of_the_last_draft(
    logits: mx.array, drafts: mx.array, lengths: mx.array, q: Any, batch: Any, at: mx.array
) -> Verdict:
    """Draw the token after a fully accepted draft from the logits before its last token."""
    return verify(mx.concatenate([logits[:, :-1], logits[:, -2:-1]], axis=1), drafts, lengths, q, batch, at)


@pytest.mark.parametrize(
    ("params", "rule", "certain"),
    [
        (REJECTION, residual_from_p, True),
        *in_full([(REJECTION, always_accepted, True)], []),
        *in_full([(REJECTION, residual_from_p, False), (REJECTION, always_accepted, False)], []),  # as at depth 1 below
        (REJECTION, q_of_another_draft, False),
        (REJECTION, one_noise_for_all, False),
        (REJECTION, bonus_of_the_last_draft, True),
        (COUPLED, bonus_of_the_last_draft, False),
        (COUPLED, one_noise_for_all, False),
        (COUPLED, every_match_counts, False),
        (THRESHOLD, verify, False),  # not broken: it promises no more
        (THRESHOLD, verify, True),
    ],
)
def test_chains_of_a_broken_sampler_miss_the_bar(params: SamplingParams, rule: Verify, certain: bool) -> None:
    toy = Toy.random(LARGE)
    texts = chain_texts(toy, params, FEW, certain=certain, rule=rule)
    assert chain_misses(texts, toy.law(params, 3), LARGE)


@dataclass(frozen=True)
class UnfilteredQ(Toy):
    """Drafts drawn with top-p, but with the probabilities without it."""

    def propose(self, last: mx.array, depth: int, batch: SamplingBatch, position: mx.array, certain: bool) -> Any:
        drafts, _ = super().propose(last, depth, batch, position, certain)
        before = self.draft[mx.concatenate([last[:, None], drafts[:, :-1]], axis=1)]
        return drafts, distribution(before, replace(batch, any_filtered=False))


@pytest.mark.parametrize(
    ("broken", "vocab"),
    [
        ("residual from p", 64),
        ("q before top-p", 64),
        ("draft shares noise", 64),
        ("always accepted", 5),
        ("bonus dropped", 5),
        *in_full([("always accepted", 64), ("residual from p", 5), ("q before top-p", 5)], []),
    ],
)
def test_a_sampler_broken_on_purpose_misses_the_bar(broken: str, vocab: int) -> None:
    toy, batch = Toy.random(vocab), many(FILTERED, FEW)
    options: dict[str, Any] = {}
    if broken == "residual from p":
        options = {"rule": residual_from_p}
    elif broken == "always accepted":
        options = {"rule": always_accepted}
    elif broken == "bonus dropped":
        options = {"loses_bonus": True}
    elif broken == "q before top-p":
        toy = UnfilteredQ(toy.target, toy.draft)
    elif broken == "draft shares noise":
        keys = np.array(batch.keys)
        keys[:, Stream.DRAFT] = keys[:, Stream.TOKEN]
        batch = replace(batch, keys=mx.array(keys))
    length = 1 if vocab == 64 else 2
    texts, _ = decode(toy, batch, length, 1, **options)
    assert misses(texts, toy.law(FILTERED, length), vocab)


@pytest.mark.parametrize("params", [replace(FILTERED, top_p=0.6), replace(COUPLED, top_p=0.6)])
def test_a_bisection_one_step_short_misses_the_bar(params: SamplingParams, monkeypatch: pytest.MonkeyPatch) -> None:
    toy = Toy.random(64)
    law = toy.law(params, 1)
    monkeypatch.setattr(filters, "bisect", one_step_short)
    assert (toy.law(params, 1) > 0).sum() == (law > 0).sum() - 1  # the last step decides about one token in two cuts
    texts, _ = decode(toy, many(params, FEW), 1, 1)
    assert misses(texts, law, 64)


def test_rejection_accepts_as_much_as_it_can_and_coupling_nearly_so() -> None:
    toy, rows = Toy.random(64), 20_000
    p, q = (toy_law.law(REJECTION, 1) for toy_law in (toy, Toy(toy.draft, toy.target)))

    def rate(params: SamplingParams, rule: Verify = verify, certain: bool = False) -> float:
        batch, start = many(params, rows), mx.zeros((rows,), mx.int32)
        drafts, probs = toy.propose(start, 1, batch, start, certain)
        logits = mx.broadcast_to(toy.target[:1], (rows, 2, 64))
        at = mx.broadcast_to(mx.arange(2), (rows, 2))
        return float(np.array(rule(logits, drafts, start + 1, probs, batch, at).accepted).mean())

    best, independent = float(np.minimum(p, q).sum()), float((p * q).sum())
    assert rate(REJECTION) == pytest.approx(best, abs=0.015)
    assert rate(REJECTION, certain=True) == pytest.approx(p[q.argmax()], abs=0.015)
    assert rate(REJECTION, matched_independently) == pytest.approx(independent, abs=0.015)
    # Coupled by the exponential race: between (1 - d) / (1 + d) and 1 - d, with d the total variation.
    assert best / (2 - best) - 0.015 <= rate(COUPLED) <= best + 0.015
    assert rate(COUPLED) > 3 * independent


@pytest.mark.parametrize("params", [COUPLED, replace(COUPLED, top_k=9, min_p=0.02), SamplingParams()])
def test_seeded_and_greedy_texts_do_not_depend_on_drafts_depth_or_batch(params: SamplingParams) -> None:
    toy, rows, length = Toy.random(67, error=0.5), 6, in_full(40, 24)
    seeds = [11 * b for b in range(rows)]
    plain, rounds = decode(toy, SamplingBatch.of([params] * rows, seeds), length, 0)
    assert rounds == length
    company = [SamplingParams(), FILTERED, replace(COUPLED, temperature=2.0, top_k=3)]
    for depth, certain in in_full(product((1, 2, 5), (False, True)), [(1, False), (2, True), (5, False)]):
        together = SamplingBatch.of([params] * rows, seeds)
        texts, _ = decode(toy, together, length, depth, certain=certain, ragged=True)
        assert (texts == plain).all()
        alone = SamplingBatch.of([params], seeds[2:3])
        text, fewer = decode(toy, alone, length, depth, certain=certain)
        assert (text == plain[2]).all()
        assert certain or fewer < rounds
        batch = SamplingBatch.of([*company, params], [1, 2, 3, seeds[4]])
        mixed, _ = decode(toy, batch, length, depth, certain=certain)
        assert (mixed[3] == plain[4]).all()


def test_rejection_is_drawn_from_the_batch_s_seeds_alone() -> None:
    toy = Toy.random(17)
    first, _ = decode(toy, many(REJECTION, 50), 20, 3)
    again, _ = decode(toy, many(REJECTION, 50), 20, 3)
    assert (first == again).all()


def test_pure_functions_of_the_noise_given() -> None:
    """`rejection` takes noise per position or a single row for all. If one token is drawn, the result is the same."""
    toy, batch = Toy.random(9), many(REJECTION, 30)
    start = mx.zeros((30,), mx.int32)
    drafts, q = toy.propose(start, 2, batch, start, certain=False)
    p = distribution(toy.target[mx.concatenate([start[:, None], drafts], axis=1)], batch)
    noise = gumbel(batch, start[:, None], 9)
    u = mx.full((30, 2), 0.5)
    once = rejection(p, q, drafts, start + 2, u, noise)
    by_position = rejection(p, q, drafts, start + 2, u, mx.broadcast_to(noise, (30, 3, 9)))
    assert mx.array_equal(once.tokens, by_position.tokens)


# Through the engine: a grammar, with drafts by n-grams and by a model.

SMALL = 8
"""Vocabulary size, small enough to list every text."""
GUIDED_PROMPT = [2, 4, 1, 2, 4, 1, 2, 4]
GUIDED_LENGTH = 2
ENGINE_DRAWS, ENGINE_ROWS = in_full(12_000, 1_200), 200
SHARP = SamplingParams(temperature=0.7, max_tokens=GUIDED_LENGTH, ignore_eos=True)


class Forbids(Steps):
    """Forbids the token that is three above the last one."""

    vocab, end = SMALL, None

    def mask(self) -> mx.array:
        return allowed_after(self.taken)

    def allowed(self, token: int) -> bool:
        return token < self.vocab and bool(np.array(self.mask())[token])


class Hints(Forbids):
    """Names a token as forced although others are allowed."""

    def forced(self, most: int) -> list[int]:
        return [3, 5][:most]


@cache
def allowed_by_last(last: int) -> mx.array:
    return mx.array([token != (last + 3) % SMALL for token in range(SMALL)])


def allowed_after(taken: Sequence[int]) -> mx.array:
    return allowed_by_last(taken[-1] if taken else GUIDED_PROMPT[-1])


class Alternating:
    """Alternates between n-grams, a model and both, each in other rows, whatever they draft."""

    wants_trees = False

    def __init__(self, first: int):
        self.round = first

    def plan(self, context: Context) -> Plan:
        source = self.round % 3
        return Plan(2, lookups=tuple(2 * (source == 0 or (source == 2 and row % 2)) for row in range(context.rows)))

    def observe(self, result: RoundResult) -> None:
        self.round += 1


@cache
def small_target(seed: int) -> em.Target:
    return tiny_target(seed, layers=1, hidden=16, vocab=SMALL)


@cache
def guided_law() -> Array:
    """Return the probability of every text of `GUIDED_LENGTH` tokens after the prompt, [SMALL ** GUIDED_LENGTH]."""
    length = GUIDED_LENGTH
    texts = np.stack(np.meshgrid(*[np.arange(SMALL)] * length, indexing="ij"), axis=-1).reshape(-1, length)
    whole = np.concatenate([np.tile(GUIDED_PROMPT, (len(texts), 1)), texts], axis=1)
    logits = small_target(0).forward(mx.array(whole)).logits[:, len(GUIDED_PROMPT) - 1 : -1]
    masks = mx.stack([mx.stack([allowed_after(text[:at]) for at in range(length)]) for text in texts.tolist()])
    batch = SamplingBatch.of([SHARP] * len(texts), [0] * len(texts))
    p = np.array(distribution(mx.where(masks, logits, -math.inf), batch), np.float64)
    p /= p.sum(axis=-1, keepdims=True)
    return np.asarray(np.take_along_axis(p, texts[..., None], axis=-1)[..., 0].prod(axis=1))


def guided_texts(
    policy: Callable[[], Policy], acceptance: Acceptance, grammar: type[Forbids] = Forbids
) -> tuple[Array, int]:
    """Return texts by the engine, [N, GUIDED_LENGTH], and how many draft or forced tokens were accepted."""
    drafter = em.HybridProposer(em.DraftModelProposer(small_target(1)), em.NgramProposer(3, 1))
    params, outputs = replace(SHARP, grammar=grammar, acceptance=acceptance), list[em.Output]()
    for _ in range(ENGINE_DRAWS // ENGINE_ROWS):  # rows that start together are drafted for together
        engine = em.Engine(
            small_target(0),
            drafter,
            policy=policy(),
            max_batch=ENGINE_ROWS,
            prefill_chunk=ENGINE_ROWS * len(GUIDED_PROMPT),
            groups=1,
        )
        outputs += engine.generate([GUIDED_PROMPT] * ENGINE_ROWS, params)
    assert [output.error for output in outputs if output.error] == []
    accepted = sum(output.forced if grammar is Hints else output.accepted for output in outputs)
    return np.array([output.tokens for output in outputs]), accepted


GUIDED_POLICIES: dict[str, Callable[[], Policy]] = {
    "n-grams, then a model": lambda: Alternating(0),
    "a model, then both": lambda: Alternating(1),
    "both, then n-grams": lambda: Alternating(2),
    "default": cache(em.HybridPolicy),  # one for all engines, so that it learns
}


@pytest.mark.parametrize(("policy", "acceptance"), diagonal(GUIDED_POLICIES, ["rejection", "coupled"]))
def test_texts_with_a_grammar_follow_the_target(policy: str, acceptance: Acceptance) -> None:
    assert_guided(*guided_texts(GUIDED_POLICIES[policy], acceptance))


@pytest.mark.parametrize(("first", "acceptance"), diagonal([0, 2], ["rejection", "coupled"]))
def test_texts_with_forced_tokens_follow_the_target(first: int, acceptance: Acceptance) -> None:
    """A grammar may be wrong about what is forced: its tokens are drafts, in all rows or in every other one."""
    assert_guided(*guided_texts(lambda: Alternating(first), acceptance, Hints))


def assert_guided(texts: Array, accepted: int) -> None:
    assert not misses(texts, guided_law(), SMALL)
    assert not misses(texts[:, :1], guided_law().reshape(SMALL, -1).sum(axis=1), SMALL)
    assert accepted > 0
