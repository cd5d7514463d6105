"""Hidden states on disk: shards in 16 or 8 bits, a manifest with checksums, and a writer that can resume.

A folder of shards has a temporary name until all of them are complete.
"""

from __future__ import annotations

import hashlib
import json
import shutil
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, Self

import numpy as np
import safetensors.numpy
from numpy.typing import NDArray
from safetensors import SafetensorError, safe_open

from eagle_mlx.errors import OutputError, ShardError, check
from eagle_mlx.files import FINDER, PART, check_free, locked, swap, sync_folder, write_whole
from eagle_mlx.hidden_states import Bits, Example, HiddenStates, block_size, dequantize, quantize

BITS = (16, 8)
SUFFIX = ".safetensors"
MANIFEST = "manifest.json"
UNFINISHED = "unfinished.json"  # the manifest of an unfinished folder lists the complete shards
FORMAT, VERSION = "eagle-mlx-shards", 3


@dataclass(frozen=True)
class ShardMeta:
    """Describes the hidden states. Aux layer id k means the output of layer k, counted from 0."""

    target: str
    hidden_size: int
    vocab_size: int
    aux_layers: tuple[int, ...]
    bits: int = 16  # per value on disk: 16 is bfloat16, 8 is the output of `quantize`
    adapter: str = ""  # digest of the target's LoRA adapters (`eagle_mlx.adapters.Adapter`); empty if it had none
    template: str = ""  # digest of the chat template and its arguments; empty if unknown

    def __post_init__(self) -> None:
        check(self.bits in BITS, f"hidden states have 16 or 8 bits per value, not {self.bits}")


@dataclass(frozen=True)
class ShardFile:
    name: str
    sha256: str
    size: int  # in bytes
    samples: int
    tokens: int
    loss_tokens: int  # with a loss mask of 1

    @property
    def index(self) -> int:
        return int(self.name.removeprefix("shard-").removesuffix(SUFFIX))

    @classmethod
    def of(cls, index: int, data: bytes, examples: Sequence[Example]) -> ShardFile:
        tokens, loss_tokens = sum(map(len, examples)), sum(int(example.loss_mask.sum()) for example in examples)
        digest = hashlib.sha256(data).hexdigest()
        return cls(shard_name(index), digest, len(data), len(examples), tokens, loss_tokens)

    def fault(self, folder: Path) -> str | None:
        """Return what is wrong with the file, as a phrase that follows its name; None if it matches the manifest."""
        path = folder / self.name
        try:
            size = path.stat().st_size
            if size != self.size:
                what = "cut short" if size < self.size else "longer than it was"
                return f"is {what}: {size:,} bytes instead of {self.size:,}"
            with path.open("rb") as file:
                digest = hashlib.file_digest(file, "sha256").hexdigest()
        except FileNotFoundError:
            return "is missing, but the manifest lists it"
        except OSError as e:
            return f"cannot be read: {e.strerror}"
        return None if digest == self.sha256 else "is damaged: its SHA-256 is not the one in the manifest"


@dataclass(frozen=True)
class Manifest:
    meta: ShardMeta
    files: tuple[ShardFile, ...] = ()
    made_from: Mapping[str, str] = field(default_factory=dict)
    """Everything that determines the content of the shards, in words. Empty if unknown."""

    def to_json(self) -> bytes:
        """Return the manifest's file, with the SHA-256 of its own content."""
        content = {"format": FORMAT, "version": VERSION, **asdict(self)}
        return (json.dumps({**content, "sha256": _digest(content)}, indent=1) + "\n").encode()

    @classmethod
    def read(cls, path: Path) -> Manifest:
        """Read a manifest. Raises ShardError with the file's name if it is damaged or of another format; OSError."""
        try:
            content = json.loads(path.read_bytes())
            digest = content.pop("sha256")
            if (content["format"], content["version"]) != (FORMAT, VERSION):
                raise ShardError(
                    f"{path} is of format {content['format']} version {content['version']}, not {FORMAT} {VERSION}; "
                    "read it with the version of EAGLE-MLX that wrote it"
                )
            if digest != _digest(content):
                raise ShardError(f"{path} is damaged: its SHA-256 does not match its content; {_remedy(path)}")
            meta = {**content["meta"], "aux_layers": tuple(content["meta"]["aux_layers"])}
            files = tuple(ShardFile(**entry) for entry in content["files"])
            return cls(ShardMeta(**meta), files, content["made_from"])
        except (ValueError, KeyError, TypeError, AttributeError) as e:
            raise ShardError(f"{path} is damaged and cannot be read ({e}); {_remedy(path)}") from e

    def differences(self, made_from: Mapping[str, str]) -> str:
        """Return how `made_from` differs from this folder's, in words."""
        names = {**made_from, **self.made_from}
        pairs = {name: (self.made_from.get(name), made_from.get(name)) for name in names}
        return "; ".join(
            f"{name}: {'not recorded' if there is None else there} there, {'not recorded' if now is None else now} now"
            for name, (there, now) in pairs.items()
            if there != now
        )


def bytes_per_token(meta: ShardMeta) -> int:
    """Return the bytes on disk per token, without headers: its id, its mask, and the aux and last layers' states."""
    size = meta.hidden_size
    layer = 2 * size if meta.bits == 16 else size + 2 * (size // block_size(size))
    return 4 + 1 + layer * (len(meta.aux_layers) + 1)


def shard_name(index: int) -> str:
    return f"shard-{index:05d}{SUFFIX}"


def encode(examples: Sequence[Example], meta: ShardMeta) -> bytes:
    """Return the content of a shard's file; the same examples give the same bytes."""
    tensors: dict[str, NDArray[Any]] = {
        "tokens": np.concatenate([example.tokens for example in examples]).astype(np.int32),
        "loss_mask": np.concatenate([example.loss_mask for example in examples]).astype(np.uint8),
        "lengths": np.array([len(example) for example in examples], np.int32),
        "keys": np.array([example.key for example in examples], np.uint64),
    }
    states = [example.states for example in examples if example.states is not None]
    for name, parts in (("aux", [part.features for part in states]), ("last", [part.last for part in states])):
        if meta.bits == 8:
            pairs = [quantize(part, meta.hidden_size) for part in parts]
            tensors[name], tensors[f"{name}_scales"] = map(np.concatenate, zip(*pairs, strict=True))
        else:
            tensors[name] = np.concatenate(parts)
    return safetensors.numpy.save(tensors)


def decode(path: Path, rows: slice, meta: ShardMeta, number: int = 0) -> Example:
    """Read the example with this number in a shard's file; its tokens are in `rows`."""
    with safe_open(str(path), "numpy") as file:

        def states(name: str) -> Bits:
            values: NDArray[Any] = file.get_slice(name)[rows]
            if meta.bits == 16:
                return values
            return dequantize(values, file.get_slice(f"{name}_scales")[rows], meta.hidden_size)

        tokens, loss_mask = file.get_slice("tokens")[rows], file.get_slice("loss_mask")[rows]
        held = HiddenStates(meta.aux_layers, states("aux"), states("last"))
        return Example(tokens, loss_mask, held, int(file.get_slice("keys")[number : number + 1][0]))


def _digest(content: Mapping[str, Any]) -> str:
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()


def _remedy(path: Path) -> str:
    return (
        f"copy {path.parent} again, or capture again with `eagle-data collect`; with --resume, the same command keeps "
        "the good shards"
    )


def unfinished_folder(folder: str | Path) -> Path:
    """Return the folder of an unfinished capture: `out/shards.unfinished` for `out/shards`."""
    path = Path(folder).absolute()
    return path.with_name(path.name + ".unfinished")


class ShardReader:
    """Reads a folder of shards. `reader[i]` is one sample; iterate to get all of them in order.

    States are returned as bfloat16 whatever their bits on disk. The manifest is checked at once, and each shard's
    SHA-256 on first use; `verify()` checks all shards. Raises ShardError if a file is missing, cut short or damaged,
    naming the file, and if a capture is not finished.
    """

    def __init__(self, folder: str | Path):
        self.folder = Path(folder)
        self.manifest = read_manifest(self.folder)
        self.meta, self.files = self.manifest.meta, list(self.manifest.files)
        self._ends = np.cumsum([f.samples for f in self.files])
        self._starts: dict[int, NDArray[np.int64]] = {}  # of each checked shard: samples' starts, then its tokens

    def __len__(self) -> int:
        return sum(f.samples for f in self.files)

    @property
    def tokens(self) -> int:
        return sum(f.tokens for f in self.files)

    @property
    def loss_tokens(self) -> int:
        return sum(f.loss_tokens for f in self.files)

    def __getitem__(self, index: int) -> Example:
        shard, row = self._place(index)
        rows = slice(*map(int, self._check(shard)[row : row + 2]))
        path = self.folder / self.files[shard].name
        try:
            return decode(path, rows, self.meta, row)
        except (SafetensorError, OSError) as e:  # it was changed after its check
            raise ShardError(f"{path} can no longer be read: {e}; {_remedy(path)}") from e

    def __iter__(self) -> Iterator[Example]:
        return (self[i] for i in range(len(self)))

    def where(self, index: int) -> str:
        """Return a sample's file and its row there, counted from 0, in words. Raises IndexError."""
        shard, row = self._place(index)
        return f"row {row} of {self.folder / self.files[shard].name}"

    def _place(self, index: int) -> tuple[int, int]:
        """Return the shard of a sample, and its index in the shard."""
        if not -len(self) <= index < len(self):
            raise IndexError(f"sample {index} of {len(self)}")
        index %= len(self)
        shard = int(np.searchsorted(self._ends, index, side="right"))
        return shard, index - (int(self._ends[shard - 1]) if shard else 0)

    def verify(self) -> None:
        for shard in range(len(self.files)):
            self._check(shard)

    def _check(self, shard: int) -> NDArray[np.int64]:
        if shard not in self._starts:
            entry = self.files[shard]
            path = self.folder / entry.name
            if (wrong := entry.fault(self.folder)) is not None:
                raise ShardError(f"{path} {wrong}; {_remedy(path)}")
            try:
                with safe_open(str(path), "numpy") as file:
                    lengths = file.get_tensor("lengths")
            except SafetensorError as e:
                raise ShardError(f"{path} is not a shard: {e}; {_remedy(path)}") from e
            self._starts[shard] = np.concatenate([[0], np.cumsum(lengths, dtype=np.int64)])
        return self._starts[shard]


def read_manifest(folder: Path) -> Manifest:
    """Read a folder's manifest. Raises ShardError if it is missing or damaged, or if the capture is unfinished."""
    path = folder / MANIFEST
    try:
        return Manifest.read(path)
    except (FileNotFoundError, NotADirectoryError) as e:
        places = (folder, unfinished_folder(folder))
        part = next((place for place in places if (place / UNFINISHED).is_file()), None)
        if part is None:
            raise ShardError(f"{folder} is not a folder of shards: it has no {MANIFEST}") from e
        raise ShardError(
            f"{folder} is not finished: its capture was interrupted or is still running, in {part}; "
            "run the same `eagle-data` command again to continue"
        ) from e
    except OSError as e:
        raise ShardError(f"{path} cannot be read: {e.strerror}") from e


class ShardWriter:
    """Writes shards into a folder, which has a temporary name until it is complete.

    Use it in a `with` statement. If the block raises or the process is killed, the complete shards stay in
    `unfinished_folder(folder)`, and the next writer with equal `made_from` has them in `files`. `made_from` names
    everything that determines the shards' content. With `resume`, a finished folder with damaged shards becomes an
    unfinished capture again. Raises OutputError if the folder exists and neither `overwrite` nor `resume` is set, if it
    was made from something else (`overwrite` replaces it), if another process is writing, or if the disk fails.
    """

    def __init__(
        self,
        folder: str | Path,
        meta: ShardMeta,
        made_from: Mapping[str, str],
        overwrite: bool = False,
        resume: bool = False,
    ):
        self.folder = Path(folder)
        self.files: dict[int, ShardFile] = {}  # the complete shards, by number
        self.part = unfinished_folder(folder)  # the folder that holds the shards for now
        self._overwrite, self._resume = overwrite, resume
        self._whole = False
        self._manifest = Manifest(meta, made_from=dict(made_from))
        self._lock = ExitStack()

    def __enter__(self) -> Self:
        try:
            if self._resume and (self.folder / MANIFEST).exists():
                self.files = self._kept(self.folder)
                self._whole = len(self.files) == len(read_manifest(self.folder).files)
                if not self._whole:
                    self.folder.rename(self.part)
            else:
                check_free(self.folder, self._overwrite)
            if not self._whole:
                with ExitStack() as stack:
                    self.part.mkdir(parents=True, exist_ok=True)
                    stack.enter_context(locked(self.part))
                    self._begin()
                    self._lock = stack.pop_all()
        except OSError as e:
            raise OutputError(f"{self.folder} cannot be created: {e.strerror or e}") from e
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        with self._lock:
            try:
                if error is None and not self._whole:
                    self._finish()
            except OSError as e:
                raise self._refused(e) from e
            finally:
                if not self.files:
                    shutil.rmtree(self.part, ignore_errors=True)

    def write(self, index: int, examples: Sequence[Example]) -> None:
        """Write shard `index` and its entry in the manifest; both are on disk when this returns."""
        data = encode(examples, self._manifest.meta)
        entry = ShardFile.of(index, data, examples)
        try:
            write_whole(self.part / entry.name, data)
            self.files[index] = entry
            self._write_manifest(UNFINISHED)
        except OSError as e:
            raise self._refused(e) from e

    def _begin(self) -> None:
        """Keep the complete shards of an unfinished capture, and remove its other files."""
        names = {path.name for path in self.part.iterdir()} - {UNFINISHED, MANIFEST, FINDER}
        if strange := [name for name in names if not name.endswith((PART, SUFFIX))]:
            raise OutputError(
                f"{self.part} also contains {strange[0]}, which is not part of a capture; move the folder away"
            )
        try:
            self.files = self._kept(self.part)
        except OutputError:
            if not self._overwrite:
                raise
        self._write_manifest(UNFINISHED)
        whole = {UNFINISHED, *(entry.name for entry in self.files.values())}
        for path in self.part.iterdir():
            if path.name not in whole:
                path.unlink()

    def _kept(self, folder: Path) -> dict[int, ShardFile]:
        """Return the good shards of a capture. Raises OutputError if it is of something else."""
        path = next((path for name in (UNFINISHED, MANIFEST) if (path := folder / name).is_file()), None)
        if path is None:
            return {}
        try:
            manifest = Manifest.read(path)
        except ShardError as e:
            raise OutputError(f"{path} is damaged, so the capture cannot continue; remove {folder}") from e
        if wrong := manifest.differences(self._manifest.made_from):
            raise OutputError(
                f"{folder} has a capture of something else ({wrong}); use the original options and data, or replace it "
                "with --overwrite"
            )
        return {entry.index: entry for entry in manifest.files if entry.fault(folder) is None}

    def _write_manifest(self, name: str) -> None:
        manifest = replace(self._manifest, files=tuple(self.files[index] for index in sorted(self.files)))
        write_whole(self.part / name, manifest.to_json())

    def _finish(self) -> None:
        if missing := set(range(max(self.files, default=0))) - set(self.files):
            raise ValueError(f"{shard_name(min(missing))} was never written, so {self.folder} is incomplete")
        self._write_manifest(MANIFEST)
        (self.part / UNFINISHED).unlink()
        sync_folder(self.part)
        swap(self.part, self.folder.absolute())
        sync_folder(self.folder.absolute().parent)

    def _refused(self, error: OSError) -> OutputError:
        kept = "nothing was left behind"
        if self.files:
            kept = f"{len(self.files):,} shards are kept in {self.part}: make room, and the same command continues"
        return OutputError(f"{self.folder} could not be written: {error.strerror or error}; {kept}")
