"""The format of a folder of shards, with a manifest of checksums; and its reader, which verifies each shard first."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import safetensors.numpy
from numpy.typing import NDArray
from safetensors import SafetensorError, safe_open

from eagle_mlx.errors import ConfigError, ShardError
from eagle_mlx.hidden_states import Bits, Example, HiddenStates, rounded, widened

BITS = (16, 8)
SUFFIX = ".safetensors"
MANIFEST = "manifest.json"
UNFINISHED = "unfinished.json"
"""The manifest of an unfinished folder: it lists the complete shards."""
FORMAT = "eagle-mlx-shards"
VERSION = 3
BLOCK = 64
"""Values that share a scale: the default group size of `mx.quantize`."""


@dataclass(frozen=True)
class ShardMeta:
    """Describes the hidden states. Aux layer id k means the output of layer k, counted from 0."""

    target: str
    hidden_size: int
    vocab_size: int
    aux_layers: tuple[int, ...]
    bits: int = 16
    """Bits per value on disk: 16 is bfloat16, 8 is the output of `quantize`. Readers always return bfloat16."""
    adapter: str = ""  # digest of the target's LoRA adapters (`eagle_mlx.adapters.Adapter`); empty if it had none

    def __post_init__(self) -> None:
        if self.bits not in BITS:
            raise ConfigError(f"hidden states have 16 or 8 bits per value, not {self.bits}")


@dataclass(frozen=True)
class ShardFile:
    """One entry of the manifest."""

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
        return cls(
            shard_name(index),
            hashlib.sha256(data).hexdigest(),
            len(data),
            len(examples),
            sum(map(len, examples)),
            sum(int(example.loss_mask.sum()) for example in examples),
        )

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
    """The content of a folder."""

    meta: ShardMeta
    files: tuple[ShardFile, ...] = ()
    made_from: Mapping[str, str] = field(default_factory=dict)
    """A readable fingerprint of everything that determines the content of the shards. Empty if unknown."""

    def to_json(self) -> bytes:
        """Return the manifest's file, with the SHA-256 of its own content."""
        content = {"format": FORMAT, "version": VERSION, **asdict(self)}
        return (json.dumps({**content, "sha256": _digest(content)}, indent=1) + "\n").encode()

    @classmethod
    def read(cls, path: Path) -> Manifest:
        """Read a manifest. Raises ShardError with the file's name if it is damaged or of another format; OSError."""
        try:
            found = json.loads(path.read_bytes())
            content = {k: v for k, v in found.items() if k != "sha256"}
            if (content["format"], content["version"]) != (FORMAT, VERSION):
                raise ShardError(
                    f"{path} is of format {content['format']} version {content['version']}, not {FORMAT} {VERSION}; "
                    "read it with the version of EAGLE-MLX that wrote it"
                )
            if found["sha256"] != _digest(content):
                raise ShardError(f"{path} is damaged: its SHA-256 does not match its content; {_remedy(path)}")
            meta = {**content["meta"], "aux_layers": tuple(content["meta"]["aux_layers"])}
            files = tuple(ShardFile(**f) for f in content["files"])
            return cls(ShardMeta(**meta), files, content["made_from"])
        except (ValueError, KeyError, TypeError, AttributeError) as e:
            raise ShardError(f"{path} is damaged and cannot be read ({e}); {_remedy(path)}") from e

    def differences(self, made_from: Mapping[str, str]) -> str:
        """Return how `made_from` differs from this folder's, in words; empty if it does not."""
        found = self.made_from
        names = [name for name in {**made_from, **found} if found.get(name) != made_from.get(name)]
        return "; ".join(
            f"{n}: {found.get(n, 'not recorded')} there, {made_from.get(n, 'not recorded')} now" for n in names
        )


def bytes_per_token(meta: ShardMeta) -> int:
    """Return the bytes on disk per token, without headers: its id, its mask, and the aux and last layers' states."""
    layer = 2 * meta.hidden_size if meta.bits == 16 else meta.hidden_size + 2 * blocks(meta.hidden_size)
    return 4 + 1 + layer * (len(meta.aux_layers) + 1)


def shard_name(index: int) -> str:
    return f"shard-{index:05d}{SUFFIX}"


def encode(examples: Sequence[Example], meta: ShardMeta) -> bytes:
    """Return the content of a shard's file; the same examples give the same bytes."""
    tensors: dict[str, NDArray[Any]] = {
        "tokens": np.concatenate([one.tokens for one in examples]).astype(np.int32),
        "loss_mask": np.concatenate([one.loss_mask for one in examples]).astype(np.uint8),
        "lengths": np.array([len(one) for one in examples], np.int32),
        "keys": np.array([one.key for one in examples], np.uint64),
    }
    states = [one.states for one in examples if one.states is not None]
    for name, arrays in (("aux", [one.features for one in states]), ("last", [one.last for one in states])):
        if meta.bits == 16:
            tensors[name] = np.concatenate(arrays)
        else:
            pairs = [quantize(one, meta.hidden_size) for one in arrays]
            tensors[name] = np.concatenate([integers for integers, _ in pairs])
            tensors[f"{name}_scales"] = np.concatenate([scales for _, scales in pairs])
    return safetensors.numpy.save(tensors)


def decode(path: Path, rows: slice, meta: ShardMeta, number: int = 0) -> Example:
    """Read the example with this number in a shard's file, whose tokens are in `rows`."""
    with safe_open(str(path), "numpy") as file:

        def states(name: str) -> Bits:
            values: NDArray[Any] = file.get_slice(name)[rows]
            if meta.bits == 16:
                return values
            return dequantize(values, file.get_slice(f"{name}_scales")[rows], meta.hidden_size)

        tokens, loss_mask = file.get_slice("tokens")[rows], file.get_slice("loss_mask")[rows]
        held = HiddenStates(meta.aux_layers, states("aux"), states("last"))
        return Example(tokens, loss_mask, held, int(file.get_slice("keys")[number : number + 1][0]))


def blocks(hidden_size: int) -> int:
    """Return the number of scales for one layer of one token."""
    return -(-hidden_size // BLOCK)


def quantize(states: Bits, hidden_size: int) -> tuple[NDArray[np.int8], Bits]:
    """Quantize finite states [T, n * H] to integers [T, n * H] and scales [T, n * blocks(H)]."""
    parts = _split(widened(states), hidden_size)
    exact = np.abs(parts).max(-1) / np.float32(127)
    scales = (exact.view(np.uint32) >> 16).astype(np.uint16)
    scales += widened(scales) < exact  # the next larger number, so that no integer exceeds 127
    divisors = np.where(scales == 0, np.float32(1), widened(scales))
    integers = np.rint(parts / divisors[..., None]).astype(np.int8)
    return _join(integers, states.shape, hidden_size), scales.reshape(len(scales), scales.shape[1] * scales.shape[2])


def dequantize(integers: NDArray[np.int8], scales: Bits, hidden_size: int) -> Bits:
    """Return the states [T, n * H]."""
    parts = _split(integers.astype(np.float32), hidden_size)
    parts *= widened(scales).reshape(parts.shape[:-1])[..., None]
    return _join(rounded(parts), integers.shape, hidden_size)


def _split(states: NDArray[np.float32], hidden_size: int) -> NDArray[np.float32]:
    """Reshape [T, n * H] to [T, n, blocks, BLOCK], padding each layer's last block with zeros."""
    rows, layers, count = len(states), states.shape[1] // hidden_size, blocks(hidden_size)
    padding = (0, 0), (0, 0), (0, count * BLOCK - hidden_size)
    return np.pad(states.reshape(rows, layers, hidden_size), padding).reshape(rows, layers, count, BLOCK)


def _join(parts: NDArray[Any], shape: tuple[int, ...], hidden_size: int) -> NDArray[Any]:
    """Reshape [T, n, blocks, BLOCK] to [T, n * H], without the padding."""
    rows, layers = parts.shape[:2]
    return parts.reshape(rows, layers, blocks(hidden_size) * BLOCK)[..., :hidden_size].reshape(shape)


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
        self._starts: dict[int, NDArray[np.int64]] = {}
        """For each shard that has been checked, the start of each sample, and finally the number of tokens."""

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
