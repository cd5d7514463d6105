"""`--hours`, which alternates between data and training, with a clock that counts forwards and tokens."""

from __future__ import annotations

import json
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from eagle_mlx.catalog.head_search import records_for
from eagle_mlx.command import Stop, Stopped
from eagle_mlx.data_pipelines import (
    Conversation,
    MakeConfig,
    MakeLimits,
    Message,
    Wanted,
    growing_engine,
    held_out_prompts,
    make_to_file,
    prompt_keys,
    shard_meta,
)
from eagle_mlx.data_pipelines.jsonl import PartialFile
from eagle_mlx.data_pipelines.synthesis import loop as synthesis_loop
from eagle_mlx.engine import Engine
from eagle_mlx.errors import CheckpointError, DataError
from eagle_mlx.shards import ShardWriter, bytes_per_token
from eagle_mlx.target import Target, fingerprint, load_target
from eagle_mlx.train import hours
from eagle_mlx.train.cli import main
from eagle_mlx.train.config import TrainConfig
from eagle_mlx.train.evaluation import Evaluator
from eagle_mlx.train.hours import FINGERPRINT, portions
from eagle_mlx.train.hours.phases import Rates, next_portion, seconds_to_learn
from eagle_mlx.train.job import new_run
from eagle_mlx.train.kinds import resolve
from eagle_mlx.train.run import Stopwatch, loop, set_up
from eagle_mlx.train.step import Stepper, WarmupStableDecay
from tests.fakes import talking_target_folder
from tests.full import in_full, some
from tests.train.empty_pictures import leave_empty_pictures

HOURS = 0.007
SHORT = partial(MakeConfig, user_tokens=30, max_tokens=12)


def train_for_hours(target: Target, config: TrainConfig, *speeds: float, **options: Any) -> dict[str, Any]:
    with set_up(target, resolve(config, target.hidden_size), FINGERPRINT, **options) as setup:
        return hours.train_for_hours(setup, *speeds)


class Clock:
    """Time that passes only with work, so that every run of a test takes the same time."""

    def __init__(self, patch: pytest.MonkeyPatch, forward: float = 0.06, token: float = 1 / 150):
        self.now = 0.0
        step, learn = Engine.step, Stepper.__call__

        def timed_step(engine: Engine) -> Any:
            self.now += forward
            return step(engine)

        def timed_learning(stepper: Stepper, rows: Any, factor: float) -> Any:
            result = learn(stepper, rows, factor)
            self.now += token * (result.tokens if result is not None else 0)
            return result

        patch.setattr(Engine, "step", timed_step)
        patch.setattr(Stepper, "__call__", timed_learning)

    def __call__(self) -> float:
        return self.now


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Target:
    return load_target(talking_target_folder(tmp_path_factory.mktemp("talker") / "tiny", seed=2))


@pytest.fixture(scope="module", autouse=True)
def _short_turns(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Shorten turns, because random models loop to a greedy turn's end. Heads are registered only for this file."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(portions, "MakeConfig", SHORT)
        patch.setattr(synthesis_loop, "FIRST_ROWS", 8)  # so that portions exceed the rows in progress
        patch.setattr(loop, "write_plots", leave_empty_pictures)
        patch.setenv("EAGLE_MLX_CACHE", str(tmp_path_factory.mktemp("cache")))
        yield


def config_of(output: Path, **more: Any) -> TrainConfig:
    values: dict[str, Any] = {
        **{"target": "tiny", "data": ("self",), "hours": HOURS, "states": "disk", "head": "eagle", "lr": 3e-3},
        **{"rows": 2, "length": 64, "epochs": 2, "eval_prompts": 8, "eval_tokens": 6, "eval_depth": 2, "lanes": 1},
    }
    return TrainConfig.of(output=str(output), **{**values, **more})


@pytest.fixture(scope="module")
def whole(target: Target, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, Any], float]:
    """Return the folder, the report and the time of an uninterrupted run."""
    out = tmp_path_factory.mktemp("whole") / "head"
    with pytest.MonkeyPatch.context() as patch:
        clock = Clock(patch)
        report = train_for_hours(target, config_of(out), watch=Stopwatch(clock))
    return out, report, clock.now


def test_a_head_is_trained_in_the_given_time(whole: tuple[Path, dict[str, Any], float], target: Target) -> None:
    out, report, seconds = whole
    assert 0.97 * 3600 * HOURS < seconds < 1.03 * 3600 * HOURS
    made = [portion["tokens"] for portion in report["data"]["portions"]]
    assert len(made) >= 3
    assert made[1] < 1.5 * made[0], "the data double"
    assert report["data"]["tokens"] == sum(made)
    assert report["data"]["prompts_held_out"] is True
    assert report["tokens"] == pytest.approx(2 * sum(made), rel=0.2), "--epochs passes"
    written = json.loads((out / "report.json").read_text())
    assert written["data"] == report["data"]
    assert written["acceptance_length"] == max(portion["acceptance_length"] for portion in report["data"]["portions"])
    assert (out / "best" / "config.json").exists()
    assert not (out / "checkpoints").exists()
    assert not list((out / "made").glob("*.shards")), "hidden states go"
    assert is_found(out, target)


def test_all_prompts_and_held_out_prompts_differ(whole: tuple[Path, dict[str, Any], float]) -> None:
    files = sorted((whole[0] / "made").glob("*.jsonl"))
    assert [file.name for file in files] == [f"{n:02d}.jsonl" for n in range(len(files) - 1)] + ["held-out.jsonl"]
    keys = [prompt_keys(file) for file in files]
    assert len(set().union(*keys)) == sum(map(len, keys)) == sum(len(file.read_text().splitlines()) for file in files)


def test_what_the_head_drafted_is_what_the_target_says_alone(
    whole: tuple[Path, dict[str, Any], float], target: Target, tmp_path: Path
) -> None:
    drafted = whole[0] / "made" / "01.jsonl"
    rows = len(drafted.read_text().splitlines())
    earlier_keys = prompt_keys(whole[0] / "made" / "00.jsonl") | prompt_keys(whole[0] / "made" / "held-out.jsonl")
    alone = tmp_path / "alone.jsonl"
    make_to_file(growing_engine(target), SHORT(seed=1), Wanted(rows=rows), alone, limits=MakeLimits(earlier_keys))
    assert alone.read_bytes() == drafted.read_bytes()


class Killed(BaseException):
    """Stands for the process being killed."""


class Ends:
    """Ends a run on request: `held-out`, `00`, … at a row of that file, `states` at a shard, the others at a step."""

    def __init__(self, patch: pytest.MonkeyPatch):
        self.at, self.left = "", 0
        add, write, learn, check = PartialFile.add, ShardWriter.write, Stepper.__call__, Stop.check

        def added(part: PartialFile, *args: Any) -> None:
            add(part, *args)
            self._count(part.output.stem, Killed)

        def written(shards: ShardWriter, *args: Any) -> None:
            self._count("states", Killed)
            write(shards, *args)

        def learned(stepper: Stepper, *args: Any) -> Any:
            self._count("learn", Killed)
            return learn(stepper, *args)

        def checked(stop: Stop) -> None:
            self._count("stop", Stopped)
            check(stop)

        patch.setattr(PartialFile, "add", added)
        patch.setattr(ShardWriter, "write", written)
        patch.setattr(Stepper, "__call__", learned)
        patch.setattr(Stop, "check", checked)

    def _count(self, at: str, error: type[BaseException]) -> None:
        self.left -= at == self.at
        if at == self.at and not self.left:
            raise error


def test_a_run_resumes_from_any_interruption(target: Target, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Killed while prompts and portions are made and captured and during training, and stopped during training."""
    out = tmp_path / "head"
    clock, ends = Clock(monkeypatch), Ends(monkeypatch)
    config, resume = config_of(out, hours=HOURS / 2), None
    made: dict[str, bytes] = {}
    first = ("held-out", 3), ("00", 5), ("states", 1), ("learn", 2)
    second = ("01", 4), ("states", 1), ("learn", 2), ("stop", 3)
    for ends.at, ends.left in (*first, *second):
        with pytest.raises((Killed, Stopped)):
            train_for_hours(target, config, resume=resume, watch=Stopwatch(clock))
        resume = out
        clock.now += 9999  # time in between does not count
        for name, held in made.items():
            assert (out / "made" / name).read_bytes() == held, "complete data is not made again"
        made = {file.name: file.read_bytes() for file in (out / "made").glob("*.jsonl")}
    assert sorted(made) == ["00.jsonl", "01.jsonl", "held-out.jsonl"]
    assert is_found(out, target), "the head of the first phase"
    ends.at = ""
    report = train_for_hours(target, config, resume=out, watch=Stopwatch(clock))
    assert 0.95 < report["data"]["hours"] / (HOURS / 2) < 1.05
    assert report["data"]["portions"][0]["tokens"]
    with pytest.raises(CheckpointError, match="is complete"):
        train_for_hours(target, config, resume=out, watch=Stopwatch(clock))


def test_a_run_that_is_stopped_while_it_makes_data_names_one_way_to_continue(
    target: Target, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    add, out = PartialFile.add, tmp_path / "head"

    def added(part: PartialFile, *args: Any) -> None:
        add(part, *args)
        raise Stopped

    monkeypatch.setattr(PartialFile, "add", added)
    with pytest.raises(Stopped, match=r"^$"):
        train_for_hours(target, config_of(out, hours=HOURS / 2), watch=Stopwatch(Clock(monkeypatch)))
    assert f"the data is kept; continue with: eagle-train --resume {out}" in capsys.readouterr().out


def test_states_that_do_not_fit_are_captured_for_each_batch(
    target: Target, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The second portion does not fit the cache: its hidden states are not kept but captured for each batch."""
    clock, out, seen = Clock(monkeypatch), tmp_path / "head", []
    learn = Stepper.__call__

    def look(stepper: Stepper, rows: Any, factor: float) -> Any:
        seen.append(rows.states is not None)
        return learn(stepper, rows, factor)

    monkeypatch.setattr(Stepper, "__call__", look)
    fits = 400 * bytes_per_token(shard_meta(target, ())) / 1e9
    report = train_for_hours(target, config_of(out, hours=HOURS / 2, cache_gb=fits), watch=Stopwatch(clock))
    assert seen[0]
    assert not seen[-1]
    assert "captured for each batch" in report["data"]["states"]
    assert report["data"]["tokens"] == sum(portion["tokens"] for portion in report["data"]["portions"])


def metrics_of(out: Path, kind: str) -> list[dict[str, Any]]:
    rows = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
    return [row for row in rows if row["kind"] == kind]


@pytest.mark.parametrize(
    ("slower", "after"), in_full([(1.0, 0.0), (4.0, 0.3), (12.0, 0.5), (40.0, 0.4)], [(12.0, 0.5)])
)
def test_all_data_is_learned_if_making_slows_down(
    target: Target, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, slower: float, after: float
) -> None:
    """After a share of the time, each forward of data generation takes several times as long."""
    clock, out = Clock(monkeypatch), tmp_path / "head"
    step, total = Engine.step, 3600 * HOURS

    def slow_step(engine: Engine) -> Any:
        before = clock.now
        result = step(engine)
        if before > after * total and engine.max_batch >= 8:  # not the evaluation's
            clock.now += (slower - 1) * (clock.now - before)
        return result

    monkeypatch.setattr(Engine, "step", slow_step)
    report = train_for_hours(target, config_of(out, eval_batch=1, log_steps=1), watch=Stopwatch(clock))
    assert clock.now < max(1.03 * total, total + 0.06 * slower), "a forward that began is ended"
    portions = [portion for portion in report["data"]["portions"] if portion["tokens"]]
    made = sum(portion["tokens"] for portion in portions)
    assert report["data"]["tokens"] == made
    assert report["data"]["learned_tokens"] == pytest.approx(made, rel=0.02), (
        "ends too short to learn from are left out"
    )
    assert report["tokens"] >= 1.5 * made, "nearly --epochs passes, which are two"
    factors = [row["learning_rate_factor"] for row in metrics_of(out, "train")]
    assert max(factors) == 1
    assert factors[-1] < 0.25, "one minus a root falls steeply up to the last step"


@pytest.mark.parametrize("slower", in_full([1.0, 1000.0], [1000.0]))
def test_the_rate_falls_and_only_learned_data_counts_if_training_slows_down(
    target: Target, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], slower: float
) -> None:
    """Training slows down in the middle of the last phase, so much of its data is not used."""
    clock, out = Clock(monkeypatch), tmp_path / "head"
    learn, hours = Stepper.__call__, in_full(HOURS, HOURS / 2)

    def slow(stepper: Stepper, rows: Any, factor: float) -> Any:
        before = clock.now
        result = learn(stepper, rows, factor)
        if before > 0.7 * 3600 * hours:
            clock.now += (slower - 1) * 0.01
        return result

    monkeypatch.setattr(Stepper, "__call__", slow)
    report = train_for_hours(target, config_of(out, hours=hours, epochs=1, log_steps=1), watch=Stopwatch(clock))
    factors = [row["learning_rate_factor"] for row in metrics_of(out, "train")]
    printed = capsys.readouterr()
    if slower == 1:
        assert report["data"]["learned_tokens"] == pytest.approx(report["data"]["tokens"], rel=0.02)
        assert "not learned" not in printed.err + printed.out
        return
    assert report["data"]["learned_tokens"] < 0.9 * report["data"]["tokens"]
    assert report["data"]["learned_conversations"] < report["data"]["conversations"]
    left = report["data"]["tokens"] - report["data"]["learned_tokens"]
    assert f"{left:,} of the {report['data']['tokens']:,} tokens were learned" in printed.err + printed.out
    assert factors[-1] < 1


def test_the_rate_falls_if_a_measurement_takes_all_the_time(
    target: Target, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock, out = Clock(monkeypatch), tmp_path / "head"
    measure, calls = Evaluator.measure, []

    def long(self: Evaluator, head: Any) -> Any:
        acceptance = measure(self, head)
        calls.append(clock.now)
        clock.now += 3600 * HOURS if len(calls) == 2 else 0
        return acceptance

    monkeypatch.setattr(Evaluator, "measure", long)
    report = train_for_hours(target, config_of(out, hours=HOURS / 2, log_steps=1), watch=Stopwatch(clock))
    factors = [row["learning_rate_factor"] for row in metrics_of(out, "train")]
    assert factors[-1] < 0.5
    assert len([portion for portion in report["data"]["portions"] if portion["tokens"]]) == 1


def is_found(out: Path, target: Target) -> bool:
    """Return whether commands that serve the target find the head."""
    return any(record.head == str(out / "best") for record in records_for(("tiny",), fingerprint(target)))


@settings(max_examples=some(60), deadline=None)
@given(
    st.floats(10, 1e5), st.integers(1, 10**6), st.integers(0, 10**6), st.integers(1, 5), st.floats(1, 1e4),
    st.floats(1, 1e4),
)  # fmt: skip
def test_the_last_portion_leaves_time_to_learn_it(
    left: float, made: int, learned: int, passes: int, making: float, learning: float
) -> None:
    tokens, last = next_portion(left, made, learned, passes, Rates(making, learning))
    if not last:
        assert tokens == made
    elif tokens:
        needed = tokens / making + seconds_to_learn(made + tokens, learned, passes, learning)
        assert needed == pytest.approx(left, abs=(1 / making + passes / learning)) or passes * made < learned
        assert tokens <= 2 * made


def test_an_error_tells_that_the_time_was_over_before_a_conversation_to_learn_from(
    target: Target, tmp_path: Path
) -> None:
    """The only conversation is one that the split holds out."""
    config = resolve(config_of(tmp_path / "head", seed=57), target.hidden_size)
    limits = MakeLimits(enough=lambda made, coming: True, over=lambda made: made > 0)
    with pytest.raises(DataError, match="had written a conversation to learn from; raise --hours"):
        portions.Portions(target, config, tmp_path).make(0, 0, limits, None)


def test_without_time_to_make_data_the_rest_goes_to_learning() -> None:
    assert next_portion(10, 1000, 0, 2, Rates(100, 100)) == (0, True)


def test_the_rate_rises_stays_constant_and_falls_in_the_last_phase() -> None:
    first = WarmupStableDecay(begins=50, seconds=80, steps=10, before=0, total=1000, last=False)
    assert first.factor(0, 50, 0.02, 0.0) == 0
    assert first.factor(0, 60, 0.02, 0.0) == pytest.approx(0.5)
    assert first.factor(0, 75, 0.02, 0.0) == first.factor(0, 51, 0.0, 0.0) == 1
    assert first.is_over(10, 60)
    assert first.is_over(3, 80)
    assert not first.is_over(9, 79)
    last = WarmupStableDecay(begins=500, seconds=1000, steps=0, before=100, total=1000, last=True)
    factors = [last.factor(0, at, 0.02, 0.1) for at in (500, 799, 800, 850, 900, 1000)]
    assert factors[:3] == [1, 1, 1]
    assert factors == sorted(factors, reverse=True)
    assert factors[3] == pytest.approx(0.1 + 0.9 * 0.5), "a quarter of the way, one minus its root"
    assert factors[-1] == pytest.approx(0.1)
    assert not last.is_over(10**6, 999)


@pytest.mark.parametrize(
    ("more", "why"),
    [
        (("--minutes", "5"), "--minutes cannot be used with --hours"),
        (("--self-tokens", "5"), "--self-tokens cannot be used with --hours"),
        (("--data", "chats.jsonl"), "there is no file chats.jsonl"),
        (("--states", "online"), "--states online cannot be used with --hours"),
        (("--hours", "-1"), "--hours must be at least 0"),
    ],
)
def test_settings_that_conflict_with_hours_are_refused(
    target: Target, tmp_path: Path, capsys: Any, more: tuple[str, ...], why: str
) -> None:
    assert main(["--target", target.name, "--output", str(tmp_path / "out"), "--hours", "1", *more]) == 2
    assert why in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []


def test_hours_ignores_a_recipes_data() -> None:
    flags = {"target": "mlx-community/Qwen3-8B-4bit", "hours": 8.0}
    config, recipe = new_run("", None, flags)
    assert recipe is not None
    assert config.data.is_self
    own, _ = new_run("", None, {**flags, "data": ["chats.jsonl"]})
    assert own.data.sources == ("chats.jsonl",)


def own_questions(folder: Path, count: int) -> Path:
    """Write conversations, one in three with a system prompt. Their answers are not the target's."""
    rows = [
        {
            "messages": [
                *([{"role": "system", "content": "Be brief."}] if number % 3 == 0 else []),
                {"role": "user", "content": f"question {number}"},
                {"role": "assistant", "content": "another model's answer"},
                {"role": "user", "content": "and then?"},
            ]
        }
        for number in range(count)
    ]
    file = folder / "mine.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return file


def test_hours_answers_the_users_questions_each_once(
    target: Target, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    data, out = own_questions(tmp_path, 20), tmp_path / "head"
    config = config_of(out, data=(str(data),), hours=HOURS / 2)
    report = train_for_hours(target, config, watch=Stopwatch(Clock(monkeypatch)))
    made = {file.stem: list(map(json.loads, file.read_text().splitlines())) for file in (out / "made").glob("*.jsonl")}
    assert len(made) >= 3
    first = {
        name: [next(m for m in row["messages"] if m["role"] == "user")["content"] for row in rows]
        for name, rows in made.items()
    }
    own = [text for texts in first.values() for text in texts if text.startswith("question ")]
    assert len(own) == len(set(own)) > 12, "each question once, and most of them"
    assert sum(map(len, first.values())) > len(own), "the target writes the others"
    keys = {Conversation((Message("user", f"question {number}"),)).prompt_key(): number for number in range(20)}
    held = {f"question {keys[key]}" for key in held_out_prompts(keys)}
    assert held.isdisjoint(text for name in first if name != "held-out" for text in first[name])
    assert held.intersection(first["held-out"])
    assert "another model" not in json.dumps(made)
    systems = {
        row["messages"][0]["content"]
        for rows in made.values()
        for row in rows
        if row["messages"][0]["role"] == "system"
    }
    assert systems == {"Be brief."}
    assert report["data"]["learned_tokens"] > 0


def test_data_without_questions_is_refused_with_hours(target: Target, tmp_path: Path) -> None:
    (tmp_path / "text.jsonl").write_text('{"text": "only text"}\n')
    config = config_of(tmp_path / "head", data=(str(tmp_path / "text.jsonl"),))
    with pytest.raises(DataError, match="no user turns; with --hours, the target answers"):
        train_for_hours(target, config)


def test_if_no_more_data_can_be_made_the_rest_of_the_time_goes_to_learning(
    target: Target, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock, make = Clock(monkeypatch), portions.Portions.make

    def fails(self: portions.Portions, number: int, *args: Any) -> int:
        if number:
            raise DataError("the target writes too little")
        return make(self, number, *args)

    monkeypatch.setattr(portions.Portions, "make", fails)
    report = train_for_hours(target, config_of(tmp_path / "head", hours=HOURS / 4), watch=Stopwatch(clock))
    assert [portion["tokens"] for portion in report["data"]["portions"]][1:] == [0]
    assert report["tokens"] > 3 * report["data"]["tokens"]


def test_from_the_command_line(target: Target, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    """The time is up at once, but the current phase is finished, trained on and measured. Such a head gains nothing."""
    out = tmp_path / "out"
    line = ["--target", target.name, "--output", str(out), "--hours", "0.00001", "--head", "eagle", "--length", "64"]
    assert main([*line, "--eval-prompts", "2", "--eval-tokens", "4", "--eval-depth", "2"]) == 0
    printed = capsys.readouterr()
    assert f"the head is in {out}/best" in printed.out
    report = json.loads((out / "report.json").read_text())
    assert len(report["data"]["portions"]) == 1, "no phase without time"
    assert f"no command offers it without --head {out}/best: its τ is below 1.05" in printed.err
    assert main(["--resume", str(out)]) == 2
    assert "is complete" in capsys.readouterr().err
