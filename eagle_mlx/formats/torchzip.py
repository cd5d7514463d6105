"""Read tensors from PyTorch's `.bin` files without running code in their pickles.

The format is torch.save's zip file since 1.6: a pickle refers to storages, which are stored next to it as raw bytes.
The pickle may only create dictionaries and tensors.
"""

from __future__ import annotations

import pickle
import zipfile
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from io import BytesIO
from math import prod
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
from numpy.typing import NDArray

from eagle_mlx.errors import CheckpointError
from eagle_mlx.hub import why_damaged

_BFLOAT16 = np.uint16  # stands for bfloat16, which numpy lacks; no storage of torch.save's is uint16
_STORAGES: dict[str, Any] = {
    **{"DoubleStorage": np.float64, "FloatStorage": np.float32, "HalfStorage": np.float16},
    **{"LongStorage": np.int64, "IntStorage": np.int32, "ShortStorage": np.int16, "CharStorage": np.int8},
    **{"BFloat16Storage": _BFLOAT16, "ByteStorage": np.uint8, "BoolStorage": np.bool_},
}


def read_torch(file: Path) -> dict[str, mx.array]:
    """Return the named tensors of a file from torch.save. Raises CheckpointError if there is anything else in it."""
    try:
        with zipfile.ZipFile(file) as archive:
            tensors = _Unpickler(file, archive).load()
    except zipfile.BadZipFile as e:
        why = f"{file} is not a zip file from torch.save; download it again, or save it with torch 1.6 or later"
        raise CheckpointError(why_damaged(file, why)) from e
    except (OSError, EOFError, ValueError, TypeError, LookupError, AttributeError, pickle.UnpicklingError) as e:
        raise CheckpointError(f"{file} cannot be read as PyTorch weights ({e}); download or create it again") from e
    if isinstance(tensors, Mapping) and isinstance(tensors.get("state_dict"), Mapping):
        tensors = tensors["state_dict"]
    if not isinstance(tensors, Mapping):
        raise CheckpointError(f"{file} has a {type(tensors).__name__} and not named tensors")
    if other := [str(name) for name, value in tensors.items() if not isinstance(value, mx.array)]:
        raise CheckpointError(f"{file} has objects that are not tensors: {', '.join(sorted(other))}")
    return {str(name): value for name, value in tensors.items()}


class _Unpickler(pickle.Unpickler):
    """Allows three functions and the names of storages; all others are refused before anything is called."""

    def __init__(self, file: Path, archive: zipfile.ZipFile):
        self.file, self.archive = file, archive
        pickles = [name for name in archive.namelist() if name.endswith("/data.pkl") and name.count("/") == 1]
        if len(pickles) != 1:
            raise CheckpointError(f"{file} has {len(pickles)} pickles of tensors; one was expected")
        self.root = pickles[0].removesuffix("data.pkl")
        order = f"{self.root}byteorder"
        if order in archive.namelist() and archive.read(order) != b"little":
            raise CheckpointError(f"{file} has big-endian numbers; save it again on a little-endian machine")
        super().__init__(BytesIO(self._read("data.pkl")))

    def _read(self, name: str) -> bytes:
        """Read an entry. torch.save never compresses, so an entry cannot be larger in memory than in the file."""
        info = self.archive.getinfo(self.root + name)
        if info.compress_type != zipfile.ZIP_STORED:
            raise CheckpointError(f"{self.file}: {name} is compressed, which torch.save never does")
        return self.archive.read(info)

    def find_class(self, module: str, name: str) -> Any:
        if module == "torch" and name in _STORAGES:
            return name
        allowed = {
            ("collections", "OrderedDict"): OrderedDict,
            ("torch._utils", "_rebuild_tensor_v2"): _tensor,
            ("torch._utils", "_rebuild_parameter"): lambda data, *_: data,
        }
        if (module, name) in allowed:
            return allowed[module, name]
        raise CheckpointError(
            f"{self.file} asks to run {module}.{name}, which weights do not need; it was not run. "
            "Use the head's safetensors"
        )

    def persistent_load(self, pid: Any) -> NDArray[Any]:
        _, kind, key, *_ = pid
        return np.frombuffer(self._read(f"data/{key}"), _STORAGES[kind])


def _tensor(storage: NDArray[Any], offset: int, size: Sequence[int], stride: Sequence[int], *_: Any) -> mx.array:
    """Do the same as torch._utils._rebuild_tensor_v2. numpy checks that the tensor is within its storage."""
    if not isinstance(storage, np.ndarray) or prod(size) > storage.size:  # a stride may be 0
        raise ValueError("a tensor without a storage, or larger than its storage")
    step = storage.itemsize
    numbers: NDArray[Any] = np.ndarray(
        tuple(size), storage.dtype, storage, offset * step, tuple(n * step for n in stride)
    )
    made = mx.array(numbers.copy())
    return made.view(mx.bfloat16) if storage.dtype == _BFLOAT16 else made
