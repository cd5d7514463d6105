"""What drafts where no head was named: the first that is found and loads, else n-grams."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

from eagle_mlx import hub
from eagle_mlx.catalog.head_search import FoundHead, find_heads, where_mtp_layers_are
from eagle_mlx.engine import Engine
from eagle_mlx.errors import ConfigError, EagleError
from eagle_mlx.proposers.base import Proposer
from eagle_mlx.target import Target, fingerprint

from .speculation import AUTO, Speculation


def load_proposer(
    speculation: Speculation, target: Target, name: str | Path, say: Callable[[str], None]
) -> tuple[Speculation, Proposer | None]:
    """What drafts, and the speculation with the head that was found; `say` is told which, and why not another.

    `name` is what the target was asked for as. Raises an EagleError where what was named cannot be had, and where a
    head was asked for and none is found; a head that was only found and does not load is passed over.
    """
    if speculation.head != AUTO or speculation.resolved_mode() == "none":
        return speculation, speculation.proposer(target)
    for found in usable_heads(name, say, fingerprint(target), speculation.mode):
        one = replace(speculation, head=found.head, mode=speculation.mode or found.mode)
        try:
            proposer = one.proposer(target)
            Engine(target, proposer, max_batch=1)  # whether this target gives what the head reads
        except EagleError as e:
            say(f"head: {found.head} is passed over: {e}")
            continue
        say(f"head: {found.reason}")
        return one, proposer
    if speculation.mode is not None:
        raise ConfigError(f"--spec-decode {speculation.mode}: no head is known for {target.name}: give --head")
    say(f"head: none found for {target.name}; n-grams draft where that pays (docs/heads.md has other ways)")
    without = replace(speculation, head=None, head_bits=None, mode="ngram")
    return without, without.proposer(target)


def usable_heads(
    target: str | Path, say: Callable[[str], None], digest: str | None = None, mode: str | None = None
) -> Iterator[FoundHead]:
    """The heads for a target that are here, fetched as they are asked for where the target came from the hub itself.

    Whoever names a model by its hub id has its weights fetched without being asked, and a head is a small part more.
    For a folder nothing is fetched: `say` is told the command.
    """
    by_hub_id = hub.full_id(hub.public_name(target))
    for found in find_heads(target, digest, lambda text: say(f"head: {text}")):
        if mode is not None and found.mode not in (None, mode):
            continue
        if not found.here and not by_hub_id:
            say(f"head: not here yet: {found.about}; to fetch it: eagle-heads pull {found.head}")
            break  # those that are here come first
        try:
            hub.resolve(found.head)
        except EagleError as e:
            say(f"head: {found.about}, cannot be fetched now: {e}")
            break
        yield found
    if mode != "eagle" and (command := where_mtp_layers_are(target)) is not None:
        say(f"head: this conversion leaves out the model's own MTP layers; to fetch them: {command}")
