"""Run Claude Code, Codex CLI and others against eagle-serve, each in an empty home folder; see README.md."""

from __future__ import annotations

import argparse
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from tests.clients.programs import ASKED, NOTE, PROGRAMS, SAID, Program, script
from tests.clients.recorder import Exchange, recording
from tests.clients.scripted_target import scripted_target_folder
from tests.clients.trimmed import trimmed

SCRIPTED = "scripted"
SMALL = 3000
"""A context that is shorter than any agent's own prompt."""
LONG = ASKED + " Look again." * SMALL
CONTEXT = 32_768
"""The context size that programs are given, large enough to send their whole prompt."""
START_SECONDS = 600
RUN_SECONDS = 240
ANSWER_SECONDS = 45
"""Limit for an answer: agents request tens of thousands of tokens, and small models may use all of them."""
SHOWN = 12
"""Maximum lines printed of a program's output and requests."""
COLOURS = re.compile(r"\x1b\[[0-9;]*m")


@dataclass(frozen=True)
class Run:
    """The result of a program's run."""

    code: int
    output: str
    exchanges: list[Exchange]


@contextmanager
def serving(name: str, target: str, head: str | None, context: int | None, log: Path) -> Iterator[str]:
    """Run an eagle-serve and yield its address."""
    ask = [sys.executable, "-m", "eagle_mlx.serve.api.cli", "--port", "0", "--served-model-name", name]
    ask += ["--request-seconds", str(ANSWER_SECONDS)]
    ask += ["--target", target] if target != "embedded" else []
    ask += ["--head", head] if head else []
    ask += ["--max-context", str(context)] if context else []
    with log.open("w") as out:
        server = subprocess.Popen(ask, stdout=out, stderr=subprocess.STDOUT)
    try:
        yield _ready(server, log)
    finally:
        server.terminate()
        server.wait()


def _ready(server: subprocess.Popen[bytes], log: Path) -> str:
    until = time.monotonic() + START_SECONDS
    while time.monotonic() < until and server.poll() is None:
        if match := re.search(r"^ready: (\S+)$", log.read_text(), re.MULTILINE):
            return match[1]
        time.sleep(0.2)
    raise SystemExit(f"eagle-serve did not start:\n{log.read_text()}")


def run(program: Program, file: str, ask: Sequence[str], server: str) -> Run:
    """Run a program in its own home folder, without this machine's settings."""
    with recording(server) as recorder, tempfile.TemporaryDirectory(prefix="home-") as home:

        def filled(text: str) -> str:
            text = text.replace("@URL@", recorder.address).replace("@MODEL@", program.model)
            return text.replace("@CONTEXT@", str(CONTEXT))

        (Path(home) / "note.txt").write_text(NOTE)
        for name, text in program.files.items():
            (Path(home) / name).parent.mkdir(parents=True, exist_ok=True)
            (Path(home) / name).write_text(filled(text))
        path = os.pathsep.join([str(Path(shutil.which("node") or "/").parent), "/usr/bin", "/bin"])
        variables = {"PATH": path, "HOME": home, "TERM": "dumb", "LANG": "C.UTF-8"}
        variables |= {name: filled(text) for name, text in program.variables.items()}
        code, output = 0, ""
        for arguments in filter(None, (program.first, ask)):
            code, output = _end_of([file, *map(filled, arguments)], variables, home)
        return Run(code, COLOURS.sub("", output), recorder.exchanges)


def _end_of(command: Sequence[str], variables: dict[str, str], home: str) -> tuple[int, str]:
    given = {"cwd": home, "env": variables, "stdin": subprocess.DEVNULL, "timeout": RUN_SECONDS}
    try:
        ended = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, **given)  # type: ignore[call-overload]
    except subprocess.TimeoutExpired as e:
        return 124, (e.stdout or b"").decode(errors="replace")
    return ended.returncode, ended.stdout


def file_of(program: Program, folder: Path) -> str | None:
    """Return the program's file in a folder where npm or pip installed it, or below."""
    places = (f"{place}{program.program}" for place in ("node_modules/.bin/", "*/node_modules/.bin/", "bin/", "*/bin/"))
    return next((str(path) for place in places for path in folder.glob(place)), None)


def why_wrong(program: Program, ran: Run, mode: str) -> str | None:
    """Return what went wrong, or None."""
    answered = [exchange for exchange in ran.exchanges if exchange.method == "POST" and exchange.status == 200]
    if mode == "too-long":
        return None if program.too_long in ran.output else "does not say that the prompt is too long"
    if ran.code:
        return f"ended with {ran.code}"
    if not answered:
        return "nothing was answered"
    if mode == "tools" and program.calls is not None:
        if SAID not in ran.output:
            return "does not show the answer behind the tool call"
        sent = json.dumps(answered[-1].body)
        return None if "heron" in sent or program.program == "llm" else "did not send what the tool gave"
    return None


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--programs", type=Path, required=True, help="folder that npm and pip have installed them in")
    parser.add_argument("--only", nargs="+", help="names of the programs to run")
    parser.add_argument("--mode", choices=("tools", "plain", "too-long"), default="tools")
    parser.add_argument("--target", help="model of mode plain (default: the embedded one)")
    parser.add_argument("--head")
    parser.add_argument("--record", type=Path, help="folder for what was asked, in short, as the tests replay it")
    args = parser.parse_args()
    failed = 0
    with tempfile.TemporaryDirectory() as folder:
        target, context = args.target or "embedded", None
        if args.mode != "plain":
            target = str(scripted_target_folder(Path(folder) / SCRIPTED, script()))
            context = SMALL if args.mode == "too-long" else None
        chosen = [program for program in PROGRAMS if args.only is None or program.program in args.only]
        for name in dict.fromkeys(program.model for program in chosen):
            with serving(name, target, args.head, context, Path(folder) / "log") as server:
                failed += sum(_try(program, args, server) for program in chosen if program.model == name)
    return 1 if failed else 0


def _try(program: Program, args: argparse.Namespace, server: str) -> bool:
    """Run one program, print the result, and return whether it failed."""
    file = file_of(program, args.programs)
    ask = program.without_tools if args.mode == "plain" else program.ask
    if args.mode == "too-long":
        ask = [text.replace(ASKED, LONG) for text in program.ask]
    if file is None or ask is None:
        print(f"{program.name}: {'not installed' if file is None else 'always offers tools'}", flush=True)
        return False
    ran = run(program, file, ask, server)
    wrong = why_wrong(program, ran, args.mode)
    print(f"{program.name}: {wrong or 'ok'}")
    for exchange in ran.exchanges[-SHOWN:]:
        print(f"    {exchange}")
    print("".join(f"    | {line}\n" for line in ran.output.strip().splitlines()[-SHOWN:]), flush=True)
    if args.record is not None:
        args.record.mkdir(parents=True, exist_ok=True)
        (args.record / program.recorded).write_text("".join(_recorded(program, ran)))
    return wrong is not None


def _recorded(program: Program, ran: Run) -> Iterator[str]:
    """Yield a line per request."""
    for exchange in trimmed(ran.exchanges, program.calls[0] if program.calls else None):
        yield json.dumps(exchange, separators=(",", ":")) + "\n"


if __name__ == "__main__":
    sys.exit(main())
