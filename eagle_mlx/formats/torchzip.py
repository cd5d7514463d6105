"""Read tensors from PyTorch's `.bin` files without running code in their pickles.

The format is torch.save's zip file since 1.6: a pickle refers to storages, which are stored next to it as raw bytes.
The pickle may only create dictionaries and tensors.
"""

from __future__ import annotations

import pickle
import zipfile
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from io import BytesIO
from math import prod
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
from numpy.lib.stride_tricks import as_strided

from eagle_mlx.errors import CheckpointError
from eagle_mlx.hub import why_damaged

_MOST_PICKLE = 64 << 20
"""Maximum size of a pickle in bytes; a head has a few dozen tensors."""

_STORAGES: dict[str, tuple[Any, mx.Dtype | None]] = {
    "DoubleStorage": (np.float64, None),
    "FloatStorage": (np.float32, None),
    "HalfStorage": (np.float16, None),
    "BFloat16Storage": (np.uint16, mx.bfloat16),
    "LongStorage": (np.int64, None),
    "IntStorage": (np.int32, None),
    "ShortStorage": (np.int16, None),
    "CharStorage": (np.int8, None),
    "ByteStorage": (np.uint8, None),
    "BoolStorage": (np.bool_, None),
}
"""For each storage, the numpy type to read and, if numpy lacks the type, the MLX type to view it as."""


def read_torch(file: Path) -> dict[str, mx.array]:
    """Return the named tensors of a file from torch.save.

    Raises CheckpointError if the file is damaged or older than torch 1.6, or if its pickle asks for anything except
    dictionaries of tensors.
    """
    try:
        with zipfile.ZipFile(file) as archive:
            return _Reader(file, archive).load()
    except zipfile.BadZipFile as e:
        why = f"{file} is not a zip file from torch.save; download it again, or save it with torch 1.6 or later"
        raise CheckpointError(why_damaged(file, why)) from e
    except (OSError, EOFError, ValueError, TypeError, LookupError, AttributeError, pickle.UnpicklingError) as e:
        raise CheckpointError(f"{file} cannot be read as PyTorch's weights ({e}); download or make it again") from e


@dataclass(frozen=True)
class _Kind:
    """A storage class, which is only named in the pickle."""

    name: str


@dataclass(frozen=True)
class _Storage:
    kind: str
    numbers: np.ndarray


class _Reader:
    def __init__(self, file: Path, archive: zipfile.ZipFile):
        self.file, self.archive = file, archive
        pickles = [name for name in archive.namelist() if name.endswith("/data.pkl") and name.count("/") == 1]
        if len(pickles) != 1:
            raise CheckpointError(f"{file} has {len(pickles)} pickles of tensors; one was expected")
        self.root = pickles[0].removesuffix("data.pkl")
        self._storages: dict[str, _Storage] = {}

    def load(self) -> dict[str, mx.array]:
        order = f"{self.root}byteorder"
        if order in self.archive.namelist() and self.archive.read(order) != b"little":
            raise CheckpointError(f"{self.file} has big-endian numbers; save it again on a little-endian machine")
        info = self._plain("data.pkl")
        if info.file_size > _MOST_PICKLE:
            raise CheckpointError(f"{self.file}: its pickle has {info.file_size} bytes, too many for a head")
        found = _Unpickler(self, self.archive.read(info)).load()
        if isinstance(found, Mapping) and isinstance(found.get("state_dict"), Mapping):
            found = found["state_dict"]
        if not isinstance(found, Mapping):
            raise CheckpointError(f"{self.file} has a {type(found).__name__} and not named tensors")
        other = [str(name) for name, value in found.items() if not isinstance(value, mx.array)]
        if other:
            raise CheckpointError(f"{self.file} has objects that are not tensors: {', '.join(sorted(other))}")
        return {str(name): value for name, value in found.items()}

    def _plain(self, name: str) -> zipfile.ZipInfo:
        """Return an uncompressed entry, as all of torch.save's are, so that its size in memory is known."""
        info = self.archive.getinfo(self.root + name)
        if info.compress_type != zipfile.ZIP_STORED:
            raise CheckpointError(f"{self.file}: {name} is compressed, which torch.save never does")
        return info

    def storage(self, kind: str, key: str, count: int) -> _Storage:
        if key not in self._storages:
            raw = self.archive.read(self._plain(f"data/{key}"))
            numbers = np.frombuffer(raw, _STORAGES[kind][0])
            if len(numbers) != count:
                raise CheckpointError(f"{self.file}: storage {key} has {len(numbers)} numbers instead of {count}")
            self._storages[key] = _Storage(kind, numbers)
        found = self._storages[key]
        if found.kind != kind:
            raise CheckpointError(f"{self.file}: storage {key} is named as {found.kind} and as {kind}")
        return found


class _Unpickler(pickle.Unpickler):
    """Allows four names; all others are refused before anything is called."""

    def __init__(self, reader: _Reader, data: bytes):
        super().__init__(BytesIO(data))
        self.reader = reader

    def find_class(self, module: str, name: str) -> Any:
        if module == "torch" and name in _STORAGES:
            return _Kind(name)
        known = {
            ("collections", "OrderedDict"): OrderedDict,
            ("torch._utils", "_rebuild_tensor_v2"): _tensor,
            ("torch._utils", "_rebuild_parameter"): _parameter,
        }
        if (module, name) in known:
            return known[module, name]
        raise CheckpointError(
            f"{self.reader.file} asks to run {module}.{name}, which weights do not need; it was not run. "
            "Use the head's safetensors"
        )

    def persistent_load(self, pid: Any) -> _Storage:
        word, kind, key, _, count = pid
        if word != "storage" or not isinstance(kind, _Kind):
            raise CheckpointError(f"{self.reader.file} refers to an object that is not a storage of numbers")
        return self.reader.storage(kind.name, str(key), int(count))


def _tensor(storage: _Storage, offset: int, size: Sequence[int], stride: Sequence[int], *_: Any) -> mx.array:
    """Do the same as torch._utils._rebuild_tensor_v2, with bounds checks."""
    if not isinstance(storage, _Storage) or len(size) != len(stride) or offset < 0 or min([0, *size, *stride]) < 0:
        raise ValueError("a tensor without a storage, or of negative size")
    last = offset + sum((n - 1) * step for n, step in zip(size, stride, strict=True))
    count = prod(size)
    if count and (last >= len(storage.numbers) or count > len(storage.numbers)):
        raise ValueError("a tensor reaches beyond its storage")
    dtype, seen_as = _STORAGES[storage.kind]
    if not count:
        numbers = np.zeros(tuple(size), dtype)
    else:
        steps = tuple(step * storage.numbers.itemsize for step in stride)
        numbers = as_strided(storage.numbers[offset:], tuple(size), steps, writeable=False)
    made = mx.array(np.ascontiguousarray(numbers).reshape(tuple(size)))
    return made if seen_as is None else made.view(seen_as)


def _parameter(data: Any, *_: Any) -> Any:
    return data
