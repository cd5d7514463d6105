"""Settings that are declared once and filled by command lines; and how commands end."""

from __future__ import annotations

import os
import re
import shlex
import signal
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

import pytest

from eagle_mlx.command import Parser, Stop, Stopped, Subcommands, exit_code, read
from eagle_mlx.errors import ConfigError, EagleError
from eagle_mlx.setting import AT_LEAST_1, REQUIRED, Group, find, setting, settings_of


@dataclass(frozen=True)
class Inner(Group):
    """An inner group."""

    sizes: tuple[int, ...] = setting((1,), "sizes", AT_LEAST_1)
    texts: tuple[str, ...] = setting((), "texts", metavar="TEXT", repeat=True)
    keep: bool = setting(True, "whether it is kept")
    bits: Literal[4, 8] | None = setting(None, "bits", also=("few_bits",))


@dataclass(frozen=True, kw_only=True)
class Outer(Group):
    """An outer group."""

    place: Path = setting(REQUIRED, "where", positional=True)
    rows: int = setting(3, "rows", AT_LEAST_1, name="max_rows")
    share: float | None = setting(None, "share")
    plan: str | None = setting(None, "a plan", bare="own")
    force: bool = setting(False, "do it")
    inner: Inner = field(default_factory=Inner)

    def _check(self) -> None:
        if self.force and self.rows > 8:
            raise ConfigError("--force is for few rows")


def parsed(*argv: str) -> Outer:
    return read(Outer, argv, "outer", "about")


def test_flags_fill_groups_within_groups() -> None:
    assert parsed("x") == Outer(place=Path("x"))
    given = "x --max-rows 5 --share 1 --plan --force --sizes 2 3 --texts a --texts b --no-keep --few-bits 8"
    inner = Inner(sizes=(2, 3), texts=("a", "b"), keep=False, bits=8)
    assert parsed(*given.split()) == Outer(place=Path("x"), rows=5, share=1.0, plan="own", force=True, inner=inner)
    assert parsed("x", "--force", "--no-force") == Outer(place=Path("x"))


def test_files_and_saved_runs_use_the_same_names() -> None:
    group = Outer.of(place="x", max_rows="5", share=2, sizes=4, bits="8")
    assert (group.rows, group.share, group.inner.sizes, group.inner.bits) == (5, 2.0, (4,), 8)
    assert Outer.of(**group.flat()) == group.changed(bits=4).changed(bits=8)
    assert (group.value("max_rows"), find(Outer, "sizes").path) == (5, ("inner", "sizes"))
    assert list(settings_of(Outer)) == [
        *("place", "max_rows", "share", "plan", "force", "sizes", "texts", "keep", "bits"),
    ]


@pytest.mark.parametrize(
    ("values", "reason"),
    [
        ({"max_rows": 0}, "^--max-rows must be at least 1, not 0$"),
        ({"max_rows": None}, "^--max-rows must be a whole number, not None$"),
        ({"max_rows": True}, "^--max-rows must be a whole number, not True$"),
        ({"sizes": [2, 0]}, "^--sizes must be at least 1, not 0$"),
        ({"sizes": ["a"]}, "^--sizes must be a list, each a whole number"),
        ({"bits": 5}, "^--bits must be one of 4, 8, not 5$"),
        ({"keep": "yes"}, "^--keep must be true or false"),
        ({"force": True, "max_rows": 9}, "^--force is for few rows$"),
        ({"max_row": 1}, "unknown setting 'max_row'; did you mean 'max_rows'"),
    ],
)
def test_invalid_values_name_the_flag(values: dict[str, object], reason: str) -> None:
    with pytest.raises(ConfigError, match=reason):
        Outer.of(place="x", **values)


def test_the_help_shows_each_default_once(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        parsed("--help")
    printed = " ".join(capsys.readouterr().out.split())
    assert "--max-rows N rows (default: 3)" in printed
    assert "--force do it" in printed
    assert "--no-force" not in printed
    assert "--keep, --no-keep whether it is kept (default: on)" in printed
    assert "--sizes N [N ...] sizes (default: 1)" in printed
    assert "inner: An inner group." in printed


def test_subcommands_run_with_their_own_settings() -> None:
    done: list[Group] = []
    commands = Subcommands(Parser(prog="both"))
    commands.add("outer", Outer, done.append, "one")
    commands.add("inner", Inner, done.append, "the other")
    assert exit_code(commands.parse(["inner", "--bits", "4"])) == 0
    with pytest.raises(ConfigError, match="^--max-rows must be at least 1, not 0$"):
        commands.parse(["outer", "x", "--max-rows", "0"])
    assert done == [Inner(bits=4)]


@pytest.mark.parametrize(
    ("argv", "reason"),
    [
        ("x --max-row 5", "there is no flag --max-row; did you mean --max-rows? (help: outer --help)"),
        ("x --max-row=5", "there is no flag --max-row; did you mean --max-rows? (help: outer --help)"),
        ("--max-row 5", "there is no flag --max-row; did you mean --max-rows? (help: outer --help)"),
        ("x --no-forces", "there is no flag --no-forces; did you mean --no-force? (help: outer --help)"),
        ("x -q", "there is no flag -q (help: outer --help)"),
        ("x y", "'y' is one argument too many (help: outer --help)"),
        ("", "the following arguments are required: place (help: outer --help)"),
        ("x --max-rows", "--max-rows: expected one argument (help: outer --help)"),
        ("x --max-rows many", "--max-rows must be a whole number, not 'many'"),
        ("x --sizes 1 b", r"--sizes must be a list, each a whole number, not ['1', 'b']"),
        ("x --bits 5", "--bits must be one of 4, 8, not '5'"),
    ],
)
def test_a_wrong_command_line_is_one_line_that_says_what_to_type(argv: str, reason: str) -> None:
    with pytest.raises(ConfigError, match=f"^{re.escape(reason)}$"):
        parsed(*argv.split())


def test_arguments_that_only_look_like_flags_are_taken() -> None:
    assert parsed("--share", "-1", "--", "--max-row").place == Path("--max-row")
    assert parsed("-f of x").place == Path("-f of x")


def test_subcommands_name_themselves_in_errors() -> None:
    commands = Subcommands(Parser(prog="both", usage="%(prog)s outer | inner"))
    commands.add("inner", Inner, lambda _: None, "the other")
    for argv, reason in (
        (["inner", "--bit", "4"], "there is no flag --bit; did you mean --bits? (help: both inner --help)"),
        (["iner"], "COMMAND: invalid choice: 'iner' (choose from"),
        ([], "the following arguments are required: COMMAND (help: both --help)"),
    ):
        with pytest.raises(ConfigError, match=f"^{re.escape(reason)}"):
            commands.parse(argv)


def raising(error: BaseException) -> Callable[[], int]:
    def work() -> int:
        raise error

    return work


@pytest.mark.parametrize(
    ("work", "code", "reason"),
    [
        (lambda: None, 0, ""),
        (lambda: 1, 1, ""),
        (raising(EagleError("x is missing")), 2, "error: x is missing\n"),
        (raising(KeyboardInterrupt()), 130, "interrupted; nothing is kept\n"),
        (raising(KeyboardInterrupt("half is kept")), 130, "interrupted; half is kept\n"),
        (raising(Stopped(signal.SIGTERM)), 143, "interrupted; nothing is kept\n"),
        (raising(BrokenPipeError()), 0, ""),
    ],
)
def test_all_commands_end_in_one_way(
    work: Callable[[], int], code: int, reason: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sys.stdout", None)  # so that the changes for a broken pipe are undone
    assert exit_code(work, "nothing is kept") == code
    assert capsys.readouterr().err == reason


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs Linux's /dev/full")
@pytest.mark.parametrize("size", [1, 100_000], ids=["written at the end", "written at once"])
@pytest.mark.parametrize(
    ("output", "code", "reason"),
    [
        ("> /dev/full", 2, "error: the output cannot be written (No space left on device); make space and try again\n"),
        ("| (exec <&-; cat /dev/null)", 0, ""),
    ],
    ids=["a full disk", "a closed pipe"],
)
def test_an_output_that_takes_no_text_ends_a_command_without_a_trace(
    size: int, output: str, code: int, reason: str
) -> None:
    work = f"time.sleep(0.2); sys.exit(exit_code(lambda: print({size} * 'x')))"
    program = f"import sys, time; from eagle_mlx.command import exit_code; {work}"
    script = f"({shlex.quote(sys.executable)} -c {shlex.quote(program)}; echo $? >&2) {output}"
    environment = {**os.environ, "PYTHONUNBUFFERED": ""}
    ended = subprocess.run(["sh", "-c", script], env=environment, capture_output=True, text=True, check=False)
    assert ended.stderr == f"{reason}{code}\n"


@pytest.mark.parametrize("encoding", ["ascii", "latin-1", "utf-8"])
def test_text_that_a_terminal_cannot_show_is_escaped(encoding: str) -> None:
    program = "import eagle_mlx.command as c; c.exit_code(lambda: print('\\u03c4 \\udcff'))"
    environment = {**os.environ, "PYTHONIOENCODING": encoding, "PYTHONUTF8": "0"}
    ended = subprocess.run([sys.executable, "-c", program], env=environment, capture_output=True, check=False)
    text = "τ" if encoding == "utf-8" else r"\u03c4"
    assert (ended.stdout.decode(encoding), ended.stderr) == (f"{text} \\udcff\n", b"")


def test_a_signal_waits_until_a_deferred_block_checks() -> None:
    stop = Stop()
    with stop.listening():
        with stop.deferred():
            signal.raise_signal(signal.SIGTERM)
        assert stop.asked
        with pytest.raises(Stopped) as stopped:
            stop.check()
    assert stopped.value.exit_code == 143


def test_what_a_command_writes_after_its_terminal_was_closed_is_discarded(tmp_path: Path) -> None:
    """A shell that ends sends SIGHUP a second time, and writing to the closed terminal would be an error."""
    program = """
import fcntl, os, signal, sys, termios, time
from pathlib import Path
from eagle_mlx.command import Stop, exit_code
def work():
    signal.signal(signal.SIGHUP, signal.SIG_DFL)  # the tests may run under nohup
    stop = Stop()
    with stop.listening(), stop.deferred():
        fcntl.ioctl(0, termios.TIOCSCTTY, 0)
        print("ready", flush=True)
        while not stop.asked:
            time.sleep(0.01)
        os.kill(os.getpid(), signal.SIGHUP)
        print("saving", flush=True)
        print("saving", file=sys.stderr, flush=True)
        Path(sys.argv[1]).touch()
        stop.check()
sys.exit(exit_code(work))
"""
    terminal, its_end = os.openpty()
    command = [sys.executable, "-c", program, str(tmp_path / "saved")]
    process = subprocess.Popen(command, stdin=its_end, stdout=its_end, stderr=its_end, start_new_session=True)
    os.close(its_end)
    assert os.read(terminal, 5) == b"ready"
    os.close(terminal)
    assert process.wait(timeout=60) == 129
    assert (tmp_path / "saved").exists()


def test_nohup_is_respected() -> None:
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        stop = Stop()
        with stop.listening(), stop.deferred():
            signal.raise_signal(signal.SIGHUP)
            assert not stop.asked
    finally:
        signal.signal(signal.SIGHUP, before)
