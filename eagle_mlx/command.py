"""Shared by all commands: flags from groups of settings, handling of signals, and exit codes."""

from __future__ import annotations

import argparse
import inspect
import os
import signal
import sys
import threading
import typing
from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from types import FrameType
from typing import Any, Literal, TypeVar

from eagle_mlx.errors import EagleError
from eagle_mlx.setting import REQUIRED, Group, Setting, flag, groups_of, settings_of

_SIGNALS = (signal.SIGINT, signal.SIGTERM)
_METAVARS = {int: "N", float: "X", str: "NAME", Path: "FILE"}

Options = TypeVar("Options", bound=Group)
DefaultText = Callable[[Setting], str]


class Stopped(KeyboardInterrupt):
    """Raised by Ctrl-C or SIGTERM. Its message, if any, says what is kept."""

    def __init__(self, number: int = signal.SIGINT):
        super().__init__()
        self.exit_code = 128 + number


class Stop:
    """Turns SIGINT and SIGTERM into Stopped, at once or in a `deferred` block at the next `check`.

    After the first signal, default handling is restored, so a second signal always ends the process.
    """

    def __init__(self) -> None:
        self._deferred = False
        self._number: int | None = None

    @property
    def asked(self) -> bool:
        return self._number is not None

    @contextmanager
    def listening(self) -> Generator[None, None, None]:
        """Handle signals within the block. Does nothing outside the main thread."""
        if threading.current_thread() is not threading.main_thread():
            yield
            return
        before = {number: signal.signal(number, self._receive) for number in _SIGNALS}
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)

    @contextmanager
    def deferred(self, deferred: bool = True) -> Generator[None, None, None]:
        """Defer signals within the block until the next `check`."""
        before, self._deferred = self._deferred, deferred
        try:
            yield
        finally:
            self._deferred = before

    @contextmanager
    def immediate(self) -> Generator[None, None, None]:
        """Raise Stopped at any point within the block, even inside a `deferred` block."""
        with self.deferred(False):
            self.check()
            yield

    def check(self) -> None:
        if self._number is not None:
            raise Stopped(self._number)

    def _receive(self, number: int, frame: FrameType | None) -> None:
        self._number = number
        for each in _SIGNALS:
            signal.signal(each, signal.SIG_DFL)
        if not self._deferred:
            raise Stopped(number)


def exit_code(work: Callable[[], int | None], kept: str = "") -> int:
    """Run a command; return its status or 0, 2 for an error that the user can fix, 130 or 143 if interrupted.

    `kept` is the message for an interruption without one. A closed pipe is not an error.
    """
    try:
        return work() or 0
    except EagleError as e:
        print(f"error: {e}", file=sys.stderr)
        return 2
    except KeyboardInterrupt as e:
        print("; ".join(filter(None, ("interrupted", str(e) or kept))), file=sys.stderr)
        return e.exit_code if isinstance(e, Stopped) else 130
    except BrokenPipeError:
        sys.stdout = open(os.devnull, "w", encoding="utf-8")  # noqa: SIM115, PTH123  (discards remaining output)
        return 0


def arguments(argv: Sequence[str] | None) -> list[str]:
    """Return `argv`, or the process's arguments."""
    return list(sys.argv[1:] if argv is None else argv)


def read(
    options: type[Options], argv: Sequence[str] | None, prog: str, about: str, epilog: str | None = None
) -> Options:
    """Parse a command's settings. Raises ConfigError, or SystemExit for unknown flags and --help.

    `about` and `epilog` come before and after the flags in the help.
    """
    parser = new_parser(prog, about, epilog)
    add_flags(parser, options)
    return options.of(**vars(parser.parse_args(arguments(argv))))


def new_parser(prog: str, about: str, epilog: str | None = None, usage: str | None = None) -> argparse.ArgumentParser:
    """Return a parser that keeps line breaks in its texts and stores only the flags that are given."""
    return argparse.ArgumentParser(
        prog=prog,
        usage=usage,
        description=about,
        epilog=epilog,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        argument_default=argparse.SUPPRESS,
    )


class Subcommands:
    """Subcommands, each with its own settings."""

    def __init__(self, parser: argparse.ArgumentParser, metavar: str = "COMMAND"):
        self._parser = parser
        self._parts = parser.add_subparsers(required=True, metavar=metavar, help=argparse.SUPPRESS)

    def add(self, name: str, options: type[Options], work: Callable[[Options], int | None], about: str) -> None:
        """Add a command that calls `work` with its settings."""
        raw = argparse.RawDescriptionHelpFormatter
        part = self._parts.add_parser(name, description=about, formatter_class=raw, argument_default=argparse.SUPPRESS)
        add_flags(part, options)
        part.set_defaults(run=lambda **values: work(options.of(**values)))

    def parse(self, argv: Sequence[str]) -> Callable[[], int | None]:
        """Return a function that runs the command. It raises ConfigError if settings are invalid."""
        values = vars(self._parser.parse_args(argv))
        return partial(values.pop("run"), **values)


def default_text(known: Setting) -> str:
    """Return the default for a flag's help; "" for None, False and required settings."""
    is_hidden = any(known.default is each for each in (None, False, REQUIRED))
    return "" if is_hidden else shown(known.default)


def add_flags(
    parser: argparse.ArgumentParser,
    group: type[Group],
    say: DefaultText = default_text,
    to: argparse._ActionsContainer | None = None,
) -> None:
    """Add a flag for each setting, with a heading for each inner group; flags not given are not in the namespace.

    `say` formats the default for the help. `to` is the heading to add the flags to, by default the parser.
    """
    for known in settings_of(group).values():
        if len(known.path) == 1:
            _add_one(to or parser, known, say)
    for name, inner in groups_of(group).items():
        add_flags(parser, inner, say, parser.add_argument_group(name.replace("_", " "), inspect.getdoc(inner)))


def _add_one(to: argparse._ActionsContainer, known: Setting, say: DefaultText) -> None:
    text, shown = known.help.replace("%", "%%"), say(known) if known.shown is None else known.shown
    help_ = f"{text} (default: {shown})" if shown else text
    how: dict[str, Any] = {"help": help_, "default": argparse.SUPPRESS}
    if known.positional:
        to.add_argument(known.name, **how, **_argument(known))
        return
    how |= {"dest": known.name}
    flags = [name if name.startswith("-") else flag(name) for name in (flag(known.name), *known.also)]
    if known.type is bool and known.default is False:  # --no-x overrides a file of settings that says true
        to.add_argument(*flags, action="store_true", **how)
        to.add_argument(f"--no-{flags[0][2:]}", action="store_false", **{**how, "help": argparse.SUPPRESS})
        return
    to.add_argument(*flags, required=known.default is REQUIRED, **how, **_argument(known))


def _argument(known: Setting) -> dict[str, Any]:
    if known.type is bool:
        return {"action": argparse.BooleanOptionalAction}
    several = typing.get_origin(known.type) is tuple
    kind = typing.get_args(known.type)[0] if several else known.type
    how: dict[str, Any] = {}
    if known.repeat:
        how["action"] = "append"
    elif several:
        how["nargs"] = "+"
        if kind is str and not known.positional:
            how["action"] = "extend"
    elif known.bare is not None:
        how |= {"nargs": "?", "const": known.bare}
    elif known.positional and known.default is not REQUIRED:
        how["nargs"] = "?"
    if typing.get_origin(kind) is Literal:
        choices = typing.get_args(kind)
        return {"type": type(choices[0]), "choices": choices, **how}
    item = kind if kind in _METAVARS else typing.get_args(kind)[0]
    usual = known.name if known.positional else "TEXT" if several and item is str else _METAVARS[item]
    return {"type": item, "metavar": known.metavar or usual, **how}


def shown(value: Any) -> str:
    if value is True:
        return "on"
    if isinstance(value, tuple):
        return " ".join(map(shown, value))
    if isinstance(value, float):
        return f"{value:g}"
    return f"{value:,}" if type(value) is int and value > 9999 else str(value)
