"""Proposers' drafts equal slow references. The target's text never shows a bad draft, so only these tests do."""

from __future__ import annotations

from collections import Counter

import mlx.core as mx
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import eagle_mlx as em
from eagle_mlx.decoding.sampling import SamplingBatch, draft_sample
from eagle_mlx.errors import ConfigError, HeadError
from eagle_mlx.heads.eagle3 import Eagle3Head
from eagle_mlx.plan import CONFIDENCE_LAG, Plan, Trial
from eagle_mlx.proposers.base import Observation
from eagle_mlx.proposers.head import HeadState
from eagle_mlx.sampling_params import SamplingParams
from tests.fakes import length_of, tiny_head, tiny_target
from tests.full import some

TARGET = tiny_target()
HEADS = {"all": tiny_head(TARGET), "some": tiny_head(TARGET, draft_vocab=40)}


def slow_draft(head_name: str, text: list[int], depth: int, params: SamplingParams, seed: int) -> list[int]:
    """Draft after a text without a cache: every step runs the head over the whole sequence."""
    head, batch = HEADS[head_name], SamplingBatch.of([params], [seed])
    tokens, length = list(text), len(text)
    features = head.features(TARGET.forward(mx.array([text[:-1]]), aux_layers=head.config.aux_layers).aux)
    for step in range(depth):
        hidden = head(TARGET.embed(mx.array([tokens[1:]])), features, mask="causal")
        logits = head.logits(hidden[:, -1:])
        token, _ = draft_sample(logits, batch, mx.array([[length + step]]), TARGET.vocab_size, head.token_ids)
        tokens.append(int(token.item()))
        features = mx.concatenate([features, hidden[:, -1:]], axis=1)
    return tokens[length:]


def observation(head_name: str, text: list[int], start: int, stop: int) -> tuple[list[int], tuple[mx.array, ...]]:
    """Return the target's outputs for positions start..stop-1 of a text, and the tokens after them."""
    aux = TARGET.forward(mx.array([text[:stop]]), aux_layers=HEADS[head_name].config.aux_layers).aux
    return text[start + 1 : stop + 1], tuple(x[:, start:] for x in aux)


@settings(max_examples=some(20), deadline=None)
@given(
    st.sampled_from(["all", "some"]),
    st.lists(st.lists(st.integers(1, 4), min_size=1, max_size=4), min_size=1, max_size=3),
    st.integers(1, 5),
    st.integers(0, 1000),
    st.sampled_from([None, 0.0, 1e-4, 1e-2, 1e-1, 1.5]),
)
def test_drafts_equal_those_of_a_head_without_a_cache(
    head: str, gains: list[list[int]], depth: int, seed: int, stop_below: float | None
) -> None:
    """After rounds in which rows of different lengths kept different numbers of tokens, with or without early exits."""
    rng, rounds = np.random.default_rng(seed), min(map(len, gains))
    texts = [[int(t) for t in rng.integers(0, 128, 4 + 3 * i + sum(row))] for i, row in enumerate(gains)]
    params = [SamplingParams(), SamplingParams(temperature=0.8, seed=seed), SamplingParams(temperature=1.2, seed=1)]
    params = params[: len(texts)]
    seeds = [p.seed or 0 for p in params]
    proposer = em.HeadProposer(HEADS[head])
    proposer.bind(TARGET)
    lengths = [4 + 3 * i for i in range(len(texts))]
    state = proposer.open([text[:n] for text, n in zip(texts, lengths, strict=True)])

    def seen(starts: list[int], stops: list[int]) -> Observation:
        parts = [observation(head, t, a, b) for t, a, b in zip(texts, starts, stops, strict=True)]
        width = max(aux[0].shape[1] for _, aux in parts)
        pad = [[mx.pad(x, ((0, 0), (0, width - x.shape[1]), (0, 0))) for x in aux] for _, aux in parts]
        layers = tuple(mx.concatenate(list(layer)) for layer in zip(*pad, strict=True))
        return Observation([tokens for tokens, _ in parts], layers)

    state.prefill(seen([0] * len(texts), [n - 1 for n in lengths]))
    for step in range(rounds + 1):
        plan = Plan(depth, stop_below=stop_below)
        draft = state.draft(plan, SamplingBatch.of(params, seeds), mx.array(lengths))
        count = length_of(plan, draft)
        for row, (text, n) in enumerate(zip(texts, lengths, strict=True)):
            assert draft.tokens[row].tolist() == slow_draft(head, text[:n], count, params[row], seeds[row])
        if step < rounds:
            before, lengths = lengths, [n + gain[step] for n, gain in zip(lengths, gains, strict=True)]
            state.observe(seen([n - 1 for n in before], [n - 1 for n in lengths]))


def test_a_row_that_kept_one_token_drafts_from_it_while_others_kept_more() -> None:
    """Not from the padding after it."""
    head, short, long = HEADS["all"], list(range(5)), list(range(20, 28))
    proposer = em.HeadProposer(head)
    proposer.bind(TARGET)
    state = proposer.open([short[:4], long[:4]])
    aux = TARGET.forward(mx.array([short[:4] + [99] * 3, long[:7]]), aux_layers=head.config.aux_layers).aux
    state.prefill(Observation([short[1:4], long[1:4]], tuple(x[:, :3] for x in aux)))
    batch = SamplingBatch.of([SamplingParams()] * 2, [0, 0])
    state.draft(Plan(1), batch, mx.array([4, 4]))
    state.observe(Observation([short[4:5], long[4:8]], tuple(x[:, 3:] for x in aux)))
    drawn = state.draft(Plan(3), batch, mx.array([5, 8]))
    assert drawn.tokens.tolist() == [slow_draft("all", text, 3, SamplingParams(), 0) for text in (short, long)]


@pytest.mark.parametrize("proposer", [em.HeadProposer(HEADS["all"]), em.DraftModelProposer(TARGET)])
@pytest.mark.parametrize(
    ("depth", "stop_below", "length", "looks"),
    [
        (6, 0.0, 6, 6 - CONFIDENCE_LAG - 1),
        (6, 1.1, CONFIDENCE_LAG + 1, 1),
        (CONFIDENCE_LAG + 2, 1.1, CONFIDENCE_LAG + 1, 1),
        (CONFIDENCE_LAG + 1, 1.1, CONFIDENCE_LAG + 1, 0),
        (1, 1.1, 1, 0),
        (6, None, 6, 0),
    ],
)
def test_a_chain_ends_below_the_confidence_of_the_plan(
    proposer: em.HeadProposer | em.DraftModelProposer, depth: int, stop_below: float | None, length: int, looks: int
) -> None:
    proposer.bind(TARGET)
    text = [5, 6, 7, 8]
    state = proposer.open([text])
    tokens, aux = observation("all", text, 0, 3)
    state.prefill(Observation([tokens], aux))
    plan = Plan(depth, stop_below=stop_below)
    draft = state.draft(plan, SamplingBatch.of([SamplingParams()], [0]), mx.array([4]))
    assert draft.tokens.shape == (1, length)
    assert draft.lengths.tolist() == [length]
    assert len(draft.confidences) == looks


def test_a_chain_reports_its_confidence() -> None:
    """The product of the likeliest tokens' probabilities at each row's temperature, whatever was drawn."""
    params = [SamplingParams(), SamplingParams(temperature=0.5, seed=1)]
    text = [5, 6, 7, 8]
    tokens, aux = observation("some", text, 0, 3)
    proposer = em.HeadProposer(HEADS["some"])
    proposer.bind(TARGET)
    state = proposer.open([text, text])
    state.prefill(Observation([tokens, tokens], tuple(mx.concatenate([x, x]) for x in aux)))
    batch, positions = SamplingBatch.of(params, [0, 1]), mx.array([4, 4])
    draft = state.draft(Plan(5, stop_below=0.0), batch, positions)
    assert len(draft.confidences) == 5 - CONFIDENCE_LAG - 1 == 2
    between = float(np.mean(draft.confidences))
    assert state.draft(Plan(5, stop_below=between), batch, positions).tokens.shape == (2, 4), "the second is too low"
    for row, p in enumerate(params):
        sure, drafted = 1.0, [int(t) for t in draft.tokens[row]]
        for place, confidences in enumerate(draft.confidences):
            features = HEADS["some"].features(
                TARGET.forward(mx.array([text[:-1]]), aux_layers=HEADS["some"].config.aux_layers).aux
            )
            for step in range(place + 1):
                read = mx.array([[*text, *drafted[:step]][1:]])
                hidden = HEADS["some"](TARGET.embed(read), features, mask="causal")
                features = mx.concatenate([features, hidden[:, -1:]], axis=1)
            logits = HEADS["some"].logits(features[:, -1:]) / (p.temperature or 1.0)
            sure *= float(mx.max(mx.softmax(logits, axis=-1)))
            assert confidences[row] == pytest.approx(sure, rel=1e-3)


def test_rejection_rows_get_the_distribution_of_their_drafts() -> None:
    proposer = em.HeadProposer(HEADS["some"])
    proposer.bind(TARGET)
    text = [1, 2, 3, 4, 5, 6]
    state = proposer.open([text])
    tokens, aux = observation("some", text, 0, 5)
    state.prefill(Observation([tokens], aux))
    batch = SamplingBatch.of([SamplingParams(temperature=1.0)], [7])
    draft = state.draft(Plan(3), batch, mx.array([6]))
    assert draft.probs is not None
    q = np.array(draft.probs)
    assert q.shape == (1, 3, 128)
    np.testing.assert_allclose(q.sum(-1), 1, rtol=1e-5)
    token_ids = HEADS["some"].token_ids
    assert token_ids is not None
    outside = np.setdiff1d(np.arange(128), np.array(token_ids))
    assert q[..., outside].max() == 0
    assert all(q[0, i, t] > 0 for i, t in enumerate(draft.tokens[0].tolist()))


def test_a_row_whose_prompt_is_one_token_waits_a_round() -> None:
    proposer = em.HeadProposer(HEADS["all"])
    proposer.bind(TARGET)
    state = proposer.open([[3], [5]])
    draft = state.draft(Plan(2), SamplingBatch.of([SamplingParams()] * 2, [0, 0]), mx.array([1, 1]))
    assert draft.lengths.tolist() == [0, 0]


def told(text: list[int], start: int, stop: int, at_once: int) -> HeadState:
    """Return a state that got the first three positions in prefill, and 3 and start..stop-1 in decoding."""
    proposer = em.HeadProposer(HEADS["all"])
    proposer.bind(TARGET)
    state = proposer.open([text[:4]])
    following, aux = observation("all", text, 0, 3)
    state.prefill(Observation([following], aux))
    following, aux = observation("all", text, 3, 4)
    state.observe(Observation([following], aux))
    following, aux = observation("all", text, start, stop)
    for at in range(0, len(following), at_once):
        state.observe(Observation([following[at : at + at_once]], tuple(x[:, at : at + at_once] for x in aux)))
    return state


def test_an_idle_head_reads_nothing_and_then_only_the_newest_positions(monkeypatch: pytest.MonkeyPatch) -> None:
    """Long plain decoding must cost nothing, and no unread positions may accumulate."""
    batch, at = SamplingBatch.of([SamplingParams()], [0]), mx.array([206])
    text = [int(t) for t in np.random.default_rng(2).integers(0, 128, 210)]
    reads: list[int] = []
    forward = Eagle3Head.__call__
    monkeypatch.setattr(Eagle3Head, "__call__", lambda s, e, *rest: reads.append(e.shape[1]) or forward(s, e, *rest))
    state = told(text, 4, 205, at_once=1)
    assert reads == [4]  # the prompt, with the position of the first token
    drafted = state.draft(Plan(3), batch, at).tokens.tolist()
    newest = reads[1]
    assert newest <= 32
    assert drafted == told(text, 205 - newest, 205, at_once=newest).draft(Plan(3), batch, at).tokens.tolist()
    assert drafted != told(text, 205 - 1, 205, at_once=1).draft(Plan(3), batch, at).tokens.tolist()


@pytest.mark.parametrize("length", [2, 3, 60, 204, 205])
def test_a_state_with_skipped_positions_can_be_joined(length: int) -> None:
    text = [int(t) for t in np.random.default_rng(2).integers(0, 128, 210)]
    state = told(text, 4, 205, at_once=1)
    assert state.length(0) == 205
    other = state.proposer.join([state.piece(0, 0, length)], length)
    assert other.length(0) == length
    following, aux = observation("all", text, length, 207)
    other.observe(Observation([following], aux))
    batch = SamplingBatch.of([SamplingParams()], [0])
    assert other.draft(Plan(3), batch, mx.array([208])).tokens.shape == (1, 3)
    assert other.length(0) == 207


def test_a_head_of_another_target_is_refused_when_the_engine_is_built() -> None:
    with pytest.raises(HeadError, match="vocabulary 128 but the target has 64"):
        em.Engine(tiny_target(vocab=64), em.HeadProposer(HEADS["all"]))


def followers(text: list[int], most: int, least: int) -> list[list[int]]:
    """Return what followed the longest match of a text's last tokens in it."""
    for n in range(min(most, len(text)), least - 1, -1):
        places = [end for end in range(n, len(text)) if text[end - n : end] == text[-n:]]
        if places:
            return [text[end : end + 16] for end in places]
    return []


@given(st.lists(st.integers(0, 3), min_size=1, max_size=16), st.integers(1, 4), st.integers(0, 2))
def test_n_grams_draft_what_followed_the_longest_match_most_often(text: list[int], least: int, more: int) -> None:
    [row] = em.NgramProposer(least + more, least).open([[]]).rows
    for token in text:
        row.extend([token])
    rows, share = followers(text, least + more, least), 1.0
    for at in range(len(row.match) + 1):
        rows = [place for place in rows if place[:at] == row.match[:at] and len(place) > at]
        if not rows:
            break
        counts = Counter(place[at] for place in rows)
        likeliest = max(counts.values()) / len(rows)
        if at < len(row.match):
            assert counts[row.match[at]] / len(rows) == likeliest
        share *= likeliest
        assert (share >= 0.4) == (at < len(row.match))
    assert at == len(row.match)


def test_ngrams_match_only_in_rows_that_may_draft_from_them() -> None:
    target = tiny_target()
    proposer = em.HybridProposer(em.HeadProposer(tiny_head(target)), em.NgramProposer())
    proposer.bind(target)
    state = proposer.open([[1, 2, 1], [1, 2, 3], [3, 2, 3]])
    assert state.matches([None, None, "ngrams"]) == (1, 0, 1)
    assert state.matches([None, None, "model"]) == (1, 0, 0)
    assert state.matches(["model", None, "none"]) == ()


def test_each_row_has_the_draft_and_the_distribution_of_its_own_source() -> None:
    """A looked-up token is certain. The draft is as wide as the longest row's."""
    target = tiny_target()
    head = em.HeadProposer(tiny_head(target))
    for most, matches in ((3, [[9, 8, 9, 8, 9], [7, 6, 7]]), (1, [[5, 4, 3, 5], [2, 2]])):
        proposer = em.HybridProposer(head, em.NgramProposer())
        proposer.bind(target)
        texts = [matches[0], [1, 2, 3], matches[1]]
        state, alone = proposer.open(texts), head.open(texts)
        batch = SamplingBatch.of([SamplingParams(temperature=1.0)] * 3, [1, 2, 3])
        at = mx.array([len(text) for text in texts])
        for open_state in (state, alone):
            aux = mx.ones((3, 5, target.hidden_size)) * mx.arange(5)[:, None]
            open_state.prefill(Observation([[*text[1:], 5] for text in texts], (aux,) * len(head.aux_layers)))
        drafted, by_head = state.draft(Plan(most, lookups=(8, 0, 8)), batch, at), alone.draft(Plan(most), batch, at)
        widest = max(most, *(len(state.rows[row].match[:8]) for row in (0, 2)))
        assert drafted.tokens.shape == (3, widest)
        assert drafted.probs is not None
        assert by_head.probs is not None
        assert drafted.lengths[1].item() == most
        assert mx.array_equal(drafted.tokens[1, :most], by_head.tokens[1])
        assert mx.array_equal(drafted.probs[1, :most], by_head.probs[1])
        for row in (0, 2):
            match = state.rows[row].match[:8]
            assert drafted.lengths[row].item() == len(match) > 0
            assert drafted.tokens[row, : len(match)].tolist() == match
            certain = mx.take_along_axis(drafted.probs[row], drafted.tokens[row][:, None], axis=-1)
            assert mx.all(certain == 1)
            assert mx.all(drafted.probs[row].sum(axis=-1) == 1)


@given(st.lists(st.lists(st.integers(0, 2), max_size=4), max_size=30), st.integers(1, 3), st.integers(0, 2))
def test_trials_compare_each_match_with_the_text_that_followed(rounds: list[list[int]], least: int, more: int) -> None:
    """A trial ends with the round of its first wrong token, or of the last of up to 16."""
    [row] = em.NgramProposer(least + more, least).open([[]]).rows
    matches, trials, text = list[tuple[int, int, list[int]]](), list[Trial](), list[int]()
    for tokens in rounds:
        row.extend(tokens)
        trials += row.ended()
        text += tokens
        if tokens and row.match:
            matches.append((len(text), row.length, row.match))
    expected = []
    for start, match, draft in matches:
        last = text[start - match : start]
        assert any(text[at : at + match] == last for at in range(start - match)), "they were there before"
        later = text[start : start + len(draft)]
        right = next((at for at, token in enumerate(later) if token != draft[at]), len(later))
        if right < len(later) or len(later) == len(draft):
            expected.append(Trial(min(right + 1, len(draft)), right, match))
    assert sorted(trials) == sorted(expected)
    assert not row.ended()


def test_ngram_without_prompt_lookup_ignores_the_prompt() -> None:
    prompt = [1, 2, 3, 1, 2]
    batch = SamplingBatch.of([SamplingParams()], [0])
    looks, blind = (em.NgramProposer(prompt_lookup=on).open([prompt]) for on in (True, False))
    assert looks.draft(Plan(2), batch, mx.array([5])).tokens.tolist() == [[3, 1]]
    assert blind.draft(Plan(2), batch, mx.array([5])).lengths.tolist() == [0]
    [row] = em.NgramProposer(min_ngram=1, prompt_lookup=False).open([[1, 2]]).rows
    row.extend([3, 1])
    assert not row.match
    row.extend([2])
    assert row.match[:2] == [3, 1], "the last token of the prompt is read"


def test_ngram_drafts_are_no_wider_than_the_longest_match() -> None:
    batch = SamplingBatch.of([SamplingParams()] * 2, [0, 0])
    state = em.NgramProposer().open([[1, 2, 3, 1], [4, 5]])
    draft = state.draft(Plan(5), batch, mx.array([4, 2]))
    assert (draft.tokens.tolist(), draft.lengths.tolist()) == ([[2, 3, 1], [0, 0, 0]], [3, 0])
    state.remove(0)
    assert state.draft(Plan(5), batch, mx.array([2])).tokens.shape == (1, 0)


def test_ngram_sizes_must_make_sense() -> None:
    with pytest.raises(ConfigError, match="min_ngram must be from 1 to max_ngram, .*; got 3"):
        em.NgramProposer(max_ngram=2, min_ngram=3)
    with pytest.raises(ConfigError, match="min_ngram must be .*at most 16.*; got 17"):
        em.NgramProposer(max_ngram=20, min_ngram=17)
