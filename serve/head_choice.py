"""Heads for a target: their list, downloads, those to choose from, and loading."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Literal

import mlx.core as mx
import mlx.nn as nn

from eagle_mlx import EagleError, hub
from eagle_mlx.catalog import head_search
from eagle_mlx.catalog.base_model import names_of
from eagle_mlx.errors import ConfigError
from eagle_mlx.formats.fields import read_config

if TYPE_CHECKING:
    from eagle_mlx.heads import DraftHead
    from eagle_mlx.target import Target

_MOST_LAYERS = 8  # heads have few layers; anything with more is a model and is not downloaded as a head
_WITHOUT_MTP = "this conversion leaves out the model's own MTP layers; to fetch them"


def load_head(name: str | Path, target: Target, bits: int | None) -> DraftHead:
    """Load and quantize a head; warn on stderr if it is rarely accepted. Raises EagleError if it is not available."""
    from eagle_mlx.head_check import head_warning  # mlx-lm waits until a model is loaded
    from eagle_mlx.heads.precision import quantize_for

    head = head_search.load_found(name, target)
    quantize_for(head, target, bits)
    if (warning := head_warning(head, target)) is not None:
        print(f"warning: {warning}", file=sys.stderr)
    return head


def quantize(model: nn.Module, bits: Literal["4bit", "8bit"], group_size: int = 64) -> None:
    """Quantize a model's weights in place. Layers with rows that do not divide into groups stay unchanged."""

    def fits(_: str, module: nn.Module) -> bool:
        return hasattr(module, "to_quantized") and module.weight.shape[-1] % group_size == 0

    nn.quantize(model, group_size, int(bits.removesuffix("bit")), class_predicate=fits)
    mx.eval(model.parameters())


def usable_heads(
    target: str | Path, say: Callable[[str], None], digest: str | None = None, mode: str | None = None
) -> Iterator[head_search.FoundHead]:
    """Yield the available heads for a target, and fetch them if the target was named by its hub id.

    Naming a hub id already fetches the model's weights. For a folder, `say` reports the command to fetch a head
    instead. Heads whose license is not known to permit any use are reported, but not yielded.
    """
    by_hub_id = hub.full_id(hub.public_name(target))
    named = False
    for match in head_search.find_heads(target, digest, lambda text: say(f"head: {text}")):
        if mode is not None and match.mode not in (None, mode):
            continue
        if match.only_by_name:
            if not named:
                say(f"head: {match.about}: it is used only if you name it; type --head {match.head}")
            named = True
            continue
        if not match.here and not by_hub_id:
            say(f"head: not downloaded: {match.about}; to fetch it: eagle-heads pull {match.head}")
            break  # available heads come first
        try:
            hub.resolve(match.head, licenses=head_search.PERMITTING)
        except EagleError as e:
            say(f"head: {match.about}, but it cannot be fetched now: {e}")
            break
        yield match
    if mode != "eagle" and (command := head_search.where_mtp_layers_are(target)) is not None:
        say(f"head: {_WITHOUT_MTP}: {command}")


def list_all() -> int:
    """Print the heads on this machine and the published ones; return the exit status."""
    print("here:")
    for record in [*head_search.records(), *head_search.included()]:
        print(f"  {record}")
    print("published (*: in the hub's cache):")
    for head in head_search.known_heads():
        print(f"{'*' if hub.cached(head.head) else ' '} {head}")
    return 0


def list_for(target: str) -> int:
    """Print the heads for a target; return the exit status, 1 if there is none. Raises ConfigError."""
    matches = head_search.find_heads(target, say=lambda text: print(text, file=sys.stderr))
    for match in matches:
        ready = match.here and not match.only_by_name
        print(f"{match.about}{'' if ready else '; to use it: eagle-heads pull ' + match.head}")
    if (command := head_search.where_mtp_layers_are(target)) is not None:
        print(f"{_WITHOUT_MTP}: {command}")
    if not matches:
        if hub.hub_id(target) is None and not Path(target).expanduser().is_dir():
            raise ConfigError(f"there is no folder {target}")
        print(f"no head is known for {' or '.join(names_of(target))}; eagle-train makes one", file=sys.stderr)
    return 0 if matches else 1


def pull(name: str, target: str | None) -> int:
    """Download a head, or the first published one for the target `name`; return the exit status. Raises EagleError."""
    head = _published(name)
    repo, of = (head.head, target or head.target) if head else (hub.hub_id(name), target)
    if repo is None or Path(repo).is_dir():
        raise ConfigError(f"{name} is not a hub id; to use a head in a folder, give it to eagle-serve with --head")
    hub.announce(repo, name)
    if head is None:
        _check_size(repo)
    else:
        print(f"{head}, by {head.source}", file=sys.stderr)
    folder = hub.fetch(repo, name)
    if of is not None:
        head_search.register(repo, of, "fetched")
    print(folder)
    command = f"eagle-serve --target {of}" if of is not None else f"eagle-serve --target ITS_TARGET --head {repo}"
    print(f"to use it: {command}", file=sys.stderr)
    return 0


def _published(name: str) -> head_search.KnownHead | None:
    """Return the published head of that name, or else the first one for a target of that name.

    Raises ConfigError if no head for the target has a license that is known to permit any use.
    """
    for_target = head_search.known_heads_for(names_of(name))
    heads = [head for head in head_search.known_heads() if head.head.lower() == name.lower()]
    heads = heads or [head for head in for_target if head.license in head_search.PERMITTING]
    if for_target and not heads:
        commands = ", ".join(f"eagle-heads pull {head.head} (license {head.license})" for head in for_target)
        raise ConfigError(f"no head for {name} has a license that is known to permit any use; name one: {commands}")
    return next(iter(heads), None)


def _check_size(repo: str) -> None:
    """Raise ConfigError if `repo` is a whole model. Downloads only its config."""
    layers = read_config(hub.fetch_file(repo, "config.json").parent).get("num_hidden_layers")
    if isinstance(layers, int) and layers > _MOST_LAYERS:
        raise ConfigError(
            f"{repo} is a model with {layers} layers, not a head, and no head is known for it; see `eagle-heads list`"
        )
