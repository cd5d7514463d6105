"""The command `eagle-heads`: lists known heads, finds heads for a target, and downloads heads."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass

from eagle_mlx import hub
from eagle_mlx.catalog.base_model import names_of
from eagle_mlx.catalog.head_search import (
    PERMITTING,
    KnownHead,
    fetch_notice,
    find_heads,
    included,
    known_heads,
    known_heads_for,
    records,
    register,
    where_mtp_layers_are,
)
from eagle_mlx.command import Parser, Subcommands, arguments, exit_code
from eagle_mlx.errors import ConfigError
from eagle_mlx.formats.fields import read_config
from eagle_mlx.setting import REQUIRED, Group, setting

EPILOG = """\
examples:
  eagle-heads list                       heads that were trained or downloaded here, and published heads
  eagle-heads find Qwen3-8B-4bit         heads for a target, in the order in which --head auto tries them
  eagle-heads pull Qwen3-8B-4bit         download the published head for a target
  eagle-heads pull you/qwen3-8b-eagle3 --target Qwen3-8B-4bit

Without --head, eagle-serve and eagle-generate choose from these heads."""
_MOST_LAYERS = 8
"""Heads have few layers; anything with more is a model and is not downloaded as a head."""


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


def main(argv: Sequence[str] | None = None) -> int:
    """Run eagle-heads. Returns the exit status: 0, 1 if no head is found, or 2 for an error."""
    about = "List heads on this machine and published heads, find heads for a target, and download heads."
    usage = "%(prog)s list | find TARGET | pull NAME"
    commands = Subcommands(Parser(prog="eagle-heads", usage=usage, description=about, epilog=EPILOG))
    commands.add("list", List, _list, "List all known heads.")
    commands.add("find", Find, _find, "List heads for a target, the best first; exit status 1 if there is none.")
    commands.add("pull", Pull, _pull, "Download a head from the hub.")
    return exit_code(lambda: commands.parse(arguments(argv))())


def _list(_: List) -> int:
    print("here:")
    for record in [*records(), *included()]:
        print(f"  {record}")
    print("published (*: in the hub's cache):")
    for known in known_heads():
        print(f"{'*' if hub.cached(known.head) else ' '} {known}")
    return 0


def _find(options: Find) -> int:
    target = options.target
    found = find_heads(target, say=lambda text: print(text, file=sys.stderr))
    for one in found:
        ready = one.here and not one.only_by_name
        print(f"{one.about}{'' if ready else '; to use it: eagle-heads pull ' + one.head}")
    if (command := where_mtp_layers_are(target)) is not None:
        print(f"this conversion leaves out the model's own MTP layers; to fetch them: {command}")
    if not found:
        print(f"no head is known for {' or '.join(names_of(target))}; eagle-train makes one", file=sys.stderr)
    return 0 if found else 1


def _pull(options: Pull) -> int:
    name, target = options.name, options.target
    known = _known(name)
    repo, of = (known.head, target or known.target) if known else (hub.hub_id(name), target)
    if repo is None:
        raise ConfigError(f"{name} is not a hub id; to use a head in a folder, give --head {name} to eagle-serve")
    if known is None:
        _check_size(repo)
    else:
        print(f"{known}, by {known.source}", file=sys.stderr)
    if (notice := fetch_notice(repo)) is not None:
        print(notice, file=sys.stderr)
    folder = hub.resolve(repo)
    if of is not None:
        register(repo, of, "fetched")
    print(folder)
    command = f"eagle-serve --target {of}" if of is not None else f"eagle-serve --target ITS_TARGET --head {repo}"
    print(f"to use it: {command}", file=sys.stderr)
    return 0


def _known(name: str) -> KnownHead | None:
    """Return the published head of that name, or else the first one for a target of that name.

    Raises ConfigError if no head for the target has a license that is known to permit any use.
    """
    for_target = known_heads_for(names_of(name))
    heads = [head for head in known_heads() if head.head.lower() == name.lower()]
    heads = heads or [head for head in for_target if head.license in PERMITTING]
    if for_target and not heads:
        raise ConfigError(
            f"no head for {name} has a license that is known to permit any use; name one: "
            + ", ".join(f"eagle-heads pull {head.head} (license {head.license})" for head in for_target)
        )
    return next(iter(heads), None)


def _check_size(repo: str) -> None:
    """Raise ConfigError if `repo` is a whole model. Downloads only its config."""
    config = hub.fetch_file(repo, "config.json")
    assert config is not None
    layers = read_config(config.parent).get("num_hidden_layers")
    if isinstance(layers, int) and layers > _MOST_LAYERS:
        raise ConfigError(
            f"{repo} is a model with {layers} layers, not a head, and no head is known for it; see `eagle-heads list`"
        )


if __name__ == "__main__":
    sys.exit(main())
