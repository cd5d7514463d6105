"""Shared by all commands: flags from groups of settings, handling of signals, and exit codes."""

from __future__ import annotations

import argparse
import difflib
import errno
import inspect
import os
import re
import signal
import stat
import sys
import threading
import typing
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from io import TextIOWrapper
from itertools import zip_longest
from pathlib import Path
from types import FrameType
from typing import Any, NoReturn, TypeVar

from eagle_mlx import __version__
from eagle_mlx.errors import ConfigError, EagleError
from eagle_mlx.setting import REQUIRED, Group, Setting, flag, groups_of, settings_of

_SIGNALS = (signal.SIGINT, signal.SIGTERM)
_FULL = (errno.ENOSPC, errno.EDQUOT)
_HIDDEN = {
    "target": ("model", "target_model"),
    "data": ("train_data",),
    "spec_decode": ("speculative_decoding",),
    "disable_by_batch_size": ("spec_decode_disable_batch_size",),
    "dynamic_spec_decode": ("spec_decode_dynamic",),
    "acceptance_rate_threshold": ("spec_decode_acceptance_threshold",),
}
"""Flags of other programs that the help does not show, by the setting that they mean."""
HELP = frozenset({"-h", "--help", "--version"})  # flags that every command has
_FLAG = re.compile(r"(--[a-zA-Z][\w-]*)(?:=|$)|(-[a-zA-Z])(?!.*\s)")
_BARE = {"--speculative-decoding": "auto"}  # the values of hidden flags that are given without one
_METAVARS = {int: "N", float: "X", str: "NAME", Path: "FILE"}

Options = TypeVar("Options", bound=Group)
DefaultText = Callable[[Setting], str]


class Stopped(KeyboardInterrupt):
    """Raised by Ctrl-C, SIGTERM or SIGHUP. Its message, if any, says what is kept."""

    def __init__(self, number: int = signal.SIGINT):
        super().__init__()
        self.exit_code = 128 + number


class Stop:
    """Turns SIGINT, SIGTERM and SIGHUP into Stopped, at once or in a `deferred` block at the next `check`.

    After the first signal, default handling is restored, so a second signal always ends the process. But SIGHUP, of a
    closed terminal, may come twice, and stays ignored after `nohup`.
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
        hangup = () if signal.getsignal(signal.SIGHUP) == signal.SIG_IGN else (signal.SIGHUP,)
        before = {number: signal.signal(number, self._receive) for number in (*_SIGNALS, *hangup)}
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
        for other in _SIGNALS:
            signal.signal(other, signal.SIG_DFL)
        signal.signal(signal.SIGHUP, signal.SIG_IGN)
        if number == signal.SIGHUP:
            leave_terminal()
        if not self._deferred:
            raise Stopped(number)


def leave_terminal() -> None:
    """Discard what standard streams write to a terminal: to a closed one, writing is an error."""
    nothing = os.open(os.devnull, os.O_RDWR)
    for number in range(3):
        if stat.S_ISCHR(os.fstat(number).st_mode):
            os.dup2(nothing, number)
    os.close(nothing)


def exit_code(work: Callable[[], int | None], kept: str = "") -> int:
    """Run a command; return its status or 0, 2 for an error that the user can fix, 130, 143 or 129 if interrupted.

    `kept` is the message for an interruption without one. A closed pipe is not an error, a full disk is one.
    """
    status = 0
    if isinstance(sys.stdout, TextIOWrapper):
        sys.stdout.reconfigure(errors="backslashreplace")  # for a locale that lacks a character, as on stderr
    try:
        status = _status(work, kept)
        if sys.stdout is not None:
            sys.stdout.flush()  # at its own exit, Python would report an error with a trace
    except OSError as e:
        if not isinstance(e, BrokenPipeError) and e.errno not in _FULL:
            raise
        sys.stdout = open(os.devnull, "w", encoding="utf-8")  # noqa: SIM115, PTH123  (discards remaining output)
        if e.errno in _FULL:
            print(f"error: the output cannot be written ({e.strerror}); make space and try again", file=sys.stderr)
            return 2
    return status


def _status(work: Callable[[], int | None], kept: str) -> int:
    try:
        return work() or 0
    except EagleError as e:
        print(f"error: {e}", file=sys.stderr)
        return 2
    except KeyboardInterrupt as e:
        print("; ".join(filter(None, ("interrupted", str(e) or kept))), file=sys.stderr)
        return e.exit_code if isinstance(e, Stopped) else 130


def arguments(argv: Sequence[str] | None) -> list[str]:
    return list(sys.argv[1:] if argv is None else argv)


class Parser(argparse.ArgumentParser):
    """A parser that reports an error in one line, accepts no abbreviated flags, and stores only the flags given.

    Values stay text; `Setting.convert` checks them.
    """

    def __init__(self, **more: Any):
        raw = argparse.RawDescriptionHelpFormatter
        fixed: dict[str, Any] = {"formatter_class": raw, "argument_default": argparse.SUPPRESS, "allow_abbrev": False}
        super().__init__(**fixed, **more)
        self.add_argument("--version", action="version", version=f"%(prog)s {__version__}", help="show the version")
        self._settings: dict[str, Setting] | None = None  # settings by flag; None if this parser has subcommands
        self._hidden: dict[str, str] = {}  # flags by hidden flag

    def know(self, settings: Mapping[str, Setting]) -> None:
        """Accept only the flags of these settings; suggest them for unknown ones, and accept their hidden names."""
        self._settings = self._settings or {}
        for name, declared in settings.items():
            if not declared.positional:
                negated = declared.type is bool
                names = [*flags_of(declared), *([flag(f"no_{name}")] if negated else [])]
                self._settings |= dict.fromkeys(names, declared)
                hidden = [other for other in _HIDDEN.get(name, ()) if other not in settings]
                self._hidden |= {flag(other): flag(name) for other in hidden}
                self._hidden |= {flag(f"no_{other}"): flag(f"no_{name}") for other in hidden if negated}

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> Any:
        """Parse arguments, here or for a parser with subcommands. Raises ConfigError if any is left."""
        args = list(self._translated(args))
        if self._settings is not None:
            matches = filter(None, map(_FLAG.match, args[: args.index("--") if "--" in args else None]))
            names = [match[1] or match[2] for match in matches]
            if unknown := [name for name in names if name not in (*self._settings, *HELP)]:
                near = difflib.get_close_matches(unknown[0], self._settings, n=1, cutoff=0.0) if unknown[0][2:] else ()
                self.error(f"there is no flag {unknown[0]}{f'; did you mean {near[0]}?' if near else ''}")
        namespace, rest = super().parse_known_args(args, namespace)
        if rest:
            self.error(f"{rest[0]!r} is one argument too many")
        return namespace, rest

    def error(self, message: str) -> NoReturn:
        """Raise ConfigError with the message and the command that shows the help."""
        raise ConfigError(f"{message.removeprefix('argument ')} (help: {self.prog} --help)")

    def _translated(self, args: Sequence[str]) -> Iterator[str]:
        """Yield the arguments with visible names of flags, and with the values that bare flags stand for."""
        end, settings = args.index("--") if "--" in args else len(args), self._settings or {}
        for text, following in zip_longest(args[:end], args[1 : end + 1]):
            name, equals, value = text.partition("=")
            visible = self._hidden.get(name, name)
            if text in _BARE and visible != text and following not in typing.get_args(settings[visible].type):
                equals, value = "=", _BARE[text]
            yield f"{visible}{equals}{value}"
        yield from args[end:]


def read(
    options: type[Options], argv: Sequence[str] | None, prog: str, about: str, epilog: str | None = None
) -> Options:
    """Parse a command's settings. Raises ConfigError, or SystemExit for --help and --version.

    `about` and `epilog` come before and after the flags in the help.
    """
    parser = Parser(prog=prog, description=about, epilog=epilog)
    add_flags(parser, options)
    return options.of(**vars(parser.parse_args(arguments(argv))))


class Subcommands:
    """Subcommands, each with its own settings."""

    def __init__(self, parser: Parser):
        self._parser = parser
        names = {"dest": "COMMAND", "metavar": "COMMAND"}
        self._parts = parser.add_subparsers(required=True, help=argparse.SUPPRESS, prog=parser.prog, **names)

    def add(self, name: str, options: type[Options], work: Callable[[Options], int | None], about: str) -> None:
        """Add a command that calls `work` with its settings."""
        part = self._parts.add_parser(name, description=about)
        add_flags(part, options)
        part.set_defaults(run=lambda **values: partial(work, options.of(**values)))

    def parse(self, argv: Sequence[str]) -> Callable[[], int | None]:
        """Return a function that runs the command. Raises ConfigError if arguments are invalid."""
        values = vars(self._parser.parse_args(argv))
        del values[self._parts.dest]
        work: Callable[[], int | None] = values.pop("run")(**values)
        return work


def default_text(declared: Setting) -> str:
    """Return the default for a flag's help; "" for None, False and required settings."""
    default = declared.written(declared.default)
    return "" if default is None or default is False or default is REQUIRED else shown(default)


def add_flags(
    parser: Parser,
    group: type[Group],
    say: DefaultText = default_text,
    add: Callable[..., object] | None = None,
) -> None:
    """Add a flag for each setting, with a heading for each inner group; flags not given are not in the namespace.

    `say` formats the default for the help. `add` adds an argument under a heading, by default to the parser.
    """
    if add is None:
        parser.know(settings_of(group))
    for declared in settings_of(group).values():
        if len(declared.path) == 1:
            _add_one(add or parser.add_argument, declared, say)
    for name, inner in groups_of(group).items():
        heading = parser.add_argument_group(name.replace("_", " "), inspect.getdoc(inner))
        add_flags(parser, inner, say, heading.add_argument)


def flags_of(declared: Setting) -> list[str]:
    """Return the names of a setting's flag, the first of which is its own."""
    return [name if name.startswith("-") else flag(name) for name in (declared.name, *declared.also)]


def _add_one(add: Callable[..., object], declared: Setting, say: DefaultText) -> None:
    text, default = declared.help.replace("%", "%%"), say(declared) if declared.shown is None else declared.shown
    more: dict[str, Any] = {"help": f"{text} (default: {default})" if default else text, "default": argparse.SUPPRESS}
    if declared.positional:
        add(declared.name, **more, **_argument(declared))
        return
    more["dest"] = declared.name
    flags = flags_of(declared)
    if declared.type is bool and declared.default is False:  # --no-x overrides a file of settings that says true
        add(*flags, action="store_true", **more)
        add(f"--no-{flags[0][2:]}", action="store_false", **{**more, "help": argparse.SUPPRESS})
        return
    add(*flags, required=declared.default is REQUIRED, **more, **_argument(declared))


def _argument(declared: Setting) -> dict[str, Any]:
    if declared.type is bool:
        return {"action": argparse.BooleanOptionalAction}
    several = typing.get_origin(declared.type) is tuple
    kind = typing.get_args(declared.type)[0] if several else declared.type
    more: dict[str, Any] = {}
    if declared.choices:
        usual = f"{{{','.join(declared.choices)}}}"
    else:
        item = kind if kind in _METAVARS else typing.get_args(kind)[0]
        usual = declared.name if declared.positional else "TEXT" if several and item is str else _METAVARS[item]
        if declared.bare is not None or (declared.positional and declared.default is not REQUIRED):
            more["nargs"] = "?"
    if declared.repeat:
        more["action"] = "append"
    elif several:
        more["nargs"] = "+"
        if kind is str and not declared.positional:
            more["action"] = "extend"
    return {"metavar": declared.metavar or usual, **more} | (
        {"const": declared.bare} if more.get("nargs") == "?" else {}
    )


def shown(value: Any) -> str:
    if value is True:
        return "on"
    if isinstance(value, tuple):
        return " ".join(map(shown, value))
    if isinstance(value, float):
        return f"{value:g}"
    return f"{value:,}" if type(value) is int and value > 9999 else str(value)
