"""Write a head's bundles and upload them."""

from __future__ import annotations

import shutil
import sys
import tempfile
from pathlib import Path
from typing import Any

import mlx.core as mx

from eagle_mlx import hub
from eagle_mlx.catalog.base_model import check_id, check_width
from eagle_mlx.errors import ConfigError
from eagle_mlx.formats.tensors import read_tensors
from eagle_mlx.heads import load_head
from eagle_mlx.heads.precision import in_dtype, quantization_of, quantize_for

from ..convert.conversion import OURS
from . import PublishOptions, UploadOptions
from .bundle import CARD, LICENSES, HeadFiles, listing, read_source, write_bundle
from .card import make_card, of_bench, of_training


def run(options: PublishOptions) -> None:
    """Publish the head, and print its address."""
    repo, bits = options.repo, options.upload.bits
    source = read_source(options.folder)
    base = _base_model(source, options.card.base_model)
    if options.card.base_model is not None:
        check_width(base, source.head.target_hidden_size, online=not options.upload.dry_run)
    target = source.trained_on or base
    held_out = of_training(source, target)
    figures = [held_out] if held_out is not None else []
    figures += [of_bench(file, source, repo, target) for file in options.card.figures]
    small = f"{repo}-{bits}bit"  # a repository of its own, as in mlx-community, so that users download only one
    license = (options.card.license or "", options.card.license_name, options.card.license_link)
    if (source.folder / CARD).exists():
        print(f"note: {source.folder / CARD} is not uploaded; a new card is written", file=sys.stderr)
    with tempfile.TemporaryDirectory(prefix="eagle-publish-") as name:
        folder = Path(name)
        folders = {repo: folder / "original"}
        card = make_card(source, repo, base, license, figures, quantized=small if bits else None)
        write_bundle(folders[repo], source, card, base)
        if bits:
            hub.check_full_id(small)
            folders[small] = folder / "bundle"
            second = quantized(source, bits, folder / "quantized")
            write_bundle(folders[small], second, make_card(second, small, base, license, (), portable=repo), base)
        for place, files in folders.items():
            _send(place, files, options.upload, f"Publish {source.kind.one_head} for {base}")


def _send(repo: str, folder: Path, upload: UploadOptions, message: str) -> None:
    if upload.dry_run:
        print(f"would go to {repo}{', private' if upload.private else ''}:\n{listing(folder)}\n")
        print(f"{CARD}:\n\n{(folder / CARD).read_text(encoding='utf-8')}", end="")
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


def quantized(source: HeadFiles, bits: int, folder: Path) -> HeadFiles:
    """Write the source's head quantized, without the report, and read it back. Raises ConfigError if it cannot be."""
    if quantization_of(source.head) is not None:
        raise ConfigError(f"{source.folder} is quantized already; use --bits with the unquantized head")
    dtypes = {x.dtype for x in read_tensors(source.folder).values()}
    dtype = mx.float16 if mx.float16 in dtypes else mx.bfloat16
    head: Any = in_dtype(load_head(source.folder), dtype)  # scales are computed in the dtype of the file
    quantize_for(head, None, bits)
    noted = {name: value for name, value in source.noted.items() if name not in OURS}
    target = next(iter(source.target_names), None)
    source.kind.formats[0].save(head, folder, target_name=target, extra=noted, dtype=dtype)
    for pattern in LICENSES:
        for file in source.folder.glob(pattern):
            shutil.copyfile(file, folder / file.name)
    return read_source(folder)
