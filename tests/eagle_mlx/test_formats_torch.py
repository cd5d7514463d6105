"""PyTorch's files: torch.save's output can be read, and code in a pickle is never run."""

from __future__ import annotations

import io
import pickle
import shutil
import sys
import zipfile
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import mlx.core as mx
import numpy as np
import pytest

from eagle_mlx.errors import CheckpointError
from eagle_mlx.formats.tensors import read_tensors
from eagle_mlx.formats.torchzip import read_torch
from eagle_mlx.heads import load_head
from eagle_mlx.heads.eagle3 import save_eagle3
from tests.fakes import tiny_head, tiny_target

GOLDEN = Path(__file__).parents[1] / "golden" / "torch.bin"


def test_a_file_from_torch_is_read() -> None:
    """The tensors of `make_torch` in make.py."""
    got = read_torch(GOLDEN)
    numbers = np.arange(12, dtype=np.float32)
    wanted: dict[str, Any] = {
        "weight": numbers[:6].reshape(3, 2),
        "half": numbers.astype(np.float16),
        "brain": numbers / 4,
        "turned": numbers.reshape(3, 4).T,
        "cut": numbers[3:7],
        "d2t": np.arange(5),
        "t2d": np.array([True, False, True]),
        "empty": np.zeros((0, 4)),
        "scalar": np.array(2.5),
        "parameter": numbers[:2],
    }
    assert got.keys() == wanted.keys()
    for name, value in wanted.items():
        assert np.array_equal(np.array(got[name].astype(mx.float32)), value), name
    assert (got["brain"].dtype, got["half"].dtype, got["d2t"].dtype) == (mx.bfloat16, mx.float16, mx.int64)


class _Named:
    """Stands for an object in a pickle, by its module and name."""

    def __init__(self, module: str, name: str, *args: Any):
        self.named, self.args = (module, name), args


class Storage:
    def __init__(self, kind: str, key: str, count: int):
        self.kind, self.key, self.count = kind, key, count


def torch_file(path: Path, what: Any, monkeypatch: pytest.MonkeyPatch, **storages: bytes) -> Path:
    """Write any pickle into a file like torch.save's; `storages` are the bytes by key."""

    class Pickler(pickle.Pickler):
        def reducer_override(self, thing: Any) -> Any:
            return (function(*thing.named), thing.args) if isinstance(thing, _Named) else NotImplemented

        def persistent_id(self, thing: Any) -> Any:
            if isinstance(thing, Storage):
                return ("storage", function("torch", thing.kind), thing.key, "cpu", thing.count)
            return None

    def function(module: str, name: str) -> Any:
        parents = module.split(".")
        for depth in range(1, len(parents) + 1):
            if ".".join(parents[:depth]) not in sys.modules:
                monkeypatch.setitem(sys.modules, ".".join(parents[:depth]), ModuleType(module))
        if not hasattr(sys.modules[module], name):
            made = type(name, (), {"__module__": module, "__qualname__": name})
            monkeypatch.setattr(sys.modules[module], name, made, raising=False)
        return getattr(sys.modules[module], name)

    stream = io.BytesIO()
    Pickler(stream, protocol=2).dump(what)
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("archive/data.pkl", stream.getvalue())
        for key, raw in storages.items():
            archive.writestr(f"archive/data/{key.removeprefix('s')}", raw)
    return path


def tensor(storage: Any, offset: int, size: tuple[int, ...], stride: tuple[int, ...]) -> _Named:
    return _Named("torch._utils", "_rebuild_tensor_v2", storage, offset, size, stride, False, {})


FLOATS = np.arange(4, dtype=np.float32).tobytes()


def test_a_file_made_here_is_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Proves that the refusals below are not caused by how these files are made."""
    what = {"w": tensor(Storage("FloatStorage", "0", 4), 1, (3,), (1,))}
    file = torch_file(tmp_path / "x.bin", what, monkeypatch, s0=FLOATS)
    assert read_torch(file)["w"].tolist() == [1, 2, 3]
    file = torch_file(tmp_path / "x.bin", {"state_dict": what, "step": 3}, monkeypatch, s0=FLOATS)
    assert read_torch(file)["w"].tolist() == [1, 2, 3]


@pytest.mark.parametrize(
    ("module", "name"),
    [("os", "system"), ("builtins", "eval"), ("torch", "load"), ("torch._utils", "_rebuild_device_tensor")],
)
def test_code_in_a_pickle_is_named_and_not_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, module: str, name: str
) -> None:
    victim = tmp_path / "victim"
    what = {"w": _Named(module, name, f"touch {victim}" if module == "os" else f"open({str(victim)!r}, 'w')")}
    with pytest.raises(CheckpointError, match=rf"asks to run (posix|__builtin__|{module})\.{name}.*was not run"):
        read_torch(torch_file(tmp_path / "x.bin", what, monkeypatch))
    assert not victim.exists()


@pytest.mark.parametrize(
    ("what", "message"),
    [
        ({"w": tensor(Storage("FloatStorage", "0", 4), 2, (3,), (1,))}, "cannot be read as PyTorch weights"),
        ({"w": tensor(Storage("FloatStorage", "0", 4), 0, (5,), (0,))}, "larger than its storage"),
        ({"w": tensor(Storage("FloatStorage", "0", 4), -1, (2,), (1,))}, "cannot be read as PyTorch weights"),
        ({"w": tensor(Storage("FloatStorage", "0", 4), 0, (-2,), (1,))}, "cannot be read as PyTorch weights"),
        ({"w": tensor(Storage("FloatStorage", "0", 4), 0, (2,), (1, 1))}, "cannot be read as PyTorch weights"),
        ({"w": tensor(Storage("FloatStorage", "1", 4), 0, (2,), (1,))}, "archive/data/1"),
        ({"w": tensor("no storage", 0, (2,), (1,))}, "without a storage"),
        ({"w": 3, "v": "text"}, "not tensors: v, w"),
        ([1, 2], "has a list and not named tensors"),
    ],
)
def test_damaged_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, what: Any, message: str) -> None:
    with pytest.raises(CheckpointError, match=message):
        read_torch(torch_file(tmp_path / "x.bin", what, monkeypatch, s0=FLOATS))


def cut(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-40])


def shortened_pickle(path: Path) -> None:
    rewrite(path, lambda name, raw: raw[:-30] if name.endswith("data.pkl") else raw)


def big_endian(path: Path) -> None:
    rewrite(path, lambda name, raw: b"big" if name.endswith("byteorder") else raw)


def compressed(path: Path) -> None:
    rewrite(path, lambda name, raw: raw, zipfile.ZIP_DEFLATED)


def empty(path: Path) -> None:
    with zipfile.ZipFile(path, "w"):
        pass


def rewrite(path: Path, change: Callable[[str, bytes], bytes], compression: int = zipfile.ZIP_STORED) -> None:
    with zipfile.ZipFile(path) as archive:
        entries = {name: change(name, archive.read(name)) for name in archive.namelist()}
    with zipfile.ZipFile(path, "w", compression) as archive:
        for name, raw in entries.items():
            archive.writestr(name, raw)


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (cut, "is not a zip file from torch.save"),
        (shortened_pickle, "cannot be read as PyTorch weights"),
        (big_endian, "big-endian"),
        (compressed, "is compressed"),
        (empty, "has 0 pickles"),
    ],
)
def test_damaged_archives(tmp_path: Path, damage: Callable[[Path], None], message: str) -> None:
    file = tmp_path / "x.bin"
    shutil.copy(GOLDEN, file)
    damage(file)
    with pytest.raises(CheckpointError, match=message):
        read_torch(file)


def in_a_file_of_torchs(folder: Path, monkeypatch: pytest.MonkeyPatch, **changes: mx.array) -> None:
    """Write a head's tensors, possibly changed, to a file like torch.save's."""
    kinds = {mx.float32: "FloatStorage", mx.int64: "LongStorage", mx.bool_: "BoolStorage", mx.int8: "CharStorage"}
    what, storages = {}, {}
    for key, (name, value) in enumerate((read_tensors(folder) | changes).items()):
        strides = tuple(n // value.itemsize for n in np.array(value).strides)
        what[name] = tensor(Storage(kinds[value.dtype], str(key), value.size), 0, tuple(value.shape), strides)
        storages[f"s{key}"] = np.array(value).tobytes()
    (folder / "model.safetensors").unlink()
    torch_file(folder / "pytorch_model.bin", what, monkeypatch, **storages)


def test_a_head_in_a_pytorch_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    head = tiny_head(tiny_target(), draft_vocab=48)
    save_eagle3(head, tmp_path / "h", dtype=mx.float32)
    wanted = load_head(tmp_path / "h")
    in_a_file_of_torchs(tmp_path / "h", monkeypatch)
    got = load_head(tmp_path / "h")
    assert got.config == wanted.config
    assert mx.array_equal(got.fc.weight, wanted.fc.weight)
    assert mx.array_equal(got.token_ids, wanted.token_ids)


def test_integers_in_a_pytorch_file_are_not_weights(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    head = tiny_head(tiny_target())
    save_eagle3(head, tmp_path / "h", dtype=mx.float32)
    in_a_file_of_torchs(tmp_path / "h", monkeypatch, **{"fc.weight": head.fc.weight.astype(mx.int8)})
    with pytest.raises(CheckpointError, match=r"fc.weight in .*h is of type .*int8, .* bfloat16"):
        load_head(tmp_path / "h")
