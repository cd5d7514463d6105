"""eagle-train --adapt: a head stays byte for byte unless the judge finds the adapted one better."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest

from eagle_mlx.catalog.head_search import records
from eagle_mlx.data_pipelines import Conversation, MakeConfig, Message
from eagle_mlx.formats.tensors import HeadFolder, weights_of
from eagle_mlx.heads import KINDS, layout_of, load_head
from eagle_mlx.heads.precision import quantize
from eagle_mlx.target import load_target
from eagle_mlx.train.adaptation import Adaptation
from eagle_mlx.train.cli import main
from eagle_mlx.train.config import EvaluationConfig, TrainConfig
from eagle_mlx.train.data import answer_prompts, heldout_prompts, training_data
from eagle_mlx.train.distributed import SINGLE_PROCESS
from eagle_mlx.train.kinds import KINDS as TRAINED
from eagle_mlx.train.kinds import choose_trained, merged, resolve
from eagle_mlx.train.publish import CardOptions
from eagle_mlx.train.publish.bundle import read_source
from eagle_mlx.train.publish.card import make_card
from tests.eagle_mlx.heads import dflash, dflash2, dspark, eagle, eagle3, mtp, peagle
from tests.fakes import talking_target_folder, tiny_target, tiny_target_folder
from tests.full import in_full
from tests.train.test_resume import stop_at

HEADS: dict[str, Callable[..., Any]] = {
    "eagle3": lambda target: eagle3(target, draft_vocab=512),
    "eagle": eagle,
    "peagle": peagle,
    "mtp": mtp,
    "dspark": dspark,
    "dflash": dflash,
    "dflash2": dflash2,
}
_NORMED, _VOCAB = {"norm_output": True}, {"draft_vocab_size": 512, "own_lm_head": True}
LAYOUTS: dict[str, Callable[..., Any]] = {
    "eagle3/speculators": lambda target: eagle3(target, draft_vocab=512, own_embedding=True),
    "peagle/speculators": lambda target: peagle(target, own_embedding=True, fc_norm=True, norm_output=True),
    "mtp/speculators": lambda target: mtp(target, **_NORMED),
    "dflash/speculators": dflash,
    "dspark/speculators": lambda target: dspark(target, **_VOCAB),
    "dspark/specforge": dspark,
    **{f"{kind}/{KINDS[kind].formats[0].name}": make for kind, make in HEADS.items()},
}
SIZES = (
    "--length",
    "64",
    "--max-length",
    "64",
    "--rows",
    "2",
    "--eval-depth",
    "2",
    "--eval-tokens",
    in_full("16", "8"),
)
LEARNS = ("--lr", "2e-2", "--max-steps", in_full("200", "30"))
STAYS = ("--lr", "1e-12", "--max-steps", "1")


def written(target: Path, kind: str, folder: Path, bits: int | None = None, dtype: mx.Dtype = mx.bfloat16) -> Path:
    """Write a random head. kind: with a layout after a slash, if it is not the first."""
    model, (name, _, layout) = load_target(str(target)), kind.partition("/")
    head = (LAYOUTS[kind] if layout else HEADS[name])(model)
    if bits is not None:
        quantize(head, bits, 32)
    head.attach(model)
    of_kind = KINDS[name].formats
    more = {"base_model": "owner/base", "depth": 4} if layout == "speculators" else {}
    form = next(form for form in of_kind if form.name == (layout or of_kind[0].name))
    form.save(head, folder, target_name="owner/tiny", dtype=dtype, **more)
    return folder


def files(folder: Path) -> dict[str, bytes]:
    return {file.name: file.read_bytes() for file in folder.iterdir()}


def adapt(target: Path, head: Path, data: Path, out: Path, *more: str) -> int:
    own = ["--adapt", str(head), "--data", str(data), "--replay", str(data), "--output", str(out)]
    return main(["--target", str(target), *own, *SIZES, *more])


def report_of(out: Path) -> dict[str, Any]:
    report: dict[str, Any] = json.loads((out / "report.json").read_text())
    return report


@pytest.fixture(autouse=True)
def _own_register(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("EAGLE_MLX_CACHE", str(tmp_path / "cache"))


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    file = tmp_path_factory.mktemp("data") / "mine.jsonl"
    rows = [{"prompt": f"add {i} to it", "completion": f"def f(x): return x + {i}"} for i in range(120)]
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return file


@pytest.fixture(scope="module")
def few(data: Path) -> Path:
    """Return prompts to judge by."""
    file = data.with_name("few.jsonl")
    file.write_text("".join(data.read_text().splitlines(keepends=True)[:8]))
    return file


def test_every_kind_that_can_be_trained_can_be_adapted() -> None:
    assert HEADS.keys() == TRAINED.keys()


@pytest.mark.parametrize("kind", in_full(list(HEADS), ["mtp", "dspark"]))
def test_a_better_head_is_taken(target: Path, data: Path, tmp_path: Path, capsys: Any, kind: str) -> None:
    head, out = written(target, kind, tmp_path / "head"), tmp_path / "out"
    before = files(head)
    assert adapt(target, head, data, out, *LEARNS) == 0
    report, last = report_of(out), capsys.readouterr().out.splitlines()[-1]
    adapted, own = report["adapted"], report["adapted"]["own"]
    assert (adapted["verdict"], adapted["taken"], adapted["from"], report["kind"]) == ("better", True, "head", kind)
    assert own["low"] > 0
    assert own["conversations"] + own["left_out"] == 12
    assert own["acceptance_lengths"] == pytest.approx([1.0, report["acceptance_length"]], abs=0.1)
    assert adapted["others"]["conversations"] > 6
    assert last.partition(" s, ")[2].startswith(f"the adapted head is better than {head}: τ 1.0")
    assert files(out / "best") == files(out / "last")
    assert files(head) == before
    assert [record.head for record in records()] == [str(out / "best")]
    text = str(make_card(read_source(out), "owner/mine", "owner/tiny", CardOptions(license="mit"), []))
    assert f"| adapted from | head: {adapted['summary']} |" in text
    assert "eagle-train --target owner/tiny --adapt head --data mine.jsonl --replay mine.jsonl" in text


@pytest.mark.parametrize("kind", in_full(list(HEADS), ["dflash2"]))
def test_a_head_that_is_not_better_stays(target: Path, data: Path, tmp_path: Path, capsys: Any, kind: str) -> None:
    head, out = written(target, kind, tmp_path / "head", dtype=mx.float16), tmp_path / "out"
    assert adapt(target, head, data, out, *STAYS) == 0
    printed = capsys.readouterr()
    adapted, last = report_of(out)["adapted"], printed.out.splitlines()[-1]
    assert (adapted["verdict"], adapted["taken"], adapted["own"]["gain"]) == ("not told apart", False, 0.0)
    assert re.search(r"^only \d+ of \d+ conversations were learned; allow more --hours", printed.err, re.MULTILINE)
    assert last.partition(" s, ")[2].startswith(f"the adapted head is not told apart from {head}: τ 1.")
    assert f"{out}/best is {head} as it was, and {out}/last the adapted one" in last
    assert "would probably have been told" in last or "prompts more would tell a difference of 1.0%" in last
    assert files(out / "best") == files(head)
    assert records() == []
    shown = str(make_card(read_source(out), "owner/mine", "owner/tiny", CardOptions(license="mit"), []))
    assert "| adapted from | head, which it is, unchanged: the result was not better. τ 1." in shown


@pytest.mark.parametrize("kind", LAYOUTS)
def test_a_candidate_has_the_layout_of_its_head(target: Path, tmp_path: Path, kind: str) -> None:
    folder = written(target, kind, tmp_path / "head", dtype=mx.float16)
    model, was = load_target(str(target)), HeadFolder.read(folder)
    assert layout_of(was)[1].name == kind.rpartition("/")[2]
    adaptation = Adaptation("head", model, EvaluationConfig(), was, layout_of(was)[1], (), ())
    adaptation.save(load_head(folder, model), tmp_path / "out", "owner/tiny", {}, TrainConfig())
    made = HeadFolder.read(tmp_path / "out")
    assert layout_of(made)[1].name == layout_of(was)[1].name
    assert made.tensors.keys() == was.tensors.keys()
    assert {name: x.dtype for name, x in made.tensors.items()} == {name: x.dtype for name, x in was.tensors.items()}
    ours = {"eagle_mlx": None, "torch_dtype": None}
    assert {**made.config, **ours} == {**was.config, **ours}
    assert made.config["eagle_mlx"]["adapted_from"] == "head"


@pytest.mark.parametrize("kind", in_full(list(HEADS), ["dflash"]))
def test_additions_of_low_rank_are_merged_into_a_quantized_head(
    target: Path, data: Path, tmp_path: Path, kind: str
) -> None:
    """The candidate is quantized as the head is, and its norms are those of the head."""
    head, out = written(target, kind, tmp_path / "head", bits=8), tmp_path / "out"
    assert adapt(target, head, data, out, "--lr", "1e-2", "--max-steps", "3", "--lora-rank", "2") == 0
    made, was = (HeadFolder.read(folder).tensors for folder in (out / "last", head))
    assert {name: x.shape for name, x in made.items()} == {name: x.shape for name, x in was.items()}
    changed = {name for name in made if not mx.array_equal(made[name], was[name])}
    assert changed
    assert not [name for name in changed if "norm" in name or name in ("d2t", "t2d")]
    assert load_head(out / "last", load_target(str(target))).config.quantization == {"group_size": 32, "bits": 8}


@pytest.mark.parametrize("rank", [0, 2])
def test_the_result_is_midway_between_the_head_and_what_was_learned(rank: int) -> None:
    target = tiny_target()
    before, head = weights_of(eagle3(target)), eagle3(target, seed=7)
    head.attach(target)
    learned = weights_of(head)
    given = TrainConfig.of(target="t", adapt="h", init_from="h", data=("d",), lora_rank=rank)
    choose_trained(head, resolve(given, target.hidden_size))
    mean = weights_of(merged(head, before))
    assert mean.keys() == before.keys()
    for name, value in mean.items():
        assert mx.allclose(value, (before[name] + learned[name]) / 2, atol=1e-6)
    assert any(not mx.array_equal(mean[name], before[name]) for name in mean)
    assert all(mx.array_equal(learned[name], value) for name, value in weights_of(merged(head)).items())


def test_the_target_answers_prompts_and_writes_what_must_not_be_forgotten(
    tmp_path: Path, few: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    """Files of an earlier run are used again, unless the prompts have changed."""
    monkeypatch.setattr(MakeConfig, "max_tokens", 32)
    target, prompts, out = talking_target_folder(tmp_path / "target"), tmp_path / "ask.jsonl", tmp_path / "out"
    head = written(target, "eagle3", tmp_path / "head")
    questions = [Conversation((Message("user", f"question {number}"),)) for number in range(70)]
    prompts.write_text("".join(json.dumps(question.as_row()) + "\n" for question in questions))
    line = ["--target", str(target), "--adapt", str(head), "--prompts", str(prompts), *SIZES, *STAYS]
    assert main([*line, "--output", str(out)]) == 2
    assert re.search(r"prompts loop, but the judge needs 6 others; use --eval", capsys.readouterr().err)
    line += ["--eval-data", str(few)]
    assert main([*line, "--output", str(out)]) == 0
    report = report_of(out)
    answers = [json.loads(row)["messages"] for row in Path(f"{out}.self.jsonl").read_text().splitlines()]
    assert 5 < len(answers) <= 70, "without those that loop"
    assert all([message["role"] for message in messages] == ["user", "assistant"] for messages in answers)
    replayed = report["data"]["replayed_tokens"]
    assert 0 < report["data"]["tokens"] - replayed <= replayed < 2 * report["data"]["tokens"]
    assert report["data"]["prompts_held_out"]
    capsys.readouterr()
    assert main([*line, "--output", str(out), "--overwrite"]) == 0
    assert capsys.readouterr().err.count("used as it is") == 2
    prompts.write_text(prompts.read_text().replace("question 3", "problem 3"))
    assert main([*line, "--output", str(out), "--overwrite"]) == 2
    assert re.search(r"was made with prompts '\w{16}', not '\w{16}'; move it away", capsys.readouterr().err)


@pytest.fixture
def ask(tmp_path: Path) -> Path:
    file = tmp_path / "ask.jsonl"
    file.write_text("".join(json.dumps({"prompt": f"question {number}"}) + "\n" for number in range(300)))
    return file


def test_hours_limit_the_whole_run(
    tmp_path: Path, ask: Path, few: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    """Without time, the prompts of the first batch are answered, a conversation is made up, and the run learns for a
    second."""
    monkeypatch.setattr(MakeConfig, "max_tokens", 32)
    target, out = talking_target_folder(tmp_path / "target"), tmp_path / "out"
    head = written(target, "eagle", tmp_path / "head")
    line = ["--target", str(target), "--adapt", str(head), "--prompts", str(ask), "--eval-data", str(few)]
    assert main([*line, "--output", str(out), *SIZES, "--hours", "0.0001"]) == 0
    report, told = report_of(out), capsys.readouterr().err
    assert (report["config"]["minutes"], report["data"]["conversations"] > 0) == (1 / 60, True)
    assert report["data"]["replayed_tokens"] > 0
    assert report["adapted"]["from"] == "head"
    assert "time: 0:00:00 at most: the target answers the prompts until 0:00:00, the target writes conv" in told
    assert re.search(r"are trained; learning rate [\d.]+, loss soft$", told, re.MULTILINE)
    [left] = re.findall(r"no time was left for (\d+) prompts", told)
    assert 200 < int(left) <= 268, "a batch of 32 was answered, and what began while it was"


def test_hours_limit_what_the_target_makes_up(tmp_path: Path, few: Path, capsys: Any) -> None:
    target, out = talking_target_folder(tmp_path / "target"), tmp_path / "out"
    head = written(target, "eagle", tmp_path / "head")
    line = ["--target", str(target), "--adapt", str(head), "--data", "self", "--self-tokens", "10000000"]
    assert main([*line, "--output", str(out), *SIZES, "--hours", "0.0001", "--eval-data", str(few)]) == 0
    assert report_of(out)["data"]["tokens"] < 100_000
    assert "time: 0:00:00 at most: the target writes conversations until 0:00:00, the head" in capsys.readouterr().err


def test_held_out_prompts_are_not_answered_and_judge_even_without_time(
    tmp_path: Path, ask: Path, data: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(MakeConfig, "max_tokens", 16)
    folder = talking_target_folder(tmp_path / "target")
    target, head, out = load_target(folder), written(folder, "eagle", tmp_path / "head"), tmp_path / "out"
    files = {"prompts": (str(ask),), "replay": (str(data),), "output": str(out)}
    given = TrainConfig.of(target=str(folder), adapt=str(head), head="eagle", **files)
    config = resolve(given, target.hidden_size)
    answer_prompts(target, config, load_head(head, target), SINGLE_PROCESS, lambda: True)
    answered = {
        json.loads(line)["messages"][0]["content"] for line in Path(f"{out}.self.jsonl").read_text().splitlines()
    }
    learned, judged = training_data(target, config, most=0), heldout_prompts(target, config)
    assert answered
    assert learned.place == "online", "there is no time to capture all conversations"
    assert len(judged.tokens) == 30, "one in ten of 300"
    assert judged.keys.isdisjoint(learned.samples.keys)
    assert judged.facts(learned.samples.keys)["prompts_held_out"]


def test_prompts_of_several_turns_are_judged_by_the_first(tmp_path: Path) -> None:
    file, folder = tmp_path / "turns.jsonl", tiny_target_folder(tmp_path / "target")
    call = {"tool_calls": [{"function": {"name": "f", "arguments": {}}}]}
    turns = [
        ("system", "rules"),
        ("user", "question"),
        ("assistant", "call"),
        ("tool", "result"),
        ("assistant", "answer"),
        ("user", "again"),
    ]
    rows = [
        [{"role": role, "content": f"{word} {row}", **(call if word == "call" else {})} for role, word in turns]
        for row in range(20)
    ]
    file.write_text("".join(json.dumps({"messages": messages}) + "\n" for messages in rows))
    target = load_target(folder)
    config = resolve(TrainConfig.of(target=str(folder), adapt="head", init_from="head", prompts=(str(file),)), 32)
    prompts = [target.tokenizer.decode(tokens) for tokens in heldout_prompts(target, config).tokens]
    assert prompts
    assert all("result" in text and "answer" not in text for text in prompts)


def test_a_resumed_run_comes_to_the_same_verdict(
    target: Path, data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    head, line = written(target, "eagle3", tmp_path / "head"), ("--max-steps", "3", "--lr", "1e-2")
    assert adapt(target, head, data, tmp_path / "whole", *line) == 0
    out = tmp_path / "out"
    with monkeypatch.context() as patch:
        stop_at(patch, 3)
        assert adapt(target, head, data, out, *line) == 143
    assert files(out / "best") == files(head)
    kept = files(head)
    written(target, "mtp", tmp_path / "other")
    for name, content in files(tmp_path / "other").items():
        (head / name).write_bytes(content)
    assert main(["--resume", str(out)]) == 2
    for name, content in kept.items():
        (head / name).write_bytes(content)
    assert main(["--resume", str(out)]) == 0
    assert files(out / "last") == files(tmp_path / "whole" / "last")
    assert report_of(out)["adapted"] == report_of(tmp_path / "whole")["adapted"]


@pytest.mark.parametrize(
    ("more", "message"),
    [
        (("--adapt", "no/such", "--data", "DATA"), "no/such is not a local folder"),
        (("--adapt", "HEAD"), "--adapt needs prompts: name files with --prompts"),
        (("--adapt", "HEAD", "--prompts", "FEW"), "5 prompts held out, but the judge needs at least 6; give more than"),
        (("--adapt", "HEAD", "--data", "FEW"), "5 prompts held out, but the judge needs at least 6"),
        (("--adapt", "HEAD", "--data", "DATA", "--eval-data", "ONE"), "1 prompt held out, but the judge needs"),
        (
            ("--adapt", "HEAD", "--data", "DATA", "--eval-data", "ONE", "--keep-tokens", ":64"),
            "1 prompt held out, but the judge needs",
        ),
        (("--adapt", "HEAD", "--data", "DATA", "--eval-prompts", "5"), "--eval-prompts 5: the judge needs at least 6"),
        (("--adapt", "HEAD", "--data", "DATA", "--prompts", "DATA"), "--prompts and --data are both given"),
        (("--adapt", "HEAD", "--data", "DATA", "--init-from", "x"), "leave --init-from out"),
        (("--adapt", "HEAD", "--data", "DATA", "--shards", "x"), "give them with --data or --prompts"),
        (
            ("--adapt", "HEAD", "--data", "DATA", "--hours", "1", "--minutes", "1"),
            "leave --minutes and --max-steps out",
        ),
        (("--adapt", "HEAD", "--data", "DATA", "--replay", "no.jsonl"), "no.jsonl"),
        (("--adapt", "WIDE", "--data", "DATA", "--replay", "DATA"), "head WIDE expects a target of hidden size 16"),
        (("--data", "DATA", "--replay", "DATA"), "--replay belongs to --adapt"),
        (("--prompts", "DATA"), "--prompts belongs to --adapt"),
    ],
)
def test_what_cannot_be_adapted_is_refused_with_a_remedy(
    target: Path, data: Path, tmp_path: Path, capsys: Any, more: tuple[str, ...], message: str
) -> None:
    rows = data.read_text().splitlines(keepends=True)
    names = {"DATA": str(data), **{name: str(tmp_path / name.lower()) for name in ("HEAD", "WIDE")}}
    for name, count in (("FEW", 50), ("ONE", 1)):
        names[name] = str(tmp_path / f"{name}.jsonl")
        Path(names[name]).write_text("".join(rows[:count]))
    written(target, "eagle3", Path(names["HEAD"]))
    if "WIDE" in more:
        written(tiny_target_folder(tmp_path / "narrow", hidden=16), "eagle3", Path(names["WIDE"]))
    line = [names.get(word, word) for word in more]
    message = message.replace("WIDE", names["WIDE"])
    assert main(["--target", str(target), "--output", str(tmp_path / "out"), *SIZES, *line]) == 2
    assert message in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(("kind", "drafts"), [("mtp", "4,096"), ("eagle3", "512")])
def test_a_dry_run_shows_the_head_and_the_prompts(
    target: Path, data: Path, tmp_path: Path, capsys: Any, kind: str, drafts: str
) -> None:
    head = written(target, kind, tmp_path / "head")
    line = ["--target", str(target), "--adapt", str(head), "--prompts", str(data), "--hours", "2", *SIZES]
    assert main([*line, "--dry-run"]) == 0
    shown = " ".join(capsys.readouterr().out.split())
    assert f"head {KINDS[kind].title}, " in shown
    assert f"drafts {drafts} of 4,096 tokens" in shown
    assert f"adapts {head}, if the judge finds the result better" in shown
    assert "108 prompts with answers of 500, assumed, and as many of older conversations" in shown
    assert re.search(r"learning rate [\d.]+, loss soft ", shown)
    assert (
        "limit 2:00:00 at most: the target answers the prompts until 0:40:00, the target writes conversations" in shown
    )
