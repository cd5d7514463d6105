"""The folder of `--learn`: its lock, its identity, the versions of the head, and what became of each."""

from __future__ import annotations

import json
import logging
import shutil
import time
from contextlib import ExitStack, suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

from eagle_mlx.errors import ConfigError, OutputError, in_one_line
from eagle_mlx.files import locked, sync_folder, write_whole
from eagle_mlx.memory import gb
from eagle_mlx.paired import Gain
from eagle_mlx.progress import counted

log = logging.getLogger("eagle_mlx.serve")
TEXTS, HEADS = "texts", "heads"
_CANDIDATE, _LOG, _IDENTITY = "candidate", "log.json", "identity.json"
_FORMAT = "eagle-mlx-learned-2"
_KEPT = 5
"""Versions of the head on disk; the oldest leave first, but never the serving one and the one before."""
_EVENTS = 200
"""Lines of the log."""
Outcome = Literal["took over", "not better", "rolled back"]


@dataclass(frozen=True)
class Event:
    """The fate of a candidate or of a version, and the figures that decided it."""

    outcome: Outcome
    version: int
    """The version that serves from then on; 0 is the head that the server was started with."""
    before: float
    """τ of the head that served, over held-out conversations."""
    after: float
    """τ of the candidate over the same conversations."""
    gain: Gain
    lost: float
    """The loss of the candidate and the versions since the best one, over older conversations: 0.01 is 1 %."""
    tokens: int
    """Tokens that the candidate had learned."""
    time: int
    """Nanoseconds since 1970."""

    def __str__(self) -> str:
        over = counted(self.gain.conversations, "held-out conversation")
        return f"{self.outcome}: tau {self.before:.3f} to {self.after:.3f}, {self.gain.interval} over {over}"


class Versions:
    """The versions of a head. Version 0, the head that the server was started with, is not in the folder.

    A version's folder is complete and on disk before the log names it, so the serving head is whole whenever a process
    is killed.
    """

    def __init__(self, folder: Path):
        self._folder = folder
        self.events = _read_log(folder)
        heads = folder / HEADS
        heads.mkdir(mode=0o700, exist_ok=True)
        for path in heads.iterdir():
            if path.name not in map(str, range(1, self.latest + 1)):  # a process was killed while it wrote this
                shutil.rmtree(path, ignore_errors=True)

    @property
    def candidate(self) -> Path:
        return self._folder / HEADS / _CANDIDATE

    @property
    def serving(self) -> int:
        return self.events[-1].version if self.events else 0

    @property
    def latest(self) -> int:
        return max((event.version for event in self.events), default=0)

    @property
    def lost(self) -> float:
        """The loss of the serving version, as in its event."""
        taken = (event for event in self.events if event.outcome == "took over")
        return next((event.lost for event in taken if event.version == self.serving), 0.0)

    @property
    def taus(self) -> dict[int, float]:
        """τ of each version that served, over the conversations that judged it last."""
        taus, serving = dict[int, float](), 0
        for event in self.events:
            pair = (event.version, serving) if event.outcome == "rolled back" else (serving, event.version)
            if pair[0] != pair[1]:
                taus[pair[1]] = event.after
            taus[pair[0]], serving = event.before, event.version
        return taus

    @property
    def taken_over(self) -> Event | None:
        """The event by which the serving version took over; None for the first, and after a rollback."""
        last = next((event for event in reversed(self.events) if event.outcome != "not better"), None)
        return last if last is not None and last.outcome == "took over" else None

    def before(self, version: int) -> int:
        """Return the version that served before this one did."""
        return next((event.version for event in reversed(self.events) if event.version != version), 0)

    def path(self, version: int) -> Path:
        return self._folder / HEADS / str(version)

    def take_over(self, event: Event) -> None:
        """Make the candidate the serving version, `event.version`. Raises OSError; nothing has changed then."""
        place = self.path(event.version)
        for path in (self.candidate, *self.candidate.rglob("*")):
            path.chmod(0o700 if path.is_dir() else 0o600)
            sync_folder(path)
        shutil.rmtree(place, ignore_errors=True)  # of an earlier attempt that failed
        self.candidate.rename(place)
        sync_folder(place.parent)
        self.note(event)

    def note(self, event: Event) -> None:
        """Add an event to the log, whose version serves from now on, and delete versions that are too old."""
        events = [*self.events, event]
        if len(events) > _EVENTS:  # `lost` and `taus` need those that changed the version
            events.remove(next((old for old in events if old.outcome == "not better"), events[0]))
        content = {"format": _FORMAT, "events": list(map(asdict, events))}
        write_whole(self._folder / _LOG, (json.dumps(content, indent=1) + "\n").encode(), mode=0o600)
        kept = (self.before(event.version), event.version)  # a rollback returns to the one before
        if event.version != self.serving:
            log.info("version %d of the head serves now; %s", event.version, event)
        self.events = events
        numbers = sorted(int(path.name) for path in (self._folder / HEADS).iterdir() if path.name.isdecimal())
        for number in numbers[:-_KEPT]:
            if number not in kept:
                shutil.rmtree(self.path(number), ignore_errors=True)


def _read_log(folder: Path) -> list[Event]:
    """Return the events, none without a log. Raises ConfigError if the log cannot be read."""
    path = folder / _LOG
    try:
        events = json.loads(path.read_text())["events"] if path.exists() else []
        return [Event(**{**event, "gain": Gain(**event["gain"])}) for event in events]
    except (OSError, ValueError, KeyError, TypeError) as e:
        raise ConfigError(f"{path} cannot be read ({in_one_line(e)}); remove {folder}, or name another folder") from e


def claim(folder: Path, identity: dict[str, Any]) -> ExitStack:
    """Lock a folder, created if need be, for a server; return what unlocks it.

    identity: what the texts and heads in it are of; only its `target`, a name, may change. Raises ConfigError if they
    are of something else or no server's, and OutputError if another process uses the folder, or if it cannot be
    written.
    """
    with ExitStack() as stack:
        try:
            path, content = folder / _IDENTITY, json.dumps({"format": _FORMAT, **identity}, indent=1) + "\n"
            if any((folder / name).exists() for name in (TEXTS, HEADS)) and not path.exists():
                # A server would delete what is not its own there.
                raise ConfigError(f"--learn {folder} has heads or texts of something else; name a new folder")
            folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            stack.enter_context(locked(folder))
            there = path.read_text() if path.exists() else None
            if there is None:
                write_whole(path, content.encode(), mode=0o600)
            elif _weights(there) != _weights(content):
                raise ConfigError(
                    f"--learn {folder} has the texts of another target or head:\n{there}name another folder"
                )
        except OSError as e:
            raise OutputError(f"--learn {folder} cannot be used: {e.strerror or e}") from e
        return stack.pop_all()


def _weights(identity: str) -> list[str]:
    """Return the lines of an identity without the target's name: a model may be moved, or named in another way."""
    return [line for line in identity.splitlines() if not line.startswith(' "target":')]


def show_log(folder: Path) -> int:
    """Print what became of each candidate; return the exit status, 1 if there is nothing. Raises ConfigError."""
    _check(folder)
    events = _read_log(folder)
    nbytes = sum(path.stat().st_size for path in folder.glob(f"{TEXTS}/*"))
    print(f"{gb(nbytes)} of texts")
    if not events:
        print(f"{folder} has no versions of a head yet")
        return 1
    for event in events:
        when = time.strftime("%Y-%m-%d %H:%M", time.localtime(event.time / 1e9))
        print(f"{when}  version {event.version:<3} {event}; {counted(event.tokens, 'token')} learned")
    serving = events[-1].version
    print(f"version {serving} serves" + (", the head that the server is started with" if not serving else ""))
    return 0


def _check(folder: Path) -> None:
    try:
        (folder / _IDENTITY).read_bytes()
    except OSError as e:
        is_other = isinstance(e, FileNotFoundError | NotADirectoryError)
        problem = "is not a folder of eagle-serve --learn" if is_other else f"cannot be read: {e.strerror}"
        raise ConfigError(f"{folder} {problem}") from e


def forget(folder: Path) -> int:
    """Delete the texts; return the exit status. Raises ConfigError if it is another folder, and OutputError if a server
    uses it, or if a text cannot be deleted."""
    _check(folder)
    try:
        with locked(folder), suppress(FileNotFoundError):
            for path in filter(Path.is_file, (folder / TEXTS).iterdir()):  # it may be another disk, with lost+found
                path.unlink()
    except OSError as e:
        raise OutputError(f"the texts in {folder} cannot be deleted: {e.strerror or e}") from e
    print(f"the texts in {folder} are deleted; its versions of the head stay, which learned from them")
    return 0
