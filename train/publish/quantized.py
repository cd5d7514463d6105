"""The same head in fewer bits, for a repository beside the portable one's."""

from __future__ import annotations

import contextlib
import shutil
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import mlx.core as mx

from eagle_mlx import hub
from eagle_mlx.errors import ConfigError
from eagle_mlx.formats import load_head, save_eagle, save_eagle3, save_mtp
from eagle_mlx.formats.mtp_source import NOTED
from eagle_mlx.formats.tensors import COPY, read_tensors
from eagle_mlx.heads.eagle import EagleHead
from eagle_mlx.heads.eagle3 import Eagle3Head
from eagle_mlx.heads.mtp import MTPHead
from eagle_mlx.heads.precision import in_dtype, quantization_of, quantize_for

from .bundle import LICENCES
from .source import Source, read_source

_WRITERS: dict[type, Callable[..., None]] = {EagleHead: save_eagle, Eagle3Head: save_eagle3, MTPHead: save_mtp}
_OF_A_LAYOUT = ("target", "target_norm", COPY, NOTED)
"""What a writer itself notes under `eagle_mlx`."""


def name_beside(repo: str, bits: int) -> str:
    """A repository of its own, named as the mlx-community names them; who loads the other then fetches it alone."""
    name = f"{repo}-{bits}bit"
    hub.check_full_id(name)
    return name


@contextlib.contextmanager
def quantized(source: Source, bits: int) -> Iterator[Source]:
    """The head of a source, quantised, in a temporary folder of its own and without the report of its training.

    Raises ConfigError for a head that is quantised already, or in which nothing can be.
    """
    if quantization_of(source.head) is not None:
        raise ConfigError(f"{source.folder} is quantised already; give --bits with the head as it was before")
    dtype = _sixteen_bits(source.folder)
    head: Any = in_dtype(load_head(source.folder), dtype)  # scales are found in the type in which they are written
    quantize_for(head, None, bits)
    noted = {name: value for name, value in source.noted.items() if name not in _OF_A_LAYOUT}
    target = next(iter(source.target_names), None)
    with tempfile.TemporaryDirectory(prefix="eagle-publish-") as name:
        folder = Path(name) / "head"
        _WRITERS[type(head)](head, folder, target_name=target, extra=noted, dtype=dtype)
        for file in (file for pattern in LICENCES for file in source.folder.glob(pattern)):
            shutil.copyfile(file, folder / file.name)
        yield read_source(folder)


def _sixteen_bits(folder: Path) -> mx.Dtype:
    """float16 where the file has it, else bfloat16."""
    found = {x.dtype for x in read_tensors(folder).values() if mx.issubdtype(x.dtype, mx.floating)}
    return mx.float16 if mx.float16 in found else mx.bfloat16
