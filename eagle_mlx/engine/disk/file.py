"""One file of the disk tier: tensors and a few words about them, as safetensors, with a checksum of the whole."""

from __future__ import annotations

import json
import os
import struct
import threading
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from io import FileIO
from pathlib import Path
from stat import S_ISREG
from typing import Any

import mlx.core as mx
import numpy as np
from numpy.typing import NDArray

from eagle_mlx.files import PART

FORMAT = "eagle-mlx-prefix-1"
"""Of what the files hold. It is part of a folder's fingerprint, so that no other version reads them."""
_UNKNOWN = "0" * 8
"""What stands for the checksum while it is computed."""
_MOST_HEADER = 1 << 24
"""Bytes of a header; that of a block has some ten thousand."""
_DTYPES: dict[str, tuple[mx.Dtype, Any]] = {
    "F32": (mx.float32, np.float32),
    "F16": (mx.float16, np.float16),
    "BF16": (mx.bfloat16, np.uint16),  # numpy has no such type
    **{f"U{8 * n}": (getattr(mx, f"uint{8 * n}"), getattr(np, f"uint{8 * n}")) for n in (1, 2, 4, 8)},
    **{f"I{8 * n}": (getattr(mx, f"int{8 * n}"), getattr(np, f"int{8 * n}")) for n in (1, 2, 4, 8)},
    "BOOL": (mx.bool_, np.bool_),
    "C64": (mx.complex64, np.complex64),
}
"""safetensors' names of types, with MLX's and what numpy holds them as."""
_NAMES = {of_mlx: name for name, (of_mlx, _) in _DTYPES.items()}


class DamagedError(Exception):
    """A file that is not what was written; the message says what is wrong with it."""


class NoFileError(OSError):
    """A FIFO, a folder or a device has a file's name."""


@dataclass(frozen=True)
class Tensor:
    """An array in the host's memory."""

    dtype: str
    """safetensors' name of its type."""
    data: NDArray[Any]

    def on_device(self) -> mx.array:
        x = mx.array(self.data)
        return x.view(mx.bfloat16) if self.dtype == "BF16" else x

    def cut(self, start: int, end: int) -> Tensor:
        """[1, heads, L, D] -> [1, heads, end - start, D], without a copy."""
        return Tensor(self.dtype, self.data[:, :, start:end])


def on_host(arrays: Sequence[mx.array]) -> list[Tensor]:
    """Arrays without a copy, where they have been computed."""
    views = [x.view(mx.uint16) if x.dtype == mx.bfloat16 else x for x in arrays]
    mx.eval(views)  # together: each call waits for the device
    return [Tensor(_NAMES[x.dtype], np.array(view, copy=False)) for x, view in zip(arrays, views, strict=True)]


def joined(tensors: list[Tensor]) -> Tensor:
    """[1, heads, L, D], one behind the other."""
    if len(tensors) == 1:
        return tensors[0]
    return Tensor(tensors[0].dtype, np.concatenate([each.data for each in tensors], axis=2))


@dataclass(frozen=True)
class Header:
    """What a file says of itself, which nobody has checked yet."""

    about: dict[str, str]
    tensors: dict[str, Any]
    raw: bytes
    nbytes: int
    """Of the whole file."""


def write(path: Path, about: Mapping[str, str], tensors: Mapping[str, Tensor]) -> int:
    """Write a file that is there whole or not at all while the machine runs; its bytes. Raises OSError.

    It is not flushed to the disk: what a power cut leaves of it the checksum tells.
    """
    bodies = {name: _body(each) for name, each in tensors.items()}
    draft = _header(about, tensors, _UNKNOWN)
    checksum = zlib.crc32(draft)
    for body in bodies.values():
        checksum = zlib.crc32(body, checksum)
    header = _header(about, tensors, f"{checksum:08x}")
    part = path.with_name(f".{path.name}.{os.getpid()}-{threading.get_ident()}{PART}")
    try:
        descriptor = os.open(part, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)  # it tells what somebody wrote
        try:
            for data in (memoryview(struct.pack("<Q", len(header)) + header), *bodies.values()):
                _write_all(descriptor, data)
        finally:
            os.close(descriptor)
        part.replace(path)
    except BaseException:
        part.unlink(missing_ok=True)
        raise
    return 8 + len(header) + sum(body.nbytes for body in bodies.values())


def _write_all(descriptor: int, data: memoryview) -> None:
    while data:
        data = data[os.write(descriptor, data) :]


def _body(tensor: Tensor) -> memoryview:
    return np.ascontiguousarray(tensor.data).reshape(-1).view(np.uint8).data


def size_of(about: Mapping[str, str], tensors: Mapping[str, Tensor]) -> int:
    """Return how many bytes `write` writes."""
    bodies = sum(tensor.data.nbytes for tensor in tensors.values())
    return 8 + len(_header(about, tensors, _UNKNOWN)) + bodies


def _header(about: Mapping[str, str], tensors: Mapping[str, Tensor], checksum: str) -> bytes:
    content: dict[str, Any] = {"__metadata__": {"format": FORMAT, "checksum": checksum, **about}}
    at = 0
    for name, tensor in tensors.items():
        end = at + tensor.data.nbytes
        content[name] = {"dtype": tensor.dtype, "shape": list(tensor.data.shape), "data_offsets": [at, end]}
        at = end
    raw = json.dumps(content, separators=(",", ":")).encode()
    return raw + b" " * (-len(raw) % 8)


def _opened(path: Path) -> FileIO:
    """Open a regular file. Raises NoFileError for anything else: to open a FIFO would wait for who writes into it."""
    descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    if not S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise NoFileError(f"{path.name} is no regular file")
    return FileIO(descriptor)


def read_header(path: Path) -> Header:
    """What a file says of itself, and that it has the length that it should have.

    Raises DamagedError, and OSError where it cannot be read.
    """
    with _opened(path) as file:
        nbytes = os.fstat(file.fileno()).st_size
        return _read_header(file.read(8), file.read, nbytes)


def _read_header(prefix: bytes, read: Any, nbytes: int) -> Header:
    length = struct.unpack("<Q", prefix)[0] if len(prefix) == 8 else 0
    if not 0 < length <= min(_MOST_HEADER, nbytes - 8):
        raise DamagedError("its header is cut off or no header")
    raw = bytes(read(length))
    try:
        content = json.loads(raw)
        about = content.pop("__metadata__")
        bodies = sum(_extent(entry) for entry in content.values())
        if (
            about["format"] != FORMAT
            or len(about["checksum"]) != len(_UNKNOWN)
            or not all(isinstance(value, str) for value in about.values())
        ):
            raise DamagedError("it is of another format")
    except (ValueError, KeyError, TypeError, AttributeError) as e:
        raise DamagedError("its header cannot be read") from e
    if 8 + length + bodies != nbytes:
        raise DamagedError(f"it has {nbytes} bytes and should have {8 + length + bodies}")
    return Header(about, content, raw, nbytes)


def _extent(entry: Any) -> int:
    start, end = entry["data_offsets"]
    if not 0 <= start <= end or entry["dtype"] not in _DTYPES:
        raise ValueError("a tensor that cannot be")
    return int(end) - int(start)


def read(path: Path) -> tuple[dict[str, str], dict[str, Tensor]]:
    """What a file holds, all of it checked. Raises DamagedError, and OSError where it cannot be read."""
    with _opened(path) as file:
        content = np.empty(os.fstat(file.fileno()).st_size, np.uint8)
        view, count = content.data, 0
        while count < len(view) and (more := file.readinto(view[count:])):
            count += more
    view = view[:count]
    header = _read_header(bytes(view[:8]), lambda length: view[8 : 8 + length], count)
    checksum, data = header.about["checksum"], content[8 + len(header.raw) : count]
    blank = header.raw.replace(f'"checksum":"{checksum}"'.encode(), f'"checksum":"{_UNKNOWN}"'.encode(), 1)
    if f"{zlib.crc32(data.data, zlib.crc32(blank)):08x}" != checksum:
        raise DamagedError("its checksum is not that of what it holds")
    tensors = dict[str, Tensor]()
    for name, entry in header.tensors.items():
        start, end = entry["data_offsets"]
        array = data[start:end].view(_DTYPES[entry["dtype"]][1]).reshape(entry["shape"])
        tensors[name] = Tensor(entry["dtype"], array)
    return header.about, tensors
