"""Model names (a local folder, a hub id, or a bare name of the mlx-community), downloads and publishing."""

from __future__ import annotations

import hashlib
import re
import sys
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from contextlib import contextmanager, nullcontext, suppress
from functools import cache, partial
from pathlib import Path
from typing import cast

import huggingface_hub
import yaml
from huggingface_hub import constants, errors
from huggingface_hub.utils import validate_repo_id  # type: ignore[attr-defined]  # documented, but not in __all__

from eagle_mlx.errors import EagleError, OutputError, require

DEFAULT_OWNER = "mlx-community"
_WANTED = ("*.json", "*.jsonl", "*.safetensors", "*.jinja", "*.txt", "*.model", "*.tiktoken", "README.md")
_SAME_AGAIN = ("consolidated*", "original/*", "*/*.safetensors")
"""Further copies of the weights, in the layouts of Mistral and Meta and in subfolders."""
WEIGHTS = "[!.]*.safetensors"
"""A folder's weights. On disks like exFAT, macOS adds files such as `._model.safetensors`, which hold none."""
_TORCH = "pytorch_model*.bin"
_PART = re.compile(r"(.*)-\d+-of-(\d+)\.")  # of weights in several files
CERTIFICATE = "certificate.json"
"""A head's certificate in its folder, which `eagle-heads certify` writes."""
_REPLACED = (
    *("*.safetensors", "*.safetensors.index.json", _TORCH, "pytorch_model*.index.json"),
    *("report.json", "plots/*", CERTIFICATE),
)
"""Files of an older head to delete when a newer one is published."""
_POINTER = b"version https://git-lfs.github.com/spec/"  # the first bytes of a pointer (Git LFS, docs/spec.md)
_QUICK = 5.0  # timeout in seconds; a reachable hub answers in less than one
LOGIN = "log in with `hf auth login`, or set HF_TOKEN"
_TransportError = cast("type[Exception]", errors.HfHubHTTPError.__bases__[0])
"""The base class of the HTTP library's errors, which huggingface_hub does not catch."""
KNOWN_HEADS = Path(__file__).parent / "catalog" / "known_heads.yaml"
"""The table of published heads. Its `revision` is the commit at which a head is fetched."""
UNKNOWN = "unknown"


class UnreachableError(EagleError):
    """The hub does not answer, and the file or model is not in its cache."""


def resolve(name: str | Path, code: bool = False, licenses: Collection[str] = ()) -> Path:
    """Return the local folder of a model: an existing folder, or the hub's cache, to which the model is fetched.

    `Qwen3-32B-4bit` means `mlx-community/Qwen3-32B-4bit`. A head in `KNOWN_HEADS` is fetched at its revision there; if
    none is recorded, it stays as it was fetched first. PyTorch files are fetched only if there are no safetensors,
    Python files only with `code`. License, size and commit are printed first (`announce`). Raises EagleError if the
    name is not a folder and the hub has no such model, denies access or cannot be reached, and as `announce` does.
    """
    require("the name of a model", name, str | Path, "a folder or a hub id")
    folder = Path(name).expanduser()
    if folder.is_dir():
        return folder
    if folder.exists():
        raise EagleError(f"{folder} is a file; give its folder")
    repo = hub_id(name)
    if repo is None:
        raise EagleError(f"there is no folder {folder}")
    with suppress(UnreachableError) if cached(repo) else nullcontext():  # names of parts may be wrong
        announce(repo, str(name), licenses)
    return fetch(repo, str(name), code)


def head_folder(name: str | Path) -> Path:
    """Return a head's folder as `resolve` does, or that of the best head if `name` is the output of eagle-train."""
    folder = resolve(name)
    is_run = not (folder / "config.json").is_file() and (folder / "best" / "config.json").is_file()
    return folder / "best" if is_run else folder


def fetch(repo: str, name: str, code: bool = False) -> Path:
    """Return the folder of a repository as `resolve` does, after `announce`. name: the one in errors."""
    wanted, left_out = [*_WANTED, *(["*.py"] if code else [])], list(_SAME_AGAIN)
    download = partial(huggingface_hub.snapshot_download, repo, revision=_revision(repo), ignore_patterns=left_out)
    with _asking(repo, name, f"{name} is not a local folder, {repo}"):
        fetched = _until_interrupted(partial(download, allow_patterns=wanted))
        if not any(fetched.glob(WEIGHTS)):
            fetched = _until_interrupted(partial(download, allow_patterns=[*wanted, _TORCH]))
    return fetched


def _until_interrupted(download: Callable[[], str]) -> Path:
    """Return the folder of a download. After Ctrl-C, end it: huggingface_hub waits until its files are whole."""
    with ThreadPoolExecutor(1) as thread:
        folder = thread.submit(download)
        try:
            return Path(folder.result())
        except KeyboardInterrupt:
            while not folder.done():
                huggingface_hub.close_session()
                with suppress(ImportError):  # not promised, and not in huggingface_hub 1.5
                    from huggingface_hub.utils._xet import abort_xet_session

                    abort_xet_session()
                wait([folder], timeout=0.1)
            raise


def cached(repo: str, whole: bool = False) -> Path | None:
    """Return a repository's folder if its config and weights are in the hub's cache, else None. Uses no network.

    whole: only if all parts of the weights are there, unlike after Ctrl-C in a download.
    """
    config = huggingface_hub.try_to_load_from_cache(repo, "config.json", revision=_revision(repo))
    folder = Path(config).parent if isinstance(config, str) else None
    names = [file.name for file in weight_files(folder)] if folder is not None else []
    counts = Counter(match.groups() for match in map(_PART.match, names) if match)
    is_whole = all(count == int(total) for (_, total), count in counts.items())
    return folder if names and (is_whole or not whole) else None


def weight_files(folder: Path) -> list[Path]:
    """Return a folder's safetensors files, or its PyTorch files if it has no others."""
    return sorted(folder.glob(WEIGHTS)) or sorted(folder.glob(_TORCH))


@cache
def recorded_heads() -> dict[str, dict[str, str]]:
    """Return the rows of the table of published heads by hub id in lower case; a fact that it lacks is `UNKNOWN`."""
    table = yaml.safe_load(KNOWN_HEADS.read_text(encoding="utf-8"))
    facts = dict.fromkeys(("license", "size", "revision"), UNKNOWN)
    rows = ({**facts, **row, "target": target} for target, heads in table["heads"].items() for row in heads)
    return {row["head"].lower(): {**row, "source": table["sources"][row["source"]].format(**row)} for row in rows}


def _revision(repo: str) -> str | None:
    """Return the commit of a published head: the recorded one, else the one that was fetched first; None for others."""
    if (revision := recorded_heads().get(repo.lower(), {}).get("revision")) != UNKNOWN:
        return revision
    config = huggingface_hub.try_to_load_from_cache(repo, "config.json")
    return Path(config).parent.name if isinstance(config, str) else None


def announce(repo: str, name: str, licenses: Collection[str] = ()) -> None:
    """Print license, size and commit of a repository that will be fetched, on stderr; nothing if it is in the cache.

    They are what the hub says, else what the table of published heads says, else `UNKNOWN`; a license in the table
    counts only for the commit in the table. name: the one in errors. Raises UnreachableError if the hub does not answer
    at once, EagleError as in `resolve`, and if the license is not one of `licenses`; without any, every one will do.
    """
    if cached(repo, whole=True) is not None:
        return
    recorded = recorded_heads().get(repo.lower(), {})
    size, commit = (recorded.get(field, UNKNOWN) for field in ("size", "revision"))
    license_id = recorded.get("license", UNKNOWN) if commit != UNKNOWN else UNKNOWN
    with _asking(repo, name, f"{name} is not a local folder, {repo}"):
        info = huggingface_hub.HfApi().model_info(repo, revision=_revision(repo), files_metadata=True, timeout=_QUICK)
    files = {file.rfilename: file.size or 0 for file in info.siblings or ()}
    of_kinds = (sum(files[name] for name in files if _matches(name, kind)) for kind in ("*.safetensors", _TORCH))
    weights = next(filter(None, of_kinds), 0)
    license_id = str((info.card_data and info.card_data.license) or license_id)  # a card may list several
    size, commit = f"{weights / 1e9:.2f} GB" if weights else size, info.sha or commit
    print(f"fetching {repo}: license {license_id}, size {size}, revision {commit}", file=sys.stderr)
    if licenses and license_id not in licenses:
        raise EagleError(f"its license is {license_id}, so it is fetched only if you name it")


def fetch_file(repo: str, file: str, commit: str | None = None) -> Path:
    """Return one file of a repository from the hub's cache, or fetch it.

    Raises UnreachableError if the hub does not answer at once, EagleError as in `resolve` and if there is no such file.
    """
    with _asking(repo, repo, f"{file} of {repo}"):
        cached_file = huggingface_hub.try_to_load_from_cache(repo, file, revision=commit)
        if isinstance(cached_file, str):
            return Path(cached_file)
        try:
            url = huggingface_hub.hf_hub_url(repo, file, revision=commit)
            huggingface_hub.get_hf_file_metadata(url, timeout=_QUICK)  # a download would ask for 23 s
            return Path(huggingface_hub.hf_hub_download(repo, file, revision=commit))
        except errors.RemoteEntryNotFoundError as e:
            raise EagleError(f"{repo} has no {file}; use the repository in which the model was published") from e


@contextmanager
def _asking(repo: str, name: str, missing: str) -> Iterator[None]:
    """Turn errors of a download into one-line EagleErrors; `missing` names the file or model."""
    try:
        yield
    except errors.GatedRepoError as e:
        raise EagleError(_reason(repo, e)) from e
    except errors.RepositoryNotFoundError as e:
        what = f"neither a local folder nor a model on the hub ({repo})"
        raise EagleError(f"{name} is {what}; if it is private, {LOGIN}") from e
    except (errors.LocalEntryNotFoundError, errors.OfflineModeIsEnabled, _TransportError) as e:
        error = e if isinstance(e, errors.HfHubHTTPError) else e.__cause__
        if isinstance(error, errors.HfHubHTTPError):
            raise EagleError(_reason(repo, error)) from e
        raise UnreachableError(
            f"{missing} is not in the hub's cache, and the hub cannot be reached; "
            "check the path, or fetch the model while online"
        ) from e
    except (errors.HFValidationError, OSError) as e:
        raise EagleError(_reason(repo, e)) from e


def _reason(repo: str, error: BaseException) -> str:
    """Return in one line why the hub did not do something with a repository, and a remedy if there is one."""
    text = " ".join(str(getattr(error, "server_message", None) or error).split()) or type(error).__name__
    status = error.response.status_code if isinstance(error, errors.HfHubHTTPError) else None
    if isinstance(error, errors.GatedRepoError):
        return f"{repo} is gated: request access at {constants.ENDPOINT}/{repo}, then {LOGIN} for that account"
    if status == 401:
        return f"the hub does not know the token used for {repo} ({text}); {LOGIN}"
    if status in (403, 404, 409):
        return f"{repo} is not open to this token ({text}); check its name, or {LOGIN} for an account with access"
    return f"{repo} at {constants.ENDPOINT}: {text}"


def hub_id(name: str | Path) -> str | None:
    """Return the hub id that a name stands for; None if it can only be a path."""
    repo = str(name) if "/" in str(name) else f"{DEFAULT_OWNER}/{name}"
    with suppress(errors.HFValidationError):
        validate_repo_id(repo)
        return repo
    return None


def public_name(name: str | Path) -> str:
    """Return a model's name for files that others get: its hub id, or its folder's name without the path."""
    folder = Path(name).expanduser()
    return folder.resolve().name if folder.is_dir() else hub_id(name) or folder.name


def why_damaged(file: Path, otherwise: str) -> str:
    """Explain why a file of weights cannot be read: as a Git LFS pointer, or with the reason `otherwise`."""
    with suppress(OSError), file.open("rb") as opened:
        if opened.read(len(_POINTER)) == _POINTER:
            return f"{file} is a Git LFS pointer and not the weights; type git lfs pull in {file.parent}"
    return otherwise


def full_id(name: str) -> bool:
    """Return whether this is a hub id `owner/name` and not a local folder."""
    with suppress(EagleError):
        check_full_id(name)
        return not Path(name).is_dir()
    return False


def check_full_id(name: str) -> None:
    """Raise OutputError if this is not a valid hub id `owner/name`."""
    try:
        huggingface_hub.hf_hub_url(name, "config.json")  # checks the name without network access
    except errors.HFValidationError as e:
        raise OutputError(f"{name!r} is not a valid repository name: {' '.join(str(e).split())}") from e
    if "/" not in name:
        raise OutputError(f"{name!r} is not a repository name: write it as user/{name}")


def weights_digest(folder: Path) -> str:
    """Return the SHA-256 of a head's weights, to compare the heads of two folders."""
    digest = hashlib.sha256()
    for file in weight_files(folder):
        with file.open("rb") as opened:
            digest.update(hashlib.file_digest(opened, "sha256").digest())
    return digest.hexdigest()


def publish_head(
    folder: str | Path,
    repo: str,
    *,
    token: str | None = None,
    private: bool = False,
    overwrite: bool = False,
    message: str = "Publish a draft head",
) -> huggingface_hub.CommitInfo:
    """Upload a folder as the repository `user/name` in one commit, creating the repository if necessary.

    The folder's README.md is the model card, which the hub validates first. The default `token` is HF_TOKEN or the
    login of huggingface_hub. With `overwrite`, the files replace an older head; other files there stay. Raises
    OutputError, after which nothing has been published, if the name or the card is invalid, the token is missing or
    lacks write access, the hub cannot be reached, the repository has files and `overwrite` is not set, or it is public
    although `private` is set.
    """
    folder = Path(folder)
    check_full_id(repo)
    token = token or huggingface_hub.get_token()
    if token is None:
        raise OutputError(f"no token with write access for {constants.ENDPOINT}: {LOGIN}, or give --token")
    api = huggingface_hub.HfApi(token=token)
    with _told(repo, "nothing was published"):
        huggingface_hub.ModelCard((folder / "README.md").read_text(encoding="utf-8")).validate()
        present = _files(api, repo, private)
        if present is None:
            api.create_repo(repo, private=private)
    files = present or ()
    if files and not overwrite:
        raise OutputError(
            f"{repo} already exists and has {', '.join(files[:4])}{', ...' if len(files) > 4 else ''}; name another "
            "repository, or replace its head with --overwrite"
        )
    ours = {path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file()}
    stale = [name for name in files if name not in ours and any(_matches(name, pattern) for pattern in _REPLACED)]
    left = f"{repo} was created but is empty: run the same command again" if present is None else f"{repo} is unchanged"
    with _told(repo, left):
        return api.upload_folder(
            repo_id=repo, folder_path=folder, commit_message=message, delete_patterns=stale or None
        )


def _files(api: huggingface_hub.HfApi, repo: str, private: bool) -> Sequence[str] | None:
    """Return a repository's files, except those that the hub adds; None if there is no such repository."""
    try:
        info = api.model_info(repo)
    except errors.RepositoryNotFoundError:
        return None
    if private and info.private is False:
        raise OutputError(f"{repo} already exists and is public; make it private on its page, or leave out --private")
    return sorted(file.rfilename for file in info.siblings or () if file.rfilename != ".gitattributes")


def _matches(name: str, pattern: str) -> bool:
    """Return whether a repository's file matches a pattern, with folders as in pathlib."""
    return Path(name).match(pattern) and name.count("/") == pattern.count("/")


@contextmanager
def _told(repo: str, left: str) -> Iterator[None]:
    """Turn errors of an upload into one-line OutputErrors, with the state that is `left` on the hub."""
    try:
        yield
    except (OSError, ValueError, RuntimeError, _TransportError) as e:
        cause = e.__cause__ if isinstance(e, RuntimeError) else None  # a failed upload of a large file
        raise OutputError(f"{_reason(repo, cause or e)}; {left}") from e
