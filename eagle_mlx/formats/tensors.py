"""Read and write files of tensors, with errors that name the file and the tensor."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypedDict, Unpack, cast

import mlx.core as mx
import mlx.nn as nn
from mlx.utils import tree_flatten
from safetensors import SafetensorError, safe_open

from eagle_mlx.cpu import compute_dtype
from eagle_mlx.errors import CheckpointError
from eagle_mlx.files import new_folder, sync
from eagle_mlx.formats.fields import read_config
from eagle_mlx.formats.torchzip import read_torch
from eagle_mlx.hub import weight_files, why_damaged

Tensors = dict[str, mx.array]  # by their names
EXACT = ("e_score_correction_bias",)
"""Suffixes of weights that keep their dtype: they route to experts, and rounding would change the choice."""
DTYPE_NAMES = {mx.bfloat16: "bfloat16", mx.float16: "float16", mx.float32: "float32"}
INDEX = "model.safetensors.index.json"
_WHOLE = "model.safetensors"
_MAPS = ("d2t", "t2d")  # tensors of a head that are not weights
COPY = "holds_the_targets_embedding"
"""Key under `eagle_mlx` in a config: the embedding in the file is a copy of the target's, for other loaders."""


@dataclass(frozen=True)
class HeadFolder:
    """The contents of a head's folder."""

    folder: Path
    config: dict[str, Any]
    tensors: Tensors  # without the prefix `model.`
    target_layers: int | None = None
    """The target's number of layers if known: it determines the aux layers if the config does not name them."""
    target_vocab: int | None = None  # the size of the target's vocabulary if known, for configs without one
    prefixed: bool = False  # whether some names have that prefix

    @classmethod
    def read(cls, folder: Path, target_layers: int | None = None, target_vocab: int | None = None) -> HeadFolder:
        """Read a folder; tensors are loaded lazily. Raises CheckpointError as `read_config` and `read_tensors` do."""
        config, named = read_config(folder), read_tensors(folder)
        tensors: Tensors = {}
        for name, value in named.items():
            short = name.removeprefix("model.")
            if short in tensors:
                raise CheckpointError(f"{folder} has {short} twice, once as {name}; keep one of them")
            tensors[short] = value
        return cls(folder, config, tensors, target_layers, target_vocab, prefixed=named.keys() != tensors.keys())

    @property
    def file(self) -> Path:
        return self.folder / "config.json"

    def without_copy(self) -> Tensors:
        """Return the tensors without an embedding that was copied from the target."""
        is_copy = (self.config.get("eagle_mlx") or {}).get(COPY)
        return {name: x for name, x in self.tensors.items() if not (is_copy and name == "embed_tokens.weight")}


class SaveOptions(TypedDict, total=False):
    """Arguments of every function that saves a head; the last three are for the layouts of speculators."""

    target_name: str | None  # stored under `eagle_mlx` in config.json
    extra: Mapping[str, Any] | None
    """More JSON to store there. Other loaders ignore it."""
    dtype: mx.Dtype  # the dtype of weights that are not quantized; bfloat16 by default
    overwrite: bool
    base_model: str | None
    """The target for other servers, a hub id or local folder, not quantized by MLX. Without it, speculators loads no
    head."""
    target_architectures: Sequence[str]
    depth: int  # the number of tokens that a server should draft


def save_head(
    folder: str | Path,
    config: Mapping[str, Any],
    weights: Mapping[str, mx.array],
    noted: Mapping[str, Any] = {},
    exact: Mapping[str, mx.array] = {},
    **options: Unpack[SaveOptions],
) -> None:
    """Write a folder, which appears only once complete: weights in the dtype of the options and `exact` ones in their
    own, with `noted` and the options in the config."""
    dtype = options.get("dtype", mx.bfloat16)
    notes = {"target": options.get("target_name"), **noted, **(options.get("extra") or {})}
    config = {**config, "torch_dtype": DTYPE_NAMES[dtype], "eagle_mlx": notes}
    tensors = {**in_file_type(weights, dtype), **exact}
    mx.eval(tensors)
    with new_folder(folder, options.get("overwrite", False)) as part:
        write_tensors(part / _WHOLE, tensors)
        (part / "config.json").write_text(json.dumps(config, indent=2) + "\n")


def with_embedding(head: Any) -> tuple[Tensors, dict[str, bool]]:
    """Return a head's weights with an embedding (its own, else its target's) and a note for the config.

    Raises HeadError if it has neither.
    """
    weights = weights_of(head)
    if "embed_tokens.weight" in weights or head.config.quantization is not None:
        return weights, {}  # other loaders cannot read MLX's quantization
    return {**weights, "embed_tokens.weight": head.target.embed(mx.arange(head.vocab_size))}, {COPY: True}


def arrays_of(tree: Any) -> Tensors:
    """Return the arrays of a tree, such as a module's parameters, by their full names."""
    return dict(cast(list[tuple[str, mx.array]], tree_flatten(tree)))


def weights_of(module: nn.Module) -> Tensors:
    return arrays_of(module.parameters())


def in_file_type(weights: Mapping[str, mx.array], dtype: mx.Dtype) -> Tensors:
    """Return weights in a dtype, except quantized ones and those that must be exact. The others are not copied."""
    changed = {
        name: x.astype(dtype)
        for name, x in weights.items()
        if x.dtype != dtype and mx.issubdtype(x.dtype, mx.floating) and not name.endswith(EXACT)
    }
    return {**weights, **changed}


def write_tensors(file: Path, tensors: Mapping[str, mx.array]) -> None:
    """Write a safetensors file to the disk. Raises OSError if the disk is full, which MLX hides if given a path."""
    with file.open("wb") as out:
        mx.save_safetensors(out, dict(tensors), metadata={"format": "pt"})
        out.flush()
        sync(out.fileno())


def read_tensors(folder: Path) -> Tensors:
    """Return all tensors of a folder's safetensors files, or of its PyTorch files if it has no others.

    Raises CheckpointError if there are none, if a file is damaged or missing, or if two files hold the same name. As in
    transformers, an index next to a single complete file is ignored.
    """
    files = weight_files(folder)
    if (folder / INDEX).exists() and not (folder / _WHOLE).exists():
        named = sorted(set(read_index(folder / INDEX).values()))
        if missing := [shard for shard in named if not (folder / shard).exists()]:
            raise CheckpointError(f"{folder} lacks {', '.join(missing)}, which its {INDEX} names; download it again")
    if not files:
        raise CheckpointError(f"{folder} has no weights: neither .safetensors files nor pytorch_model.bin")
    tensors: Tensors = {}
    for file in files:
        loaded = read_torch(file) if file.suffix == ".bin" else read_safetensors(file)
        if twice := sorted(tensors.keys() & loaded.keys()):
            raise CheckpointError(f"{file} and another file of its folder both have {twice[0]}; keep one of them")
        tensors.update(loaded)
    return tensors


def check_floating(folder: Path, tensors: Mapping[str, mx.array]) -> None:
    """Raise CheckpointError if a weight is not floating point and has no scales.

    MLX reads 8-bit floats as uint8, so -0.1 would become 156. Weights with scales are left to the caller.
    """
    for name, value in tensors.items():
        scales = {f"{name}_scale_inv", f"{name.removesuffix('.weight')}.scales"}
        is_exempt = name.rpartition(".")[2] in _MAPS or scales & tensors.keys()
        if not (is_exempt or mx.issubdtype(value.dtype, mx.floating)):
            raise CheckpointError(
                f"{name} in {folder} is of type {value.dtype}, without a scale that makes it a weight; use the head "
                "from before quantization, in bfloat16, float16 or float32"
            )


def read_index(file: Path) -> dict[str, str]:
    """Return the tensors' names with the files that have them. Raises CheckpointError."""
    try:
        names = json.loads(file.read_text(encoding="utf-8"))["weight_map"]
        return {str(name): str(shard) for name, shard in names.items()}
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as e:
        raise CheckpointError(f"{file} is not an index of a model's weights; download it again") from e


def read_safetensors(file: Path) -> Tensors:
    """Return the tensors of a file, loaded lazily. Raises CheckpointError if the file is damaged."""
    check_length(file)
    try:
        return cast("Tensors", mx.load(str(file)))
    except (RuntimeError, ValueError) as e:
        raise CheckpointError(f"{file} cannot be read as safetensors ({e}); download or make it again") from e


def fill(
    where: Path, head: nn.Module, tensors: Mapping[str, mx.array], in_file: Callable[[str], str] = lambda name: name
) -> None:
    """Load weights into a head; `in_file` maps a parameter's name to the one in the file.

    Raises CheckpointError for missing, unknown or wrongly shaped tensors.
    """
    expected = {in_file(name): tuple(value.shape) for name, value in weights_of(head).items()}
    shapes = {in_file(name): tuple(value.shape) for name, value in tensors.items()}
    listed = {"missing": expected.keys() - shapes.keys(), "not known to this format": shapes.keys() - expected.keys()}
    problems = [f"{what}: {', '.join(sorted(names))}" for what, names in listed.items() if names]
    problems += [
        f"{name} has shape {shapes[name]}, expected {shape}"
        for name, shape in sorted(expected.items())
        if shapes.get(name, shape) != shape
    ]
    if problems:
        raise CheckpointError(f"the tensors in {where} do not match its config.json; " + "; ".join(problems))
    dtype = compute_dtype()
    floating = {name: x for name, x in tensors.items() if mx.issubdtype(x.dtype, mx.floating)}
    cast = floating if dtype is None else {name: x.astype(dtype) for name, x in floating.items()}
    head.load_weights(list({**tensors, **cast}.items()))
    finite = {in_file(name): mx.isfinite(x).all() for name, x in cast.items()}
    mx.eval(head.parameters(), finite)
    if broken := sorted(name for name, is_finite in finite.items() if not is_finite.item()):
        raise CheckpointError(
            f"the weights in {where} have NaN or infinity: {', '.join(broken)}; the file is damaged, or training "
            "diverged"
        )


def check_length(file: Path) -> None:
    """Raise CheckpointError if a safetensors file is damaged or cut short, which a lazy load notices late or never."""
    try:
        with file.open("rb"), safe_open(file, "numpy"):
            pass
    except PermissionError as e:
        raise CheckpointError(f"{file} cannot be read ({e.strerror}); make it readable") from e
    except (SafetensorError, OSError) as e:
        why = f"{file} is damaged or cut short ({file.stat().st_size} bytes: {e}); download or make it again"
        raise CheckpointError(why_damaged(file, why)) from e


def layer_width(config: Mapping[str, Any], tensors: Mapping[str, mx.array], layer: str) -> int | None:
    """Return the input width of a layer's query projection, before packing; None if there is no such layer."""
    name, quantization = f"{layer}.self_attn.q_proj", config.get("quantization")
    if f"{name}.weight" not in tensors:
        return None
    group = quantization.get("group_size") if isinstance(quantization, dict) else None
    if f"{name}.scales" in tensors and isinstance(group, int):
        return int(tensors[f"{name}.scales"].shape[-1] * group)
    return int(tensors[f"{name}.weight"].shape[-1])
