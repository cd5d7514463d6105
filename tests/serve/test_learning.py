"""A head that learns from requests: it takes over only when it is better, and returns when it is worse."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import pytest

import eagle_mlx as em
from eagle_mlx.errors import ConfigError, EagleError, OutputError
from eagle_mlx.heads.base import DraftHead
from eagle_mlx.heads.eagle3 import save_eagle3
from eagle_mlx.heads.precision import quantize_for
from eagle_mlx.paired import Gain
from eagle_mlx.serve.learning import learner as learning
from eagle_mlx.serve.learning import texts
from eagle_mlx.serve.learning.drift import DriftDetector
from eagle_mlx.serve.learning.learner import Learner, head_of, with_new_head
from eagle_mlx.serve.learning.options import LearnOptions
from eagle_mlx.serve.speculation import Speculation
from eagle_mlx.target import Target
from eagle_mlx.train.kinds import kind_of
from tests.eagle_mlx import heads
from tests.fakes import tiny_head, tiny_target
from tests.full import in_full

PARAMS = em.SamplingParams(max_tokens=12)
ENOUGH = in_full(30, 18)
"""Requests whose texts suffice for a cycle, which also judges the version of the last one."""


@pytest.fixture(autouse=True)
def _few_tokens(monkeypatch: pytest.MonkeyPatch) -> None:
    """Shorten a cycle: what it decides does not depend on its size."""
    tokens, least = in_full((100, 4), (40, 2))
    sizes = {"CYCLE_TOKENS": tokens, "PASSES": 1, "LEAST_JUDGED": least, "MOST_JUDGED": least + 1}
    for name, value in sizes.items():
        monkeypatch.setattr(learning, name, value)
    monkeypatch.setattr(texts, "HELD_OUT", in_full(3, 2))


@pytest.fixture(scope="module")
def target() -> Target:
    return tiny_target()


@pytest.fixture(scope="module")
def head(target: Target, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("heads") / "head"
    save_eagle3(tiny_head(target), folder, target_name="tiny")
    return folder


class World:
    """An engine with a head that learns, and its traffic. Without a head, it begins with n-grams."""

    def __init__(self, target: Target, head: Path | None, folder: Path, depth: int = 3, **settings: Any):
        speculation = Speculation(head_bits=settings.pop("head_bits", None))
        if head is None:
            speculation = replace(speculation, mode="ngram")
            proposer = with_new_head(speculation.proposer(target), target, speculation)
        else:
            speculation, loaded = replace(speculation, head=str(head)), em.load_head(head, target)
            quantize_for(loaded, target, speculation.head_bits)
            proposer = em.HeadProposer(loaded)
        self.serving = head_of(proposer)
        self.learner = Learner(LearnOptions(folder=folder, **settings), target, proposer, speculation)
        self.engine = em.Engine(
            target, proposer, policy=em.FixedPolicy(depth), collector=self.learner.collector, max_batch=64
        )
        self.rng = np.random.default_rng(0)

    def prompts(self, count: int) -> list[list[int]]:
        vocab: int = self.engine.target.vocab_size
        return self.rng.integers(0, vocab, (count, 6)).tolist()  # type: ignore[no-any-return]

    def serve(self, count: int) -> None:
        self.engine.generate(self.prompts(count), PARAMS)

    def work(self) -> int:
        """Do all work; return the number of pieces."""
        pieces = 0
        while self.learner.pending:
            self.learner.work()
            pieces += 1
        return pieces

    def tau(self, prompts: list[list[int]]) -> float:
        quiet = em.SamplingParams(max_tokens=20, learn=False)
        outputs = self.engine.generate(prompts, quiet)
        return sum(len(output.tokens) for output in outputs) / sum(output.rounds for output in outputs)


@contextmanager
def world(target: Target, head: Path | None, folder: Path, **settings: Any) -> Iterator[World]:
    made = World(target, head, folder, **settings)
    try:
        yield made
    finally:
        made.learner.close()


def test_the_head_rises_on_its_traffic_and_serves_after_a_restart(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in {"CYCLE_TOKENS": 300, "PASSES": in_full(18, 16), "LEAST_JUDGED": 12, "MOST_JUDGED": 24}.items():
        monkeypatch.setattr(learning, name, value)
    monkeypatch.setattr("eagle_mlx.serve.learning.texts.HELD_OUT", 3)
    target, head = tiny_target(layers=3, vocab=32), tmp_path / "head"
    save_eagle3(tiny_head(target), head, target_name="tiny")
    with world(target, head, tmp_path / "learned") as first:
        fresh = first.prompts(24)
        before = first.tau(fresh)
        for _ in range(in_full(6, 1)):
            first.serve(60)
            first.work()
        after, version = first.tau(fresh), first.learner.versions.serving
        texts = len(first.learner.texts.all)
        assert version > 0
        assert after > before + 0.1
        assert first.learner.versions.events[-1].tokens > 0
    with world(target, head, tmp_path / "learned") as second:
        assert second.learner.versions.serving == version
        assert second.tau(fresh) == pytest.approx(after, rel=0.03)  # the file has 16 bits
        assert len(second.learner.texts.all) == texts


def test_what_was_collected_before_a_restart_is_learned_after_it(target: Target, head: Path, tmp_path: Path) -> None:
    """A cycle may need more texts than are collected between two restarts; what was learned is not new again."""
    with world(target, head, tmp_path / "learned") as first:
        first.serve(ENOUGH)
    with world(target, head, tmp_path / "learned") as second:
        assert second.work() > 0
        assert len(second.learner.versions.events) == 1
    with world(target, head, tmp_path / "learned") as third:
        assert third.work() == 0


def test_texts_that_the_user_deletes_while_the_server_runs_are_forgotten(
    target: Target, head: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """`eagle-heads forget` is refused then."""
    with world(target, head, tmp_path / "learned") as learned:
        for _ in range(2):
            learned.serve(ENOUGH)
            learned.work()
            for file in (tmp_path / "learned" / "texts").iterdir():
                file.unlink()
        assert len(learned.learner.versions.events) == 2
        learned.serve(1)
        learned.work()
    assert not caplog.messages
    with world(target, head, tmp_path / "learned") as again:
        assert len(again.learner.texts.all) == 1


def test_without_a_head_ngrams_draft_until_a_new_one_is_better(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The new head begins again while it loses, and n-grams return if it turns out worse."""
    target, folder = tiny_target(layers=3, vocab=32), tmp_path / "learned"
    with world(target, None, folder) as grown:
        prompts = grown.prompts(8)
        plain = [output.tokens for output in em.Engine(target).generate(prompts, PARAMS)]

        def drafted() -> int:
            outputs = grown.engine.generate(prompts, replace(PARAMS, learn=False, memory=False))
            assert [output.tokens for output in outputs] == plain
            return sum(output.drafted for output in outputs)

        by_ngrams = drafted()
        assert "n-grams draft until a head is better" in str(grown.learner)
        judged(grown, monkeypatch, -0.1)
        assert (grown.learner.versions.serving, drafted()) == (0, by_ngrams)
        judged(grown, monkeypatch, 0.1)
        assert grown.learner.versions.serving == 1
        assert drafted() > 2 * by_ngrams
        judged(grown, monkeypatch, -0.1)
        assert (grown.learner.versions.serving, drafted()) == (0, by_ngrams)
        judged(grown, monkeypatch, 0.1)
    with world(target, None, folder) as again:
        assert "version 2 of the head serves" in str(again.learner)
        assert sum(output.drafted for output in again.engine.generate(prompts, PARAMS)) > 2 * by_ngrams


def test_a_new_head_beats_ngrams_with_the_texts_that_it_learns(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {"CYCLE_TOKENS": 300, "PASSES": in_full(6, 4), "LEAST_JUDGED": 12, "MOST_JUDGED": 24}.items():
        monkeypatch.setattr(learning, name, value)
    with world(tiny_target(layers=3, vocab=32), None, tmp_path / "learned") as grown:
        grown.serve(60)
        grown.work()
        [event] = grown.learner.versions.events
        assert event.outcome == "took over"
        assert event.after > event.before > 1  # n-grams accepted something, too


def test_a_new_head_must_beat_ngrams_with_the_texts_from_before_a_restart(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They judge alike, whether the server was restarted after it had collected the texts or not."""
    target, taus = tiny_target(layers=3, vocab=32), list[float]()
    for restarts in (False, True):
        folder = tmp_path / f"{restarts}"
        with world(target, None, folder) as first:
            first.serve(30)
            if not restarts:
                first.work()
                taus.append(first.learner.versions.events[0].before)
    with world(target, None, folder) as second:
        second.work()
        taus.append(second.learner.versions.events[0].before)
    assert taus[0] == taus[1] > 1


def test_the_texts_are_those_without_learning(target: Target, head: Path, tmp_path: Path) -> None:
    """Pieces of work between all steps, at any share, and versions that change in the middle of answers."""
    rng = np.random.default_rng(1)
    prompts = rng.integers(0, target.vocab_size, (in_full(30, 20), 6)).tolist()
    params = [em.SamplingParams(temperature=0.7 * (at % 2), seed=at, max_tokens=12) for at in range(len(prompts))]
    expected = [output.tokens for output in em.Engine(target, max_batch=8).generate(prompts, params)]
    with world(target, head, tmp_path / "learned") as learned:
        learned.engine.max_batch = 8
        requests = [learned.engine.prepare(prompt, own) for prompt, own in zip(prompts, params, strict=True)]
        learned.serve(ENOUGH)
        for request in requests:
            learned.engine.submit(request)
        while not learned.engine.idle:
            learned.engine.step()
            for _ in range(8):
                if learned.learner.pending:
                    learned.learner.work()
        assert learned.learner.steps > 0
        assert [request.tokens for request in requests] == expected


def judged(world: World, monkeypatch: pytest.MonkeyPatch, *gains: float, older: float = 0.0) -> None:
    """Let the judge find these gains, one after another, and a gain over the older half of the conversations."""
    left = list(gains)

    def gain_of(*_: object) -> Gain:
        gain = left[0] if len(left) == 1 else left.pop(0)
        return Gain(gain, gain - 0.001, gain + 0.001, "better" if gain > 0.001 else "worse", 12, 12)

    monkeypatch.setattr("eagle_mlx.judge.gain_of", lambda *_: gain_of())
    monkeypatch.setattr(learning, "gain_of", lambda *_: Gain(older, -0.1, 0.1, "not told apart", 6, 12))
    world.serve(ENOUGH)
    world.work()


def test_a_version_that_turns_out_worse_is_rolled_back(
    target: Target, head: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pasts: list[DriftDetector] = []
    monkeypatch.setattr(learning, "DriftDetector", lambda: pasts.append(DriftDetector()) or pasts[-1])
    with world(target, head, tmp_path / "learned") as learned:
        fresh = learned.prompts(in_full(24, 12))
        before = learned.tau(fresh)
        judged(learned, monkeypatch, 0.1)
        assert learned.learner.versions.serving == 1
        assert len(pasts) == 2, "the acceptance of a version falls below its own past only"
        judged(learned, monkeypatch, -0.1)
        outcomes = [event.outcome for event in learned.learner.versions.events]
        assert outcomes == ["took over", "rolled back", "not better"]
        assert learned.learner.versions.serving == 0
        assert learned.tau(fresh) == before
    with world(target, head, tmp_path / "learned") as again:
        assert again.tau(fresh) == before


@pytest.mark.parametrize(("has_head", "count"), [(True, 1), (True, 2), (False, 1)])
def test_a_version_that_turns_out_worse_after_a_restart_is_rolled_back(
    has_head: bool, count: int, target: Target, head: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """To the first head, or n-grams, and to another version."""
    place, folder = head if has_head else None, tmp_path / "learned"
    with world(target, place, folder) as learned:
        fresh = learned.prompts(8)
        for version in range(count):
            before = learned.tau(fresh)
            judged(learned, monkeypatch, 0.1)
            assert learned.learner.versions.serving == version + 1
    with world(target, place, folder) as again:
        judged(again, monkeypatch, -0.1)
        assert again.learner.versions.events[-2].outcome == "rolled back"
        assert again.learner.versions.serving == count - 1
        if has_head:  # n-grams remember more texts
            assert again.tau(fresh) == pytest.approx(before, rel=0.03)  # the file has 16 bits
    with world(target, place, folder) as third:
        judged(third, monkeypatch, -0.1)
        assert [event.outcome for event in third.learner.versions.events].count("rolled back") == 1


@pytest.mark.parametrize(
    ("older", "taken"), [([-0.03], [0]), ([-0.015, -0.015], [1, 1]), ([-0.015, 0.01, -0.015], [1, 2, 3])]
)
def test_versions_lose_two_percent_at_most_over_older_conversations(
    older: list[float], taken: list[int], target: Target, head: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In all, although each gains over all conversations."""
    with world(target, head, tmp_path / "learned") as learned:
        for gain, version in zip(older, taken, strict=True):
            judged(learned, monkeypatch, 0.1, older=gain)
            assert learned.learner.versions.serving == version


def test_one_prompt_again_and_again_teaches_nothing(target: Target, head: Path, tmp_path: Path) -> None:
    with world(target, head, tmp_path / "learned") as learned:
        [prompt] = learned.prompts(1)
        learned.engine.generate([prompt] * 40, PARAMS)
        assert learned.work() == 40  # a piece takes one text in
        assert len(learned.learner.texts.all) == 8
        learned.engine.generate([[7] * 40] * 3, em.SamplingParams(max_tokens=in_full(200, 60)))  # texts that loop
        learned.work()
        assert len(learned.learner.texts.all) == 8
        assert learned.learner.steps == 0


def test_texts_that_leave_while_a_version_is_judged_do_not_count(
    target: Target, head: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The oldest make room for what requests bring meanwhile."""
    monkeypatch.setattr(learning, "MOST_JUDGED", 30)
    with world(target, head, tmp_path / "learned", disk_gb=2e-4) as learned:
        learned.serve(36)
        while not learned.learner.versions.candidate.exists():
            learned.learner.work()
        before = len(learned.learner.texts.all)
        learned.serve(30)
        learned.work()
        [event, *_] = learned.learner.versions.events
        assert 2 <= event.gain.conversations < before
    assert caplog.messages == []


def test_learning_gets_rarer_without_gains_and_returns_with_a_fall_of_acceptance(
    target: Target, head: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with world(target, head, tmp_path / "learned") as learned:
        judged(learned, monkeypatch, -0.1)
        judged(learned, monkeypatch, -0.1)
        steps = learned.learner.steps
        learned.serve(ENOUGH // 2)
        learned.work()
        assert learned.learner.steps == steps
        learned.learner.collector.accepted.extend([(5, 10)] * 50)
        learned.serve(1)  # too few, if there was no fall
        learned.work()
        assert learned.learner.steps > steps


def test_a_fall_is_noticed_and_noise_is_not() -> None:
    rng, drift = np.random.default_rng(0), DriftDetector()
    alarms = sum(drift.falls(value) for value in rng.normal(2.5, 0.5, 2000))
    assert alarms == 0
    assert any(drift.falls(value) for value in rng.normal(2.0, 0.5, 200))


def test_what_fails_leaves_the_serving_head_and_stops_after_three_times(
    target: Target, head: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    with world(target, head, tmp_path / "learned") as learned:
        fresh = learned.prompts(in_full(24, 12))
        before = learned.tau(fresh)
        monkeypatch.setattr(learning, "draft_along", lambda *_: 1 / 0)
        for _ in range(4):
            learned.serve(ENOUGH)
            learned.work()
        assert learned.tau(fresh) == before
        assert not learned.learner.pending
        assert [record.levelname for record in caplog.records] == ["ERROR"] * 3
        assert "stops until a restart" in caplog.messages[-1]


def test_learning_goes_on_when_a_full_disk_has_space_again(
    target: Target, head: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def full(*_: object, **__: object) -> None:
        raise OSError(28, "No space left on device")

    with world(target, head, tmp_path / "learned") as learned:
        with monkeypatch.context() as patch:
            patch.setattr(texts, "write_whole", full)
            learned.serve(ENOUGH)
            learned.work()
        [message] = caplog.messages
        assert "texts cannot be written (No space left on device)" in message
        assert learned.learner.steps == 0
        learned.serve(ENOUGH)
        learned.work()
        assert learned.learner.steps > 0


@pytest.mark.parametrize(
    ("kind", "bits"),
    [("eagle3.1", 4), *((kind, None) for kind in ("eagle3.1", "eagle", "mtp", "peagle", "dflash", "dspark"))],
)
def test_a_version_of_every_kind_takes_the_place_of_the_first(kind: str, bits: int | None, tmp_path: Path) -> None:
    """Also of a quantized head."""
    target = tiny_target()
    made: DraftHead = heads.ALL[kind](target)
    made.attach(target)
    kind_of(made).save(made, tmp_path / "head", "tiny", {})
    with world(target, tmp_path / "head", tmp_path / "learned", head_bits=bits) as learned:
        fresh = learned.prompts(4)
        first = learned.engine.generate(fresh, em.SamplingParams(max_tokens=8, learn=False))
        with pytest.MonkeyPatch.context() as patch:
            judged(learned, patch, 0.1)
        assert learned.learner.versions.serving == 1, kind
        second = learned.engine.generate(fresh, em.SamplingParams(max_tokens=8, learn=False))
        assert [output.tokens for output in first] == [output.tokens for output in second]


def test_texts_that_match_are_left_out(tmp_path: Path) -> None:
    target = tiny_target(tokenizer=True)
    save_eagle3(tiny_head(target), tmp_path / "head", target_name="tiny")
    with world(target, tmp_path / "head", tmp_path / "learned", redact=(r"\d{4}-\d{4}",)) as learned:
        params = em.SamplingParams(max_tokens=4)
        learned.engine.generate(["my card is 1234-5678, keep it", "my card is elsewhere"], params)
        assert learned.learner.collector.left_out == 1
        [example] = learned.learner.collector.take()
        assert target.tokenizer is not None
        assert "elsewhere" in target.tokenizer.decode(example.tokens.tolist())


def test_folders_of_others_are_refused_by_name(target: Target, head: Path, tmp_path: Path) -> None:
    folder = tmp_path / "learned"
    with world(target, head, folder), pytest.raises(OutputError, match=f"another process is writing to {folder}"):
        World(target, head, folder)
    save_eagle3(tiny_head(target, seed=1), tmp_path / "other", target_name="tiny")
    with pytest.raises(ConfigError, match="another target or head"):
        World(target, tmp_path / "other", folder)
    with world(target, head, folder) as learned:  # both left it unlocked
        assert learned.learner.versions.serving == 0


def test_a_target_that_was_moved_learns_on(head: Path, tmp_path: Path) -> None:
    """Also if it is named by another path, or on the machine to which the folder was copied."""
    target, folder = tiny_target(), tmp_path / "learned"
    target.name = "/before/model"
    with world(target, head, folder) as first:
        first.serve(4)
    target.name = "model"
    with world(target, head, folder) as second:
        assert len(second.learner.texts.all) == len(first.learner.texts.all) > 0


def test_a_damaged_log_or_head_is_named(
    target: Target, head: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "learned"
    with world(target, head, folder) as learned:
        judged(learned, monkeypatch, 0.1)
    shutil.rmtree(folder / "heads" / "1")
    with pytest.raises(EagleError, match=str(folder)):
        World(target, head, folder)
    (folder / "log.json").write_text("{")
    with pytest.raises(ConfigError, match=r"log\.json cannot be read"):
        World(target, head, folder)


def test_while_requests_decode_nothing_is_learned_and_few_syncs_are_added(
    target: Target, head: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With share 0: the same forwards as without learning, and a copy to the host for 32 of them."""
    counts, evaluated, forward = {"evals": 0, "forwards": 0}, mx.eval, target.forward

    def eval_counted(*arrays: Any) -> None:
        counts["evals"] += 1
        evaluated(*arrays)

    def forward_counted(*inputs: Any, **more: Any) -> Any:
        counts["forwards"] += 1
        return forward(*inputs, **more)

    monkeypatch.setattr(mx, "eval", eval_counted)
    monkeypatch.setattr(target, "forward", forward_counted)
    long = em.SamplingParams(max_tokens=in_full(100, 66), ignore_eos=True)

    def decoded(engine: em.Engine, prompts: list[list[int]], learner: Learner | None) -> dict[str, int]:
        counts.update(evals=0, forwards=0)
        for prompt in prompts:
            engine.submit(engine.prepare(prompt, long))
        while not engine.idle:
            engine.step()
            assert learner is None or not learner.may_work(10.0)
        return dict(counts)

    with world(target, head, tmp_path / "learned") as learned:
        learned.serve(ENOUGH)
        assert learned.learner.pending
        prompts = learned.prompts(4)
        plain = em.Engine(target, em.HeadProposer(em.load_head(head, target)), policy=em.FixedPolicy(3), max_batch=64)
        without = decoded(plain, prompts, None)
        added = {
            name: count - without[name] for name, count in decoded(learned.engine, prompts, learned.learner).items()
        }
        assert added["forwards"] == 0
        assert 0 < added["evals"] <= without["forwards"] // 32
        assert learned.learner.steps == 0


@pytest.mark.parametrize("share", [0.0, 0.2])
def test_learning_takes_its_share_of_the_busy_time(share: float, target: Target, head: Path, tmp_path: Path) -> None:
    with world(target, head, tmp_path / "learned", share=share) as learned:
        learned.serve(1)
        assert learned.learner.pending
        busy, worked = 0.0, 0.0
        for _ in range(1000):
            busy += 0.1
            if learned.learner.may_work(0.1):
                worked += 0.7
                learned.learner.spent(0.7)
        assert worked / (busy + worked) == pytest.approx(share, abs=0.01)
