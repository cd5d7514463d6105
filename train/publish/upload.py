"""Write a head's bundle and upload it."""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path

from huggingface_hub import ModelCard
from jinja2 import TemplateError

from eagle_mlx import hub
from eagle_mlx.catalog.base_model import check_id, check_width
from eagle_mlx.errors import ConfigError, in_one_line

from ..run import REPORT
from . import PublishOptions, UploadOptions
from .bundle import CARD, HeadFiles, listing, read_source, write_bundle
from .card import make_card, of_bench, of_training


def run(options: PublishOptions) -> None:
    repo = options.repo
    source = read_source(options.folder)
    base = _base_model(source, options.card.base_model)
    if options.card.base_model is not None:
        check_width(base, source.head.target_hidden_size, online=not options.upload.dry_run)
    card = _card(source, options, base)
    if (source.folder / CARD).exists():
        print(f"note: {source.folder / CARD} is not uploaded; a new card is written", file=sys.stderr)
    with tempfile.TemporaryDirectory(prefix="eagle-publish-") as name:
        write_bundle(Path(name), source, card, base)
        _send(repo, Path(name), options.upload, f"Publish {source.kind.one_head} for {base}")


def _card(source: HeadFiles, options: PublishOptions, base: str) -> ModelCard:
    """Return the head's card. Raises ConfigError if the report or the figures are not as they were written."""
    repo, target = options.repo, source.trained_on or base
    try:
        held_out = of_training(source, target)
        figures = [held_out] if held_out is not None else []
        figures += [of_bench(file, source, repo, target) for file in options.card.figures]
        return make_card(source, repo, base, options.card, figures)
    except (LookupError, TypeError, ValueError, AttributeError, OverflowError, TemplateError) as e:
        files = [source.folder.parent / REPORT] if source.report else []
        named = " or ".join(map(str, [*files, *options.card.figures]))
        raise ConfigError(f"{named} has values of other types than were written ({in_one_line(e)}); restore it") from e


def _send(repo: str, folder: Path, upload: UploadOptions, message: str) -> None:
    if upload.dry_run:
        print(f"would go to {repo}{', private' if upload.private else ''}:\n{listing(folder)}\n")
        print(f"{CARD}:\n\n{(folder / CARD).read_text(encoding='utf-8')}", end="")
        print("note: the hub checks the card and its license id before anything is published", file=sys.stderr)
        return
    print(f"to {repo}:\n{listing(folder)}", file=sys.stderr)
    message, private = upload.message or message, upload.private
    done = hub.publish_head(
        folder, repo, token=upload.token, private=private, overwrite=upload.overwrite, message=message
    )
    print(f"published: {done.repo_url} (commit {done.oid[:12]})")


def _base_model(source: HeadFiles, given: str | None) -> str:
    if given is not None:
        return check_id(given)
    if source.base_model is None:
        named = next(iter(source.target_names), None)
        what = f"names its target {named!r}, which is not a hub id" if named else "does not name its target"
        raise ConfigError(f"the head's config {what}; name the head's model with --base-model user/name")
    return source.base_model
