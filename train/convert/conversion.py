"""Convert a head from one layout to another, or extract an MTP head from a published model."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

import mlx.core as mx

from eagle_mlx import hub
from eagle_mlx.catalog.base_model import BASE_MODEL, base_model_of, check_width
from eagle_mlx.catalog.head_search import register
from eagle_mlx.errors import ConfigError, EagleError
from eagle_mlx.files import check_apart, check_free
from eagle_mlx.formats.fields import NOTED, read_config, reading
from eagle_mlx.formats.mtp_layers import SIDECAR, mtp_prefix, shards_of
from eagle_mlx.formats.tensors import COPY, DTYPE_NAMES, INDEX, read_index, read_tensors, weights_of
from eagle_mlx.head_check import PROMPTS, TOKENS, head_warning
from eagle_mlx.heads import DraftHead, Format, HeadKind, kind_of, load_head
from eagle_mlx.heads.mtp import mtp_of_model, save_mtp
from eagle_mlx.heads.mtp.formats import quantized
from eagle_mlx.heads.precision import described, quantization_of
from eagle_mlx.target import load_target

from . import Conversion, Extraction

DTYPES = {name: dtype for dtype, name in DTYPE_NAMES.items()}
_NO_VERIFIER = (
    "the target's base model is not known for certain, so the config names no verifier, and speculators and vLLM "
    "cannot load the head; convert again with --base-model and the hub id or folder of that model"
)
OURS = ("target", COPY, NOTED, "target_norm")
"""Keys under `eagle_mlx` that the writers set themselves."""


def convert(options: Conversion, say: Callable[[str], None]) -> str:
    """Convert a head and read it back; return a line about it. Raises an EagleError; then nothing is written."""
    check_free(options.output, options.overwrite)
    check_apart(options.output, *filter(None, (options.source, options.target)))
    folder = hub.head_folder(options.source)
    target = load_target(options.target) if options.target is not None else None
    head = load_head(folder, target)
    kind = kind_of(head)
    if options.base_model is not None:
        check_width(options.base_model, head.target_hidden_size)
    tensors, config = read_tensors(folder), read_config(folder)
    types = sorted({str(x.dtype).removeprefix("mlx.core.") for x in tensors.values()})
    say(f"{options.source}: {kind.one_head} with tensors of {', '.join(types)}")
    layout = _layout(options, kind)
    if _copies_embedding(head, layout) and target is None:
        raise ConfigError(
            f"the {options.to} layout includes an embedding, but this head uses its target's; name the target with "
            "--target"
        )
    if target is not None and options.check:
        say(
            f"trying the head on {options.target}: {len(PROMPTS)} answers of {TOKENS} tokens, which takes minutes with "
            "a large target; use --no-check to skip this"
        )
        if (warning := head_warning(head, target, progress=True)) is not None:
            say(f"warning: {warning}")
    dtype = DTYPES[options.dtype] if options.dtype else exact_dtype(tensors, config)
    base = _base_model(options, config)
    verifier, noted = verifier_of(config), config.get("eagle_mlx") or {}
    more: dict[str, Any] = {}
    if options.to == "speculators":
        local = base is not None and options.base_model is None and Path(base).is_dir()
        only = ", which only this machine has; to share the head give --base-model with a hub id" if local else ""
        say(f"warning: {_NO_VERIFIER}" if base is None else f"verifier: {base}{only}")
        model = read_config(hub.resolve(options.target)) if options.target is not None else verifier
        architectures = [str(name) for name in model.get("architectures") or []]
        depth = options.depth or depth_of(config)
        more = {"base_model": base, "depth": depth, "target_architectures": architectures}
    name = hub.public_name(options.target) if options.target else noted.get("target") or verifier.get("name_or_path")
    extra = {key: value for key, value in noted.items() if key not in (*OURS, BASE_MODEL)}
    if base is not None and hub.full_id(base):
        extra[BASE_MODEL] = base
    target_name = str(name) if name else None
    layout.save(
        head, options.output, target_name=target_name, extra=extra, dtype=dtype, overwrite=options.overwrite, **more
    )
    load_head(options.output, target)  # the closing line says that it was read back
    return _closing(options, head, layout, dtype, base)


def _layout(options: Conversion, kind: HeadKind) -> Format:
    """Return the layout to write. Raises ConfigError if heads of this kind cannot be written in it."""
    layouts = {layout.name: layout for layout in kind.formats}
    if options.to not in layouts:
        raise ConfigError(
            f"{options.source} is {kind.one_head}, which cannot be written as {options.to}; "
            f"--to can be {' or '.join(layouts)}"
        )
    return layouts[options.to]


def exact_dtype(tensors: Mapping[str, mx.array], config: Mapping[str, Any]) -> mx.Dtype:
    """Return the smallest dtype that keeps every number of a head exact."""
    # Our zero-centered norms may have a wider dtype than the plain norms.
    least = 2 if (config.get("eagle_mlx") or {}).get(NOTED) else 0
    dtypes = {x.dtype for x in tensors.values() if x.ndim >= least and mx.issubdtype(x.dtype, mx.floating)}
    return dtypes.pop() if len(dtypes) == 1 else mx.float32


def verifier_of(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return the target's description in a speculators config."""
    verifier = (config.get("speculators_config") or {}).get("verifier")
    return verifier if isinstance(verifier, dict) else {}


def _base_model(options: Conversion, config: Mapping[str, Any]) -> str | None:
    """Return the model for other servers: as given, else from the target, else from the source.

    Otherwise it is the target's own folder, unless MLX quantized it. Its card and `_name_or_path` are not used,
    because those of a fine-tuned model name its base model.
    """
    if options.base_model is not None:
        folder = Path(options.base_model).expanduser()
        return str(folder.resolve()) if folder.is_dir() else options.base_model
    noted, named = config.get("eagle_mlx") or {}, verifier_of(config).get("name_or_path")
    base = base_model_of(options.target) if options.target is not None else None
    base = base or noted.get(BASE_MODEL) or (named if named != noted.get("target") else None)
    if base or options.target is None:
        return base
    folder = Path(options.target).expanduser()
    return str(folder.resolve()) if folder.is_dir() and "quantization" not in read_config(folder) else None


def depth_of(config: Mapping[str, Any]) -> int:
    """Return the draft tokens in a speculators config; 3 without them."""
    methods = (config.get("speculators_config") or {}).get("proposal_methods")
    depth = methods[0].get("speculative_tokens") if isinstance(methods, list) and methods else None
    return depth if isinstance(depth, int) and depth > 0 else 3


def _closing(options: Conversion, head: DraftHead, layout: Format, dtype: mx.Dtype, base: str | None) -> str:
    tensors, kind = read_tensors(Path(options.output)), kind_of(head)
    size = sum(x.nbytes for x in tensors.values())
    copied = ", with a copy of the target's embedding" if _copies_embedding(head, layout) else ""
    if quantization_of(head) is not None:
        readers = "other servers cannot read it, because MLX quantized it"
    elif options.to == "speculators" and base is None:
        readers = "speculators and vLLM cannot load it without a verifier: convert again with --base-model"
    else:
        flags = ", ".join(kind.unusual(head))
        readers = f"the layout is {layout.read_by}" + (f", in a version that supports {flags}" if flags else "")
    return (
        f"{options.output}: {kind.one_head} in the {options.to} layout, {len(tensors)} tensors in "
        f"{DTYPE_NAMES[dtype]}, {size / 1e6:,.1f} MB{copied}. EAGLE-MLX has read it back; {readers}"
    )


def _copies_embedding(head: DraftHead, layout: Format) -> bool:
    """Return whether the layout needs a copy of the target's embedding. MLX-quantized heads never do."""
    return layout.has_embedding and not head.config.own_embedding and quantization_of(head) is None


def extract(options: Extraction, say: Callable[[str], None]) -> str:
    """Extract the head and write it; return a line about it. Raises an EagleError; then nothing is written."""
    name = hub.public_name(options.source)
    output = options.output or f"{name.rpartition('/')[2]}-mtp"
    check_free(output, options.overwrite)
    check_apart(output, options.source)
    folder = _mtp_folder(options.source, options.index)
    say(f"reading MTP layer {options.index} of {options.source}")
    head, notes = mtp_of_model(folder, options.index, target_norm=options.hidden == "after")
    for line in notes:
        say(line)
    dtype = DTYPES[options.dtype] if options.dtype else _dtype_of(read_config(folder))
    if options.bits is not None and head.config.quantization is None:
        head = quantized(head, options.bits, options.group_size)
    save_mtp(head, output, target_name=name, dtype=dtype, overwrite=options.overwrite)
    register(output, options.source, "extracted")
    size = sum(value.nbytes for value in weights_of(head).values())
    precision = described(head) if head.config.quantization else DTYPE_NAMES[dtype]
    other = "before" if options.hidden == "after" else "after"
    return (
        f"{output}: an MTP head of {head.config.model_type} in {precision}, {size / 1e6:,.1f} MB in memory. EAGLE-MLX "
        f"loads it; to try the other hidden state, convert again with --hidden {other} and compare with eagle-bench"
    )


def _dtype_of(config: dict[str, Any]) -> mx.Dtype:
    parts = config, config.get("text_config") or {}
    named = next((part[key] for part in parts for key in ("torch_dtype", "dtype") if part.get(key)), None)
    return DTYPES.get(str(named), mx.bfloat16)


def _mtp_folder(source: str, index: int) -> Path:
    """Return a folder with config.json and the weights of MTP layer `index`; from the hub, only the files with it."""
    repo = None if Path(source).expanduser().exists() else hub.hub_id(source)
    if repo is None:
        return hub.resolve(source)
    config = hub.fetch_file(repo, "config.json")
    folder, commit = config.parent, config.parent.name
    with reading(config):
        prefix = mtp_prefix(read_config(folder), index)
    if _optional(repo, SIDECAR, commit) is None:
        listed = _optional(repo, INDEX, commit)
        for shard in ["model.safetensors"] if listed is None else shards_of(repo, read_index(listed), prefix):
            hub.fetch_file(repo, shard, commit)
    return folder


def _optional(repo: str, file: str, commit: str) -> Path | None:
    """Return a file that a repository may lack; None if it cannot be fetched."""
    with suppress(EagleError):
        return hub.fetch_file(repo, file, commit)
    return None
