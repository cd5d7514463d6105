"""Hidden-state shards: safetensors files with a manifest that holds their SHA-256; one writer, one reader."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import numpy as np
import safetensors.numpy
from numpy.typing import NDArray
from safetensors import SafetensorError, safe_open

from eagle_mlx.errors import ShardError
from eagle_mlx.folders import new_folder

MANIFEST = "manifest.json"
FORMAT = "eagle-mlx-shards"
VERSION = 1
REMEDY = "copy the folder again, or remove it and capture again with `eagle-data collect`"


@dataclass(frozen=True)
class Sample:
    """One conversation with the target's hidden states. T tokens, n aux layers, hidden size H."""

    tokens: NDArray[np.int32]
    """[T]"""
    loss_mask: NDArray[np.uint8]
    """[T], 1 on the tokens to learn."""
    aux: NDArray[np.float16]
    """[T, n * H]: the outputs of the aux layers, side by side in the order of `ShardMeta.aux_layers`."""
    last: NDArray[np.float16]
    """[T, H]: the last layer's output, before the final norm."""


@dataclass(frozen=True)
class ShardMeta:
    """What the hidden states are of. An aux layer id k means the output of layer k, counted from 0."""

    target: str
    hidden_size: int
    vocab_size: int
    aux_layers: tuple[int, ...]
    dtype: str = "float16"


@dataclass(frozen=True)
class ShardFile:
    """One line of the manifest."""

    name: str
    sha256: str
    size: int
    """Bytes."""
    samples: int
    tokens: int
    loss_tokens: int
    """Tokens with loss mask 1."""


def bytes_per_token(meta: ShardMeta) -> int:
    """Bytes on disk for one token, headers aside."""
    return 4 + 1 + 2 * meta.hidden_size * (len(meta.aux_layers) + 1)


class ShardWriter:
    """Writes samples into a new folder, which appears under its name only when it is complete.

    Use it in a `with` statement: the folder takes its name when the block ends well; when it raises, nothing is left.
    Raises OutputError where the folder exists and `overwrite` is not set, and where the disk refuses a write.
    """

    def __init__(self, folder: str | Path, meta: ShardMeta, tokens_per_shard: int = 4096, overwrite: bool = False):
        self.folder, self.meta = Path(folder), meta
        self.tokens_per_shard = tokens_per_shard
        self.files: list[ShardFile] = []
        self._pending: list[Sample] = []
        self._context = self._written(overwrite)

    def __enter__(self) -> Self:
        self._part = self._context.__enter__()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> bool | None:
        return self._context.__exit__(kind, error, trace)

    def add(self, sample: Sample) -> None:
        """Append a sample; a shard is written whenever `tokens_per_shard` tokens have gathered."""
        t, h, n = len(sample.tokens), self.meta.hidden_size, len(self.meta.aux_layers)
        found = sample.loss_mask.shape, sample.aux.shape, sample.last.shape
        if t == 0 or found != ((t,), (t, n * h), (t, h)):
            raise ValueError(f"a sample of {t} tokens, {n} aux layers and hidden size {h} has arrays of shape {found}")
        self._pending.append(sample)
        if sum(len(s.tokens) for s in self._pending) >= self.tokens_per_shard:
            self._flush()

    @contextmanager
    def _written(self, overwrite: bool) -> Iterator[Path]:
        with new_folder(self.folder, overwrite) as part:
            yield part
            self._flush()
            self._write(MANIFEST, (json.dumps(self._manifest(), indent=1) + "\n").encode())

    def _flush(self) -> None:
        rows, self._pending = self._pending, []
        if not rows:
            return
        tensors: dict[str, np.ndarray[Any, Any]] = {
            "tokens": np.concatenate([s.tokens for s in rows]).astype(np.int32),
            "loss_mask": np.concatenate([s.loss_mask for s in rows]).astype(np.uint8),
            "lengths": np.array([len(s.tokens) for s in rows], np.int32),
            "aux": np.concatenate([s.aux for s in rows]).astype(np.float16),
            "last": np.concatenate([s.last for s in rows]).astype(np.float16),
        }
        name = f"shard-{len(self.files):05d}.safetensors"
        data = safetensors.numpy.save(tensors)
        self._write(name, data)
        tokens, loss_tokens = len(tensors["tokens"]), int(tensors["loss_mask"].sum())
        digest = hashlib.sha256(data).hexdigest()
        self.files.append(ShardFile(name, digest, len(data), len(rows), tokens, loss_tokens))

    def _write(self, name: str, data: bytes) -> None:
        (self._part / name).write_bytes(data)

    def _manifest(self) -> dict[str, Any]:
        content = {"format": FORMAT, "version": VERSION, "meta": asdict(self.meta)}
        content["files"] = [asdict(f) for f in self.files]
        return {**content, "sha256": _digest(content)}


class ShardReader:
    """Reads a folder of shards. `reader[i]` is one sample, `for sample in reader` all of them in order.

    The manifest is checked at once, each shard's SHA-256 when it is first touched; `verify()` checks them all.
    Raises ShardError naming the file that is missing, cut short or damaged.
    """

    def __init__(self, folder: str | Path):
        self.folder = Path(folder)
        self.meta, self.files = _read_manifest(self.folder)
        self._ends = np.cumsum([f.samples for f in self.files])
        self._starts: dict[int, NDArray[np.int64]] = {}
        """For each shard that has been checked, where its samples begin, and its number of tokens."""

    def __len__(self) -> int:
        return sum(f.samples for f in self.files)

    @property
    def tokens(self) -> int:
        return sum(f.tokens for f in self.files)

    @property
    def loss_tokens(self) -> int:
        return sum(f.loss_tokens for f in self.files)

    def __getitem__(self, index: int) -> Sample:
        if not -len(self) <= index < len(self):
            raise IndexError(f"sample {index} of {len(self)}")
        index %= len(self)
        shard = int(np.searchsorted(self._ends, index, side="right"))
        starts = self._check(shard)
        row = index - (int(self._ends[shard - 1]) if shard else 0)
        at = slice(int(starts[row]), int(starts[row + 1]))
        with safe_open(str(self.folder / self.files[shard].name), "numpy") as file:
            return Sample(*(file.get_slice(name)[at] for name in ("tokens", "loss_mask", "aux", "last")))

    def __iter__(self) -> Iterator[Sample]:
        return (self[i] for i in range(len(self)))

    def verify(self) -> None:
        """Check the SHA-256 of every shard."""
        for shard in range(len(self.files)):
            self._check(shard)

    def _check(self, shard: int) -> NDArray[np.int64]:
        if shard not in self._starts:
            entry = self.files[shard]
            path = self.folder / entry.name
            _check_file(path, entry)
            try:
                with safe_open(str(path), "numpy") as file:
                    lengths = file.get_tensor("lengths")
            except SafetensorError as e:
                raise ShardError(f"{path} is not a shard: {e}; {REMEDY}") from e
            self._starts[shard] = np.concatenate([[0], np.cumsum(lengths, dtype=np.int64)])
        return self._starts[shard]


def _check_file(path: Path, entry: ShardFile) -> None:
    try:
        size = path.stat().st_size
        if size != entry.size:
            what = "cut short" if size < entry.size else "longer than it was"
            raise ShardError(f"{path} is {what}: {size:,} bytes in place of {entry.size:,}; {REMEDY}")
        with path.open("rb") as file:
            digest = hashlib.file_digest(file, "sha256").hexdigest()
    except FileNotFoundError as e:
        raise ShardError(f"{path} is missing, but the manifest lists it; {REMEDY}") from e
    except OSError as e:
        raise ShardError(f"{path} cannot be read: {e.strerror}; {REMEDY}") from e
    if digest != entry.sha256:
        raise ShardError(f"{path} is damaged: its SHA-256 is not the one in the manifest; {REMEDY}")


def _read_manifest(folder: Path) -> tuple[ShardMeta, list[ShardFile]]:
    path = folder / MANIFEST
    try:
        manifest = json.loads(path.read_bytes())
        content = {k: v for k, v in manifest.items() if k != "sha256"}
        if content["format"] != FORMAT or content["version"] != VERSION:
            raise ShardError(f"{path} is of format {content['format']} version {content['version']}, not {FORMAT} 1")
        if manifest["sha256"] != _digest(content):
            raise ShardError(f"{path} is damaged: its SHA-256 does not fit its content; {REMEDY}")
        meta = ShardMeta(**{**content["meta"], "aux_layers": tuple(content["meta"]["aux_layers"])})
        return meta, [ShardFile(**f) for f in content["files"]]
    except (FileNotFoundError, NotADirectoryError) as e:
        raise ShardError(f"{folder} is not a folder of shards: it has no {MANIFEST}") from e
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as e:
        raise ShardError(f"{path} is damaged and cannot be read ({e}); {REMEDY}") from e


def _digest(content: dict[str, Any]) -> str:
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()
