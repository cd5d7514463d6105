"""The target: an mlx-lm model with embed, a forward that returns hidden states, norm and lm_head."""

from __future__ import annotations

import hashlib
import json
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import cached_property, reduce
from pathlib import Path
from typing import Any, cast

import mlx.core as mx
import mlx.nn as nn
import mlx_lm
import numpy as np
from mlx_lm.tokenizer_utils import TokenizerWrapper
from mlx_lm.utils import load_model, load_tokenizer

from eagle_mlx import adapters, hooks, hub
from eagle_mlx.cpu import SharedAngles, compute_dtype, use_shortcuts
from eagle_mlx.errors import CheckpointError, TargetError, in_one_line, loading, require
from eagle_mlx.formats.tensors import arrays_of, check_length
from eagle_mlx.hooks import AddsFeatures, Hooks, Recording, RecordsInput, RecordsOutput
from eagle_mlx.memory import free_memory, limit_mlx
from eagle_mlx.vision.tower import ImageInput, Vision

# Names of the parts in mlx-lm's models, in the order in which we look for them.
_BACKBONES = ("model", "language_model.model", "model.language_model", "transformer", "backbone", "model.model")
_EMBEDDINGS = (
    *("embed_tokens", "wte", "embedding", "embeddings", "tok_embeddings", "word_embeddings", "embed_in"),
    "token_embeddings",
)
_NORMS = (
    *("norm", "ln_f", "final_layernorm", "norm_f", "final_norm", "embedding_norm", "final_layer_norm", "output_norm"),
)
_STARTS = (1, 4, 16, 64)
"""Numbers of layers after which the device starts in a forward. It computes each part while Python builds the next one,
which has three times as many layers. On a Mac, Python builds a forward in 2.5 to 3.5 of some 20 ms."""
_LM_HEADS = ("lm_head", "language_model.lm_head", "output", "embed_out", "model.embed_out")
_DTYPES = ("float32", "bfloat16", "float16")
_FINGERPRINT_VALUES = 1024
"""Values sampled from every tensor, spread over all of it so that a change of some rows is noticed."""


@dataclass(frozen=True)
class Forward:
    logits: mx.array  # [B, L, V]; computed only if used
    aux: tuple[mx.array, ...]  # the outputs of the requested layers in order, [B, L, H] each
    hidden: mx.array | None = None  # [B, L, H], the final norm's input


class Target:
    """A language model in memory, with what speculative decoding needs.

    Raises TargetError if its embedding, layers, final norm or output projection cannot be found.
    """

    def __init__(self, model: nn.Module, tokenizer: TokenizerWrapper | None = None, name: str = ""):
        require("model", model, nn.Module, "a model of mlx-lm (to load one by name: em.load_target)")
        self.model = model
        self.tokenizer = tokenizer if isinstance(tokenizer, TokenizerWrapper | None) else TokenizerWrapper(tokenizer)
        self.name = name
        self.adapter: adapters.Adapter | None = None  # the adapters that it was loaded with
        self.vision: Vision | None = None  # if it was loaded from a folder of a model that sees
        self.whole_digest: str | None = None  # the whole target's fingerprint, if this process has only a part of it
        self.on_lost: Callable[[str], None] | None = None
        """Called from another thread with the reason if other ranks are lost; never called without ranks."""
        self._backbone = backbone = _backbone(model)
        self._embed = _first(backbone, _EMBEDDINGS, "token embedding", model)
        self._norm = _first(backbone, _NORMS, "final norm", model)
        self._lm_head = _find(model, _LM_HEADS) or self._embed.as_linear
        self.layers: list[nn.Module] = list(model.layers)
        self._hooks: Hooks | None = Hooks.of(model)
        hooks.add_to_rope(model, self._hooks, hooks.PlacesOneByOne)
        hooks.tile_attention(model, self._hooks)
        self._hooks.add(self._norm, RecordsInput)
        sizes = (setting_of(model, name) for name in ("max_position_embeddings", "max_seq_len", "n_ctx"))
        longest = next((size for size in sizes if isinstance(size, int) and size > 0), 1 << 20)
        self.context_length = min(longest, hooks.bound_positions(backbone, self._hooks) or longest)
        self.num_layers = len(self.layers)
        self._starts = [self.layers[count - 1] for count in _STARTS if count < self.num_layers]
        probe = self.embed(mx.zeros((1, 1), mx.int32))
        self.hidden_size = int(probe.shape[-1])
        self.dtype = probe.dtype
        self.vocab_size = int(self.lm_head(probe).shape[-1])

    @property
    def eos_token_ids(self) -> frozenset[int]:
        return frozenset(self.tokenizer.eos_token_ids) if self.tokenizer is not None else frozenset()

    @property
    def bits(self) -> int | None:
        """Bits of most of its weights if these are quantized, else None."""
        counts: Counter[int | None] = Counter()
        for module in self.model.modules():
            if "scales" in module:
                counts[module.bits] += module.weight.size * 32 // module.bits
            else:
                counts[None] += sum(x.size for x in module.values() if isinstance(x, mx.array))
        return max(counts, key=lambda bits: counts[bits])

    @property
    def weight_bytes(self) -> int:
        """The most bytes of weights that a forward reads, without an embedding that is not the output projection."""
        tied = getattr(self._lm_head, "__self__", None) is self._embed
        return nbytes_of(self.model) - (0 if tied else nbytes_of(self._embed))

    @property
    def free_memory(self) -> int:
        """Bytes that are free, without those that the first image will take."""
        return free_memory() - (self.vision.unread_bytes if self.vision is not None else 0)

    @property
    def ranks(self) -> int:
        """The processes that have it or a part of it. With several, its model can be used only through `forward`."""
        return 1

    def close(self) -> None:
        """Remove the hooks from the model, and release other ranks. It may be called twice."""
        self._hooks = None

    @property
    def hooks(self) -> Hooks:
        """The hooks on its model, for as long as a target of the model is open. Raises TargetError if it is closed."""
        if self._hooks is None:
            raise TargetError(f"the target {self.name} is closed; load it again")
        return self._hooks

    def embed(self, tokens: mx.array) -> mx.array:
        """Embed token ids [...] as [..., H]."""
        return cast(mx.array, self._embed(tokens))

    def norm(self, hidden: mx.array) -> mx.array:
        """Apply the final norm to the last layer's output [..., H]."""
        return cast(mx.array, self._norm(hidden))

    def lm_head(self, hidden: mx.array) -> mx.array:
        """Return the output projection [..., V] of normed hidden states [..., H], without scales and soft caps."""
        return cast(mx.array, self._lm_head(hidden))

    def logits(self, hidden: mx.array) -> mx.array:
        """Return the logits [..., V] of normed hidden states [..., H], as the model itself computes them.

        The model runs without its layers, so it applies its scales, soft cap and output projection.
        """
        read = hidden.reshape(-1, *hidden.shape[-2:]) if hidden.ndim > 1 else hidden[None, None]
        self.hooks.add(self._before_logits, RecordsOutput)
        with Recording(given=(self._before_logits, read)).running():
            out: mx.array = self.model(mx.zeros(read.shape[:2], mx.int32))
        return out.reshape(*hidden.shape[:-1], out.shape[-1])

    @cached_property
    def logit_cap(self) -> float | None:
        """The limit that the model's logits approach, None if there is none."""
        far = 1e6 * mx.random.normal((self.hidden_size,), key=mx.random.key(0))
        near, end = (float(mx.max(mx.abs(self.logits(x)))) for x in (far, 100 * far))
        return near if near == end else None

    @cached_property
    def _before_logits(self) -> nn.Module:
        """The module that returns normed hidden states: the backbone, or the final norm if the backbone goes on."""
        recording = self._recorded_run(self._backbone, self._norm)
        of_backbone, normed = (recording.outputs.get(id(module)) for module in (self._backbone, self._norm))
        return cast(nn.Module, self._backbone if of_backbone is normed else self._norm)

    @property
    def norm_is_last(self) -> bool:
        """Whether the final norm is called once, and all layers by themselves. Nothing is computed."""
        recording = self._recorded_run(self.layers[-1])
        return recording.norms == 1 and id(self.layers[-1]) in recording.outputs

    def _recorded_run(self, *modules: nn.Module) -> Recording:
        """Run the model over a token, without computing anything, and record the outputs of modules."""
        for module in modules:
            self.hooks.add(module, RecordsOutput)
        with (recording := Recording()).running():
            self.model(mx.zeros((1, 1), mx.int32))
        return recording

    def forward(
        self,
        tokens: mx.array,
        cache: Sequence[Any] | None = None,
        aux_layers: Sequence[int] = (),
        ends: Sequence[int] | None = None,
        images: ImageInput | None = None,
    ) -> Forward:
        """Run the model over tokens [B, L] and return the outputs of `aux_layers` (counted from 0).

        Unused results are never computed. `ends`: for each row, the one position whose logits [B, 1, V] are returned.
        Raises TargetError for layers that the model lacks or whose output is not one hidden state per token.
        """
        for layer in aux_layers:
            if not 0 <= layer < self.num_layers:
                raise TargetError(f"there is no layer {layer}: the target has layers 0 to {self.num_layers - 1}")
            self.hooks.add(self.layers[layer], RecordsOutput)
        recording = Recording()
        if images is not None:
            self.hooks.add(self._embed, RecordsOutput)
            recording.given, tokens = (self._embed, images.embeddings), images.tokens
            for first, features in zip(self.layers, images.after_layers, strict=False):
                self.hooks.add(first, AddsFeatures)
                recording.added[id(first)] = features
            if images.positions:
                assert self.vision is not None
                hooks.add_to_rope(self.model, self.hooks, hooks.RotatesByAxes)
                recording.axes, recording.axis_of = images.positions, mx.array(self.vision.axis_of, mx.int32)
        last = None if ends is None else self._before_logits  # before the run, since it runs the model itself
        if use_shortcuts():
            recording.angles = SharedAngles(self.hooks.angles)
        elif cache is not None:
            recording.starts = [id(layer) for layer in self._starts]
            for first in self._starts:
                self.hooks.add(first, RecordsOutput)
        with recording.running():
            logits = self.model(tokens, cache=None if cache is None else list(cache))
        if ends is not None and logits.shape[1] > 1:
            at = mx.array(list(ends), mx.int32)[:, None, None]
            logits = self.logits(mx.take_along_axis(recording.outputs[id(last)], at, axis=1))
        return Forward(logits, tuple(self._recorded(recording, x, tokens) for x in aux_layers), recording.hidden)

    def _recorded(self, recording: Recording, index: int, tokens: mx.array) -> mx.array:
        """Return a layer's recorded output. Raises TargetError if it is not [B, L, H]."""
        out, wanted = recording.outputs.get(id(self.layers[index])), (*tokens.shape, self.hidden_size)
        if out is None:
            reason = "its layers are called in parts"
        elif out.shape != wanted:
            reason = f"its layers give {list(out.shape)} for {list(wanted[:2])} tokens of {wanted[2]} numbers each"
        else:
            return out
        kind = type(self.model).__module__.rsplit(".", 1)[-1]
        instead = "draft without a head, with n-grams or a draft model"
        raise TargetError(f"the hidden states of models of type {kind} cannot be read: {reason}; {instead}")


def load_target(
    name: str | Path,
    dtype: mx.Dtype | str | None = None,
    *,
    adapter_path: str | Path | None = None,
    trust_remote_code: bool = False,
    extra_eos_tokens: str | Iterable[str | int] = (),
    chat_template: str | None = None,
    chat_template_args: Mapping[str, Any] | None = None,
    lazy: bool = False,
    shard: Callable[[nn.Module], None] | None = None,
) -> Target:
    """Load a target from a folder or a hub id with mlx-lm.

    `dtype` is the dtype of weights that are not quantized, or its name, such as "bfloat16"; by default that of the
    files, except on a CPU under Linux, where only float32 uses BLAS. Further arguments are mlx-lm's. With `lazy`,
    weights stay in their files, in the files' dtype, until they are used. `shard` reduces the model to this process's
    part before weights are read (`ranks`). On a GPU, this limits the freed buffers that MLX keeps (`memory.limit_mlx`).
    Raises TargetError if mlx-lm cannot load the model.
    """
    template = {"chat_template": text} if (text := adapters.read_template(chat_template)) else {}
    folder = hub.resolve(name, code=trust_remote_code)
    adapter_folder = None if adapter_path is None else adapters.adapter_folder(adapter_path)
    dtype, digest = compute_dtype() if dtype is None else _floating(dtype), None
    with loading(f"{folder} as a target"):
        model, tokenizer = _load(folder, template, trust_remote_code, lazy=lazy or bool(shard))
        adapter = None if adapter_folder is None else adapters.add_adapters(model, adapter_folder)
        for token in [extra_eos_tokens] if isinstance(extra_eos_tokens, str) else map(str, extra_eos_tokens):
            if not (token.isdecimal() or token in tokenizer.get_vocab()):
                what = f"--extra-eos-token {token!r}"
                raise TargetError(f"{what} is not a token of this tokenizer; give a token or its id")
            tokenizer.add_eos_token(token)
        if chat_template_args:
            tokenizer = adapters.ChatTokenizer(tokenizer, chat_template_args)
        if shard is not None:
            digest = _digest_of_files(folder, dtype, tokenizer, trust_remote_code)
            shard(model)
        if not lazy:
            if dtype is not None:
                model.set_dtype(dtype)
            mx.eval(model.parameters())
            limit_mlx()
        target = Target(model, tokenizer, name=str(name))
        if shard is None:
            target.forward(mx.zeros((1, 1), mx.int32))  # computes nothing, but finds shapes that do not fit
        target.vision = Vision.of(folder, target.embed, target.dtype, is_sharded=shard is not None)
    target.whole_digest, target.adapter = digest, adapter
    return target


def _load(folder: Path, template: dict[str, str], trusted: bool, lazy: bool) -> tuple[nn.Module, TokenizerWrapper]:
    """Load a model and its tokenizer with mlx-lm. Raises TargetError with a remedy for known causes, or anything."""
    settings = {"trust_remote_code": trusted, **template}
    try:
        model, tokenizer = mlx_lm.load(str(folder), settings, lazy=lazy, trust_remote_code=trusted)[:2]
        if len({tuple(tokenizer.encode(letter)) for letter in "aA0"}) == 1:  # files are missing
            raise ValueError("its tokenizer has no vocabulary; copy tokenizer.json or the like from its original")
    except Exception as e:
        hint = ""
        if not trusted and "trust_remote_code" in str(e):
            hint = "; if you trust its authors, add --trust-remote-code"
        if isinstance(e, ModuleNotFoundError) and str(e.name).startswith("mlx_lm."):
            hint = "; update mlx-lm, or correct chat_template_type or tool_parser_type in its tokenizer_config.json"
        if str(e).startswith(("Received ", "Missing ")):
            hint = "; if these are the weights of a head, name its target here, and the folder as the head"
        why = in_one_line(e).rstrip(".") + hint
        try:
            for file in sorted(folder.glob(hub.WEIGHTS)):
                check_length(file)
        except CheckpointError as damage:  # MLX names no file
            why = str(damage)
        raise TargetError(f"{folder} cannot be loaded as a target: {why}") from e
    templates = tokenizer.chat_template
    if isinstance(templates, dict):  # mlx-lm searches only single templates for marks of tools
        of_tools = templates.get("tool_use") or next(iter(templates.values()))
        tokenizer = load_tokenizer(folder, {**settings, "chat_template": of_tools}, sorted(tokenizer.eos_token_ids))
        tokenizer.chat_template = templates
    with suppress(OSError, ValueError):
        advice = json.loads((folder / "generation_config.json").read_text(encoding="utf-8"))
        if advice.get("eos_token_id") == 0:  # mlx-lm takes it for none
            tokenizer.add_eos_token("0")
    return model, tokenizer


def setting_of(model: nn.Module, name: str) -> Any:
    """Return a setting of a model's config, or of its part for text; None without it."""
    args = getattr(model, "args", None)
    args = getattr(args, "text_config", None) or args
    return args.get(name) if isinstance(args, dict) else getattr(args, name, None)


def _floating(dtype: object) -> mx.Dtype:
    name = str(dtype).rpartition(".")[2]
    if name not in _DTYPES:
        raise TargetError(f"a target cannot be loaded in dtype {dtype!r}; write one of {', '.join(_DTYPES)}")
    return cast(mx.Dtype, getattr(mx, name))


def _find(root: Any, paths: Sequence[str]) -> Any | None:
    nodes = (reduce(lambda node, name: getattr(node, name, None), path.split("."), root) for path in paths)
    return next((node for node in nodes if node is not None), None)


def _backbone(model: nn.Module) -> Any:
    """Return the first backbone with a token embedding, else the first that exists."""
    places = [_find(model, (path,)) for path in _BACKBONES]
    with_embedding = (place for place in places if place is not None and _find(place, _EMBEDDINGS) is not None)
    return next(with_embedding, None) or _first(model, _BACKBONES, "backbone", model)


def _first(root: Any, paths: Sequence[str], what: str, model: nn.Module) -> Any:
    if (node := _find(root, paths)) is None:
        kind = type(model).__module__.rsplit(".", 1)[-1]
        raise TargetError(f"no {what} found in a model of type {kind}; looked for {', '.join(paths)}")
    return node


def fingerprint(target: Target) -> str:
    """Return a hexadecimal hash of the target's tensors (`digest_of`), including adapters, and its chat template."""
    return target.whole_digest or digest_of(target.model, _template_of(target.tokenizer))


def _template_of(tokenizer: TokenizerWrapper | None) -> str:
    return str(getattr(tokenizer, "chat_template", None))


def nbytes_of(module: nn.Module) -> int:
    return sum(array.nbytes for array in arrays_of(module.parameters()).values())


def _digest_of_files(folder: Path, dtype: mx.Dtype | None, tokenizer: TokenizerWrapper, trusted: bool) -> str:
    """Return the fingerprint of a whole target, of which this process will have a part."""
    model = load_model(folder, lazy=True, trust_remote_code=trusted)[0]
    if dtype is not None:
        model.set_dtype(dtype)
    leaves = list(arrays_of(model.parameters()).items())
    del model
    return _digest(leaves, _template_of(tokenizer))


def digest_of(module: nn.Module, more: str = "") -> str:
    """Return a hexadecimal hash of a module's tensors (names, shapes, dtypes, some values) and a text."""
    return _digest(list(arrays_of(module.parameters()).items()), more)


def _digest(leaves: list[tuple[str, mx.array]], more: str) -> str:
    """Return the hash, emptying `leaves` on the way so that only one of the tensors is in memory at a time."""
    digest = hashlib.blake2s(more.encode(errors="replace"))
    leaves.sort(key=lambda leaf: leaf[0], reverse=True)
    while leaves:
        name, leaf = leaves.pop()
        some = leaf.reshape(-1)[:: max(1, leaf.size // _FINGERPRINT_VALUES)].astype(mx.float32)
        digest.update(f"{name}{leaf.shape}{leaf.dtype}".encode())
        digest.update(np.array(some).tobytes())
    return digest.hexdigest()[:16]
