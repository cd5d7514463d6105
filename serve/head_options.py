"""Settings of eagle-heads."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

from eagle_mlx.sampling_params import limit_of
from eagle_mlx.setting import AT_LEAST_1, REQUIRED, Group, between, setting
from eagle_mlx.target_options import TargetOptions

from .speculation import HEAD_BITS, HeadBits


@dataclass(frozen=True)
class List(Group):
    """No settings."""


@dataclass(frozen=True)
class Find(Group):
    """The target to find heads for."""

    target: str = setting(REQUIRED, "folder or hub id of the model", name="TARGET", positional=True)


@dataclass(frozen=True)
class Pull(Group):
    """The head to download."""

    name: str = setting(REQUIRED, "hub id of the head or of its target", name="NAME", positional=True)
    target: str | None = setting(None, "target of the head, if it is not known", metavar="MODEL")


@dataclass(frozen=True)
class Show(Group):
    """The head to describe."""

    head: str = setting(REQUIRED, "folder or hub id of the head", name="HEAD", positional=True)


@dataclass(frozen=True)
class Learned(Group):
    """The folder of a head that learns."""

    folder: Path = setting(REQUIRED, "the folder of eagle-serve --learn", name="FOLDER", positional=True)


@dataclass(frozen=True)
class Answers(Group):
    """The answers along which heads draft, and how."""

    prompts: tuple[Path, ...] = setting(
        (),
        "jsonl files of rows with `messages`, `prompt` or `turns`, of which the first is used (default: held-out "
        "Python functions); give prompts that no head was trained on",
    )
    limit: int = setting(100, "number of prompts of each file, spread evenly over categories", AT_LEAST_1)
    depth: int = setting(4, "draft tokens per round", between(1, 20), metavar="K")
    max_tokens: int = setting(128, "maximum number of tokens of an answer", AT_LEAST_1)
    head_bits: HeadBits | None = setting(None, HEAD_BITS)
    quiet: bool = setting(False, "no progress bar")
    loading: TargetOptions = field(default_factory=TargetOptions)


@dataclass(frozen=True)
class Compare(Group):
    """The heads to compare, and on what."""

    first: str = setting(REQUIRED, "folder or hub id of the head that you have", name="A", positional=True)
    second: str = setting(REQUIRED, "folder or hub id of the head that may be better", name="B", positional=True)
    target: str = setting(REQUIRED, "folder or hub id of their target", metavar="MODEL")
    temperature: float = setting(
        0.0,
        "sampling temperature of the answers, which then have seeds; 0 is greedy",
        limit_of("temperature"),
        metavar="T",
    )
    json: Path | None = setting(None, "write the figures to this file")
    answers: Answers = field(default_factory=Answers)


@dataclass(frozen=True)
class Certify(Group):
    """The head to certify, and for which target."""

    head: str = setting(REQUIRED, "folder or hub id of the head", name="HEAD", positional=True)
    target: str = setting(REQUIRED, "folder or hub id of its target", metavar="MODEL")
    output: Path | None = setting(None, "the certificate (default: certificate.json in the head's folder)")
    answers: Answers = field(default_factory=Answers)
