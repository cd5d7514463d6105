"""The command `eagle-publish`: upload a local head with its card to the hub."""

from __future__ import annotations

import shutil
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import mlx.core as mx

from eagle_mlx import hub
from eagle_mlx.catalog.base_model import check_id, check_width
from eagle_mlx.command import exit_code, read
from eagle_mlx.errors import ConfigError
from eagle_mlx.formats.tensors import read_tensors
from eagle_mlx.heads import load_head
from eagle_mlx.heads.precision import in_dtype, quantization_of, quantize_for
from eagle_mlx.setting import REQUIRED, Group, setting

from ..convert.conversion import OURS
from .bundle import CARD, LICENSES, HeadFiles, listing, read_source, write_bundle
from .card import make_card, of_bench, of_training

_HELP = """\
Publish a head with a model card that gives its target, its acceptance and how to use it.

DIR is a head's folder (config.json and .safetensors) or the output folder of eagle-train. From the latter, the best
head is uploaded with the run's report and plots.
"""
_EXAMPLES = """\
examples:
  eagle-publish out/head --repo you/qwen3-4b-eagle3 --license apache-2.0 --dry-run
  eagle-bench --target Qwen3-4B-4bit --head out/head/best --depth 1 2 4 6 --prompts chats.jsonl --json chats.json
  eagle-publish out/head --repo you/qwen3-4b-eagle3 --license apache-2.0 --base-model Qwen/Qwen3-4B --figures chats.json
  eagle-publish out/head --repo you/qwen3-4b-eagle3 --license apache-2.0 --bits 4    and you/qwen3-4b-eagle3-4bit
  eagle-publish out/head --repo you/qwen3-4b-eagle3 --license apache-2.0 --overwrite --message 'Trained for longer'

--dry-run shows the files and the card without using the network.

The token needs write access (https://huggingface.co/settings/tokens). It is the first one found in:
  1. --token
  2. the environment variable HF_TOKEN
  3. the login saved by `hf auth login`
Set HF_ENDPOINT to use another hub than https://huggingface.co.
"""


@dataclass(frozen=True)
class CardOptions(Group):
    """What the model card says."""

    license: str | None = setting(
        None, "license id on the hub, such as apache-2.0, mit or llama3.1 (required)", metavar="ID"
    )
    license_name: str | None = setting(None, "with --license other: its name")
    license_link: str | None = setting(None, "with --license other: its address", metavar="URL")
    base_model: str | None = setting(
        None,
        "hub id of the model that the head is for (default: the target in the head's config); if the head was "
        "trained on a conversion, give the original, so that other servers find it",
        metavar="USER/NAME",
    )
    figures: tuple[Path, ...] = setting(
        (), "output of eagle-bench --json; repeatable, for several sets of prompts", metavar="FILE", repeat=True
    )


@dataclass(frozen=True)
class UploadOptions(Group):
    """How to upload."""

    bits: Literal[4, 8] | None = setting(None, "also publish a quantized copy for MLX, as USER/NAME-4bit or -8bit")
    dry_run: bool = setting(False, "show the files and the card, without the network")
    private: bool = setting(False, "make the repository private (default: public)")
    overwrite: bool = setting(False, "replace a head that the repository has already")
    message: str | None = setting(None, "commit message", metavar="TEXT")
    token: str | None = setting(
        None, "hub token (default: HF_TOKEN, then the login of `hf auth login`)", metavar="TOKEN"
    )


@dataclass(frozen=True)
class PublishOptions(Group):
    """A head, where to publish it, and its card."""

    folder: Path = setting(REQUIRED, "the head's folder, or the output of eagle-train", name="DIR", positional=True)
    repo: str = setting(REQUIRED, "repository, created if necessary", metavar="USER/NAME")
    card: CardOptions = CardOptions()
    upload: UploadOptions = UploadOptions()

    def _check(self) -> None:
        hub.check_full_id(self.repo)
        card = self.card
        if not card.license:
            raise ConfigError(
                "no license: give one with --license (apache-2.0, mit, llama3.1, ...), or nobody may use the head. "
                "Check the licenses of the target and of the training data first"
            )
        if card.license == "other" and not (card.license_name and card.license_link):
            raise ConfigError("--license other needs --license-name and --license-link")
        if card.license != "other" and (card.license_name or card.license_link):
            raise ConfigError("--license-name and --license-link go with --license other")


def main(argv: Sequence[str] | None = None) -> int:
    """Publish a head; return 0, 2 for an error that the user can fix, or 130 if interrupted."""
    return exit_code(lambda: run(read(PublishOptions, argv, "eagle-publish", _HELP, _EXAMPLES)))


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
        for each, files in folders.items():
            _send(each, files, options.upload, f"Publish {source.kind.one_head} for {base}")


def _send(repo: str, folder: Path, upload: UploadOptions, message: str) -> None:
    if upload.dry_run:
        print(f"would go to {repo}{', private' if upload.private else ''}:\n{listing(folder)}\n")
        print(f"{CARD}:\n\n{(folder / CARD).read_text(encoding='utf-8')}", end="")
        return
    print(f"to {repo}:\n{listing(folder)}", file=sys.stderr)
    done = hub.publish_head(
        folder,
        repo,
        token=upload.token,
        private=upload.private,
        overwrite=upload.overwrite,
        message=upload.message or message,
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
    """Write the source's head quantized, without the training report, to a new folder, and read it back.

    Raises ConfigError if the head is quantized already, or if no layer is suitable.
    """
    if quantization_of(source.head) is not None:
        raise ConfigError(f"{source.folder} is quantized already; use --bits with the unquantized head")
    found = {x.dtype for x in read_tensors(source.folder).values()}
    dtype = mx.float16 if mx.float16 in found else mx.bfloat16
    head: Any = in_dtype(load_head(source.folder), dtype)  # scales are computed in the dtype of the file
    quantize_for(head, None, bits)
    noted = {name: value for name, value in source.noted.items() if name not in OURS}
    target = next(iter(source.target_names), None)
    source.kind.formats[0].save(head, folder, target_name=target, extra=noted, dtype=dtype)
    for file in (file for pattern in LICENSES for file in source.folder.glob(pattern)):
        shutil.copyfile(file, folder / file.name)
    return read_source(folder)


if __name__ == "__main__":
    sys.exit(main())
