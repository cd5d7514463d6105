"""Made-up conversations depend only on the seed, not on batch, proposer or interruptions."""

from __future__ import annotations

import gzip
import json
import random
import re
import signal
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest

from eagle_mlx.data_pipelines import DataConfig, cli, read_conversations
from eagle_mlx.data_pipelines.conversation import Conversation, Message
from eagle_mlx.data_pipelines.jsonl import Done, partial_path
from eagle_mlx.data_pipelines.options import MakeConfig
from eagle_mlx.data_pipelines.sources.rows import parse_row
from eagle_mlx.data_pipelines.synthesis import (
    DOMAINS,
    Domain,
    choose_domains,
    find_user_place,
    read_domains,
    steerable,
)
from eagle_mlx.data_pipelines.synthesis import loop as loop_module
from eagle_mlx.data_pipelines.synthesis import tries as tries_module
from eagle_mlx.data_pipelines.synthesis.file import (
    FREE_TRIES,
    TRIES_A_ROW,
    MakeLimits,
    Selection,
    Wanted,
    make_to_file,
    prompt_keys,
)
from eagle_mlx.data_pipelines.synthesis.loop import LOOK
from eagle_mlx.data_pipelines.synthesis.tries import (
    MakeReport,
    Try,
    loops,
    loops_so_far,
    why_no_answer,
    why_no_question,
)
from eagle_mlx.engine import Engine
from eagle_mlx.errors import ConfigError, DataError, OutputError, TargetError
from eagle_mlx.policy import FixedPolicy
from eagle_mlx.proposers.head import HeadProposer
from eagle_mlx.request import Output
from eagle_mlx.target import Target
from tests.data_pipelines.templates import render, template_tokenizer
from tests.data_pipelines.test_template import ANALYSIS, CHANNELS, FINAL
from tests.fakes import interrupt_after, talking_target_folder, tiny_head, tiny_target
from tests.forks import Fork
from tests.full import in_full

ENDS = (2, *range(5, 4096, 7))
"""Tokens that end a turn, including the template's own: enough that a random model soon stops."""
DRAWN = choose_domains(["any", "code", "mathematics", "writing", "knowledge", "everyday"])
"""Named explicitly, so that a new domain does not change the conversations here."""
CONFIG = MakeConfig(
    seed=3, domains=DRAWN, turns=(0.2, 0.4, 0.4), user_tokens=30, max_tokens=12, temperatures=(0.0, 1.0)
)
ROWS = 6


def talker(seed: int = 0) -> Target:
    target = tiny_target(seed, tokenizer=True)
    assert target.tokenizer is not None
    target.tokenizer.eos_token_ids = set(ENDS)
    return target


@pytest.fixture(scope="module")
def target() -> Target:
    return talker()


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


def test_the_file_is_the_same_in_any_company(target: Target, whole: bytes, tmp_path: Path) -> None:
    rows = [json.loads(line) for line in whole.splitlines()]
    assert len(rows) == ROWS
    assert {row["domain"] for row in rows} <= {domain.name for domain in DRAWN}
    assert {len(row["messages"]) for row in rows} >= {2, 4}, "some speak more than once"
    for row in rows:
        assert [m["role"] for m in row["messages"]] == ["user", "assistant"] * (len(row["messages"]) // 2)
    reports = set()
    for number, engine in enumerate(engines(target)):
        path = tmp_path / f"{number}.jsonl"
        report = make_to_file(engine, CONFIG, Wanted(rows=ROWS), path)
        assert path.read_bytes() == whole
        assert report.tries - report.failed == ROWS
        assert report.answers == sum(len(row["messages"]) // 2 for row in rows)
        reports.add(str(report))
    assert len(reports) == 1
    assert len(list(tmp_path.iterdir())) == 3


def test_another_seed_is_another_file_and_more_rows_begin_alike(target: Target, whole: bytes, tmp_path: Path) -> None:
    more, other = tmp_path / "more.jsonl", tmp_path / "other.jsonl"
    make_to_file(Engine(target), CONFIG, Wanted(rows=ROWS + 3), more)
    assert more.read_bytes()[: len(whole)] == whole
    make_to_file(Engine(target), MakeConfig(seed=4, user_tokens=40, max_tokens=8), Wanted(rows=2), other)
    assert not set(other.read_bytes().splitlines()) & set(whole.splitlines())


def test_a_compressed_file_holds_the_same_rows_and_is_read(target: Target, whole: bytes, tmp_path: Path) -> None:
    files = [tmp_path / "a.jsonl.gz", tmp_path / "b.jsonl.gz"]
    for path in files:
        make_to_file(Engine(target), CONFIG, Wanted(rows=ROWS), path)
    assert files[0].read_bytes() == files[1].read_bytes()
    assert gzip.decompress(files[0].read_bytes()) == whole
    rows = [parse_row(json.loads(line), "x") for line in whole.splitlines()]
    for stream in (False, True):
        read = read_conversations(DataConfig((str(files[0]),), seed=None, stream=stream))
        assert list(read) == rows
        files[1].write_bytes(files[0].read_bytes()[:-20])
        with pytest.raises(DataError, match="b.jsonl.gz cannot be read"):
            list(read_conversations(DataConfig((str(files[1]),), seed=None, stream=stream)))


def test_tokens_end_it_at_the_row_that_reaches_them(target: Target, whole: bytes, tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    report = make_to_file(Engine(target), CONFIG, Wanted(tokens=150), path)
    kept = path.read_bytes()
    assert whole.startswith(kept)
    assert report.tokens >= 150
    fewer = make_to_file(Engine(target), CONFIG, Wanted(rows=len(kept.splitlines()) - 1), tmp_path / "b.jsonl")
    assert fewer.tokens < 150


def test_a_file_ends_where_there_is_enough(target: Target, whole: bytes, tmp_path: Path) -> None:
    """Running tries are finished and kept; a first batch always starts."""
    calls: list[tuple[int, int]] = []

    def enough(made: int, coming: int) -> bool:
        calls.append((made, coming))
        return True

    path = tmp_path / "a.jsonl"
    report = make_to_file(Engine(target, max_batch=3), CONFIG, Wanted(rows=100), path, limits=MakeLimits(enough=enough))
    assert whole.startswith(path.read_bytes())
    assert report.tries == 3
    assert report.tries - report.failed == len(path.read_bytes().splitlines()) > 0
    assert calls[0] == (0, 0)
    assert max(coming for _, coming in calls) > 0


def test_running_tries_stop_when_the_time_is_over(target: Target, whole: bytes, tmp_path: Path) -> None:
    """Turns with complete answers are kept; a file without any is refused."""
    path, engine = tmp_path / "a.jsonl", Engine(target, max_batch=3)
    with pytest.raises(DataError, match=r"7 stopped because time was up; allow more time"):
        make_to_file(engine, CONFIG, Wanted(rows=99), tmp_path / "b.jsonl", limits=MakeLimits(over=lambda made: True))
    report = make_to_file(engine, CONFIG, Wanted(rows=99), path, limits=MakeLimits(over=lambda made: made >= 90))
    assert 90 <= report.tokens
    assert report.late + report.shortened > 0
    rows = [json.loads(line)["messages"] for line in path.read_bytes().splitlines()]
    full = [json.loads(line)["messages"] for line in whole.splitlines()]
    assert all(row[-1]["role"] == "assistant" for row in rows)
    assert all(any(chat[: len(row)] == row for chat in full) for row in rows if row[0] in [chat[0] for chat in full])


def test_what_begins_like_others_is_left_out(target: Target, whole: bytes, tmp_path: Path) -> None:
    others, path = tmp_path / "others.jsonl", tmp_path / "a.jsonl"
    rows = whole.splitlines(keepends=True)
    others.write_bytes(rows[0] + rows[2])
    report = make_to_file(
        Engine(target), CONFIG, Wanted(rows=ROWS - 2), path, limits=MakeLimits(elsewhere=prompt_keys(others))
    )
    assert path.read_bytes() == whole.replace(rows[0], b"").replace(rows[2], b"")
    assert report.duplicates == 2


def test_an_interrupted_file_is_continued(
    target: Target, whole: bytes, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rng, path = random.Random(0), tmp_path / "a.jsonl"
    made = 0
    while not path.exists():
        rows = rng.randint(*in_full((1, 8), (8, 10)))
        with monkeypatch.context() as patch:
            interrupt_after(rows, Stop, patch)
            try:
                make_to_file(engines(target)[rng.randrange(3)], CONFIG, Wanted(rows=ROWS), path)
            except Stop:
                made += rows
                assert len(partial_path(path).read_bytes().splitlines()) == 1 + made, "every try once"
    assert made
    assert path.read_bytes() == whole
    assert list(tmp_path.iterdir()) == [path]


def test_other_settings_do_not_continue_a_file(target: Target, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "a.jsonl"
    with monkeypatch.context() as patch:
        interrupt_after(2, Stop, patch)
        with pytest.raises(Stop):
            make_to_file(Engine(target), CONFIG, Wanted(rows=ROWS), path)
    with pytest.raises(OutputError, match="was started with seed 3, not 5"):
        make_to_file(Engine(target), replace(CONFIG, seed=5), Wanted(rows=ROWS), path)
    other = talker(1)
    other.name = "other"
    named = rf"was started with target {re.escape(target.name)} '\w{{16}}', not other '\w{{16}}'"
    with pytest.raises(OutputError, match=named):
        make_to_file(Engine(other), CONFIG, Wanted(rows=ROWS), path)
    with pytest.raises(OutputError, match="was started with other domains; continue with the same options"):
        make_to_file(Engine(target), replace(CONFIG, domains=choose_domains(["code"])), Wanted(rows=ROWS), path)


def test_what_is_done_can_be_made_to_be_enough(
    target: Target, whole: bytes, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "a.jsonl"
    with monkeypatch.context() as patch:
        interrupt_after(6, Stop, patch)
        with pytest.raises(Stop):
            make_to_file(engines(target)[1], CONFIG, Wanted(rows=99), path)
    begun = max(json.loads(line.split(b"\t")[0])[0] for line in partial_path(path).read_bytes().splitlines()[1:])
    enough = MakeLimits(enough=lambda made, coming: True, first=False)
    report = make_to_file(engines(target)[1], CONFIG, Wanted(rows=99), path, limits=enough)
    assert report.tries == begun + 1, "no other try was begun"
    rows = path.read_bytes().splitlines()
    assert 0 < len(rows) <= ROWS
    assert rows == whole.splitlines()[: len(rows)]
    assert not list(tmp_path.glob("*.partial"))


def test_there_must_be_something_to_finish(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    argv = ["make", "--target", str(tmp_path), "--rows", "6", "--output", str(tmp_path / "a.jsonl"), "--finish"]
    assert cli.main(argv) == 2
    assert "a.jsonl.partial to finish; leave out --finish" in capsys.readouterr().err


def settle(selection: Selection, results: Sequence[tuple[int, int, bool]]) -> Selection:
    for number, key, kept in results:
        counts = MakeReport(tries=1, tokens=10 * kept, endless=not kept).counts()
        selection.add(number, Done(key, counts, b"row" * kept))
    return selection


def test_a_selection_depends_on_no_order() -> None:
    results = [(n, n % 5, n % 3 > 0) for n in range(30)]
    selections = set()
    for seed in range(20):
        shuffled = random.Random(seed).sample(results, len(results))
        chosen = settle(Selection(Wanted(rows=5)), shuffled)
        assert chosen.full
        selections.add((tuple(chosen.rows), str(chosen.report)))
    assert selections == {((1, 2, 4, 5, 8), str(MakeReport(tries=9, tokens=50, endless=3, duplicates=1)))}


def test_one_that_writes_nothing_usable_ends_with_the_counts() -> None:
    with pytest.raises(DataError, match=rf"0 of {FREE_TRIES + 1} tries; .* user turns without an"):
        settle(Selection(Wanted(rows=5)), [(n, n, False) for n in range(500)])
    with pytest.raises(DataError, match=rf"1 of {FREE_TRIES + TRIES_A_ROW + 1} tries; .* duplicates"):
        settle(Selection(Wanted(rows=5)), [(n, 1, True) for n in range(500)])


def test_a_target_that_never_ends_a_turn_is_told_of(tmp_path: Path) -> None:
    silent = tiny_target(tokenizer=True)
    with pytest.raises(DataError, match="too few tries are usable"):
        make_to_file(Engine(silent, max_batch=32), MakeConfig(user_tokens=4), Wanted(rows=1), tmp_path / "a.jsonl")
    assert not (tmp_path / "a.jsonl").exists()


@pytest.mark.parametrize(
    ("template", "why"),
    [
        ("{{ messages[0]['content'] | upper | replace('\ue0f0', '') }}", "changes, drops or repeats"),
        ("{{ messages[0]['content'] }} and {{ messages[0]['content'] }}", "changes, drops or repeats"),
        ("<{{ messages[0]['content'] | length }}>{{ messages[0]['content'] }}", "depends on them"),
        ("{{ raise_exception('no') }}", "it refuses the conversation: no"),
        ("{{ messages[0]['content'] }}", "it has no text before the user's words"),
    ],
)
def test_a_template_that_cannot_be_opened_is_named(template: str, why: str) -> None:
    target = tiny_target(tokenizer=True)
    assert target.tokenizer is not None
    target.tokenizer.chat_template = template
    with pytest.raises(TargetError, match=f"with the chat template of M: .*{why}.*regenerate --data"):
        find_user_place(target.tokenizer, [], "M")


def test_the_place_of_the_user_has_all_in_front_of_it_and_what_ends_it() -> None:
    tokenizer = tiny_target(tokenizer=True).tokenizer
    assert tokenizer is not None
    messages = [Message("user", "first words"), Message("assistant", "an answer")]
    place = find_user_place(tokenizer, messages, "M")
    shown = tokenizer.decode(list(place.tokens))
    assert "first words" in shown
    assert "an answer" in shown
    whole = tokenizer.apply_chat_template(
        [*(m.as_dict() for m in messages), {"role": "user", "content": "zzz"}], tokenize=False
    )
    assert whole.startswith(shown + "zzz")
    assert place.stop_token_ids or place.stop
    tokenizer.chat_template = (
        "{% for m in messages %}[{{ m['role'] }}] {{ m['content'] }}{% endfor %}{% if add_generation_prompt %}"
        " ### Answer:{% endif %}"
    )
    place = find_user_place(tokenizer, [], "M")
    assert (tokenizer.decode(list(place.tokens)), place.stop) == ("[user]", ("### Answer:",))


def test_domains_that_a_template_cannot_steer_to_are_left_out() -> None:
    tokenizer = tiny_target(tokenizer=True).tokenizer
    assert tokenizer is not None
    tokenizer.chat_template = (
        "{% for m in messages %}{% if m['role'] == 'system' %}{{ raise_exception('no system') }}{% endif %}"
        "<{{ m['role'] }}>{{ m['content'] }}{% endfor %}"
    )
    plain, opened = Domain("any", 1.0), Domain("facts", 2.0, "facts", ("Who", "When"))
    assert steerable(tokenizer, (plain, Domain("code", 1.0, "code"), opened), "M") == (
        plain,
        replace(opened, system=""),
    )
    with pytest.raises(TargetError, match="no system"):
        steerable(tokenizer, (Domain("code", 1.0, "code"),), "M")


def test_a_first_turn_begins_with_one_of_the_openings(target: Target, tmp_path: Path) -> None:
    openings = ("Who wrote", "Translate into English:", "Anna has 3")
    config = replace(
        CONFIG, seed=in_full(3, 5), domains=(Domain("begun", 1.0, "system words", openings), Domain("any", 1.0))
    )
    count, batch = in_full((24, 5), (14, 14))
    make_to_file(Engine(target, max_batch=batch), config, Wanted(rows=count), tmp_path / "own.jsonl")
    rows = [json.loads(line)["messages"] for line in (tmp_path / "own.jsonl").read_text().splitlines()]
    begun = [row for row in rows if row[0]["content"].startswith(openings)]
    assert {o for o in openings for row in begun if row[0]["content"].startswith(o)} == set(openings)
    assert 0 < len(begun) < len(rows)
    assert all(row[0]["content"] not in openings for row in begun)
    assert not any(m["content"].startswith(openings) for row in rows for m in row[1:])


def test_an_opening_is_read_as_the_template_would_have_it() -> None:
    tokenizer = tiny_target(0, tokenizer=True).tokenizer
    assert tokenizer is not None
    closed = find_user_place(tokenizer, [], "M", "Who wrote")
    opened = find_user_place(tokenizer, [], "M")
    whole = tokenizer.apply_chat_template([{"role": "user", "content": "Who wrote it?"}], tokenize=False)
    before, words, _ = whole.partition("Who wrote")
    assert tokenizer.decode(list(closed.tokens)) == before + words
    assert (closed.stop_token_ids, closed.stop) == (opened.stop_token_ids, opened.stop)


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("", "must have domains"),
        ("- code", "must have domains"),
        ("code: 2", "code: needs keys such as `weight: 2`"),
        ("code: {weight: 0}", "code: --weight must be above 0"),
        ("code: {weight: many}", "code: --weight must be a number"),
        ("code: {weight: .inf}", "code: --weight must be a finite number"),
        ("code: {wait: 1}", "code: unknown setting 'wait'; did you mean 'weight'?"),
        ("code: {system: [a]}", "code: --system must be text"),
        ("code: {openings: []}", "code: openings must have at least one text"),
        ("code: {openings: [[Who]]}", "code: --openings must be a list, each text"),
        ("code: [", "cannot be read as YAML"),
        ("code: {weight: 1}\ncode: {weight: 2}", "'code' appears twice"),
    ],
)
def test_a_file_of_domains_that_cannot_be_used_is_named(text: str, why: str, tmp_path: Path) -> None:
    file = tmp_path / "mine.yaml"
    file.write_text(text)
    with pytest.raises(ConfigError, match=f"mine.yaml.*{re.escape(why)}"):
        read_domains(file)


def test_domains_of_ones_own(target: Target, tmp_path: Path) -> None:
    file = tmp_path / "mine.yaml"
    with pytest.raises(ConfigError, match="there is no file of domains"):
        read_domains(file)
    file.write_text("trains:\n  weight: 3\n  openings: [When does]\nany: {}\n")
    assert read_domains(file) == (Domain("trains", 3, openings=("When does",)), Domain("any", 1.0))
    assert choose_domains(["trains=1"], file) == (Domain("trains", 1.0, openings=("When does",)),)


@pytest.mark.parametrize(
    ("text", "ended", "why"),
    [
        ("How do I sort a list in Python?", True, None),
        ("How do I sort a list", False, "endless"),
        ("Hi", True, "short"),
        ("I'm sorry, but I cannot help with that.", True, "no_user"),
        ("Sure, here is a poem about the sea.", True, "no_user"),
        ("I can't open the jar of jam, what now?", True, None),
        ("Surely there is a way to sort faster?", True, None),
    ],
)
def test_what_a_user_says(text: str, ended: bool, why: str | None) -> None:
    assert why_no_question(text, range(40), ended, ()) == why


def test_the_tags_between_the_parts_of_an_answer_are_no_markup(target: Target) -> None:
    """In gpt-oss, special tokens stand between thoughts and answer; a target may not write them within a part."""
    tokenizer = template_tokenizer(CHANNELS, ["<|end|>"])
    for thought, usable in (("Sun", True), ("Sun<|message|>", False)):
        text = f"{ANALYSIS}{thought}<|end|><|start|>assistant{FINAL}Warm."
        config = MakeConfig(questions=(("", "Warm?"),), turns=(1.0,))
        made = Try(Engine(target), config, 0, tokenizer, steerable(target.tokenizer, config.domains, "tiny"))
        tokens = tokenizer.encode(text, add_special_tokens=False)
        output = Output(text, tokens, "stop", 5, 1, 0, 0, [], [])
        made.take(SimpleNamespace(request=SimpleNamespace(stop_ids=())), output)  # type: ignore[arg-type]
        conversation, _ = made.result()
        assert (conversation is not None) == usable
        if conversation is not None:
            assert conversation.messages[-1] == Message("assistant", "Warm.", {"thinking": thought})
            assert made.report.markup == 0


def test_loops_special_tokens_and_refusals() -> None:
    assert why_no_question("a b c d", [1, 2] * 20, True, ()) == "question_loops"
    assert why_no_question("a b c d", [1, 2, 3], True, {3}) == "markup"
    assert why_no_answer("a b c d", [1, 2] * 20, ()) == "answer_loops"
    assert why_no_answer(" \n", [1], ()) == "silent"
    assert why_no_answer("a", [1, 9], {9}) == "markup"
    assert why_no_answer("As an AI language model, I cannot", range(9), ()) == "refusals"
    assert why_no_answer("The answer is 4.", range(9), ()) is None


def test_a_loop_is_found_while_it_is_written_and_stays_one() -> None:
    """A text is given up early if and only if it would be left out at the end."""
    good = list(range(LOOK))
    late = [*good, *([1, 2, 3] * LOOK)][: 3 * LOOK]
    assert [loops_so_far(late[:count]) for count in (LOOK, 2 * LOOK - 1, 2 * LOOK)] == [False, False, True]
    assert loops([*good, *([1, 2] * LOOK)[:LOOK], *range(1000, 1000 + 20 * LOOK)]), "the rest is of no help"
    assert not loops(range(2000))
    assert not loops_so_far([1, 2] * 20)


def test_loops_are_not_written_to_their_end(
    tmp_path: Path, positions_read: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The conversations are the same as with checks only at the end, with fewer forwards."""
    monkeypatch.setattr(tries_module, "LOOK", 8)
    target = talker()
    assert target.tokenizer is not None
    target.tokenizer.eos_token_ids = {2, *range(5, 4096, 25)}  # fewer ends, longer turns
    greedy = replace(CONFIG, user_tokens=64, max_tokens=64, temperatures=(0.0,), turns=(1.0,))
    reports, read = [], []
    for number, look in enumerate((1000, 8, 8)):
        monkeypatch.setattr(loop_module, "LOOK", look)
        engine = engines(target)[2] if number == 2 else Engine(target, max_batch=in_full(1, 2))
        positions_read.clear()
        reports.append(make_to_file(engine, greedy, Wanted(rows=2), tmp_path / f"{number}.jsonl"))
        read.append(sum(positions_read))
        assert (tmp_path / f"{number}.jsonl").read_bytes() == (tmp_path / "0.jsonl").read_bytes()
    assert reports[0] == reports[1] == reports[2]
    assert reports[0].answer_loops, "some loop"
    assert read[1] < 0.9 * read[0]


def test_bad_wishes_are_named() -> None:
    with pytest.raises(ConfigError, match="--domain cods: the domains are any, code"):
        choose_domains(["cods"])
    with pytest.raises(ConfigError, match="--domain code=0: a weight must be a number above 0"):
        choose_domains(["code=0"])
    assert [(d.name, d.weight) for d in choose_domains(["code=3", "any"])] == [
        ("code", 3.0),
        ("any", DOMAINS[0].weight),
    ]
    for wanted in ({}, {"rows": 1, "tokens": 1}):
        with pytest.raises(ConfigError, match="--rows N or --tokens N"):
            Wanted(**wanted)
    with pytest.raises(ConfigError, match="turns"):
        MakeConfig(turns=(0.0, 0.0))
    with pytest.raises(ConfigError, match="temperature"):
        MakeConfig(temperatures=(-1.0,))


def test_a_target_without_a_tokenizer_is_refused(tmp_path: Path) -> None:
    with pytest.raises(TargetError, match="tiny has no tokenizer"):
        make_to_file(Engine(tiny_target()), CONFIG, Wanted(rows=1), tmp_path / "a.jsonl")


KILLED = """
import os, signal, sys
from eagle_mlx.data_pipelines import cli
from eagle_mlx.data_pipelines.jsonl import PartialFile

add, count = PartialFile.add, 0

def counted(self, index, key, counts, row):
    global count
    count += 1
    if count == 5:
        self._file.write(b"[7, 12")  # and dies while it writes
        self._file.flush()
        os.kill(os.getpid(), signal.SIGKILL)
    add(self, index, key, counts, row)

PartialFile.add = counted
sys.exit(cli.main(sys.argv[1:]))
"""


def test_the_command_goes_on_after_a_kill_and_tells_what_it_made(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    model = talking_target_folder(tmp_path / "tiny")
    out, straight = tmp_path / "a.jsonl", tmp_path / "b.jsonl"
    argv = ["make", "--target", str(model), "--rows", "6", "--max-tokens", "8", "--user-tokens", "40"]
    killed = [*argv, "--output", str(out)]
    ended = Fork("-c", KILLED, *killed, "--batch", "3")
    _, errors = ended.communicate(120)
    assert ended.returncode == -signal.SIGKILL, errors
    assert not out.exists()
    assert cli.main(killed) == 0
    printed = capsys.readouterr().out
    assert "6 conversations of " in printed
    assert " tries, " in printed
    assert cli.main([*argv, "--output", str(straight), "--batch", "2"]) == 0
    assert out.read_bytes() == straight.read_bytes()
    assert cli.main([*argv, "--output", str(straight)]) == 2, "it is there already"
    assert cli.main(["inspect", str(out), "--target", str(model)]) == 0


def test_made_rows_render(target: Target, whole: bytes) -> None:
    assert target.tokenizer is not None
    for line in whole.splitlines():
        conversation = parse_row(json.loads(line), "x")
        assert isinstance(conversation, Conversation)
        assert any(render(target.tokenizer, conversation).loss_mask)
