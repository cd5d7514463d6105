"""The target: an mlx-lm model seen as embed, a forward that gives aux hidden states, norm and lm_head."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import mlx_lm
from mlx_lm.tokenizer_utils import TokenizerWrapper

from eagle_mlx import hub
from eagle_mlx.errors import TargetError
from eagle_mlx.rope import place_one_by_one

# Where mlx-lm's architectures keep their parts, in the order in which they are looked for.
_BACKBONES = ("model", "language_model.model", "model.language_model", "transformer", "backbone", "model.model")
_EMBEDDINGS = (
    "embed_tokens",
    "wte",
    "embedding",
    "embeddings",
    "tok_embeddings",
    "word_embeddings",
    "embed_in",
    "token_embeddings",
)
_NORMS = (
    "norm",
    "ln_f",
    "final_layernorm",
    "norm_f",
    "final_norm",
    "embedding_norm",
    "final_layer_norm",
    "output_norm",
)
_LM_HEADS = ("lm_head", "language_model.lm_head", "output", "embed_out", "model.embed_out")


@dataclass(frozen=True)
class Forward:
    logits: mx.array
    """[B, L, V]; costs nothing unless it is used."""
    aux: tuple[mx.array, ...]
    """One [B, L, H] for each layer asked for, in that order: the layers' outputs."""


class Target:
    """A language model in memory, with what speculation needs of it.

    Raises TargetError where the model's embedding, layers, final norm or output projection cannot be found.
    """

    def __init__(self, model: nn.Module, tokenizer: TokenizerWrapper | None = None, name: str = ""):
        self.model = model
        self.tokenizer = tokenizer
        self.name = name
        backbone = _backbone(model)
        self._embed = _first(backbone, _EMBEDDINGS, "token embedding", model)
        self._norm = _first(backbone, _NORMS, "final norm", model)
        self._lm_head = _find(model, _LM_HEADS) or self._embed.as_linear
        self._layers: list[nn.Module] = list(model.layers)
        self._angles = place_one_by_one(model)
        self._tape: dict[int, mx.array] = {}
        self._ends: mx.array | None = None
        """[B, 1, 1] int32 during a forward of which only these positions' logits are wanted."""
        self._normed: list[bool] = []
        """Calls of the final norm in such a forward: whether the last layer was behind it."""
        self._norm_is_last: bool | None = None
        """Whether there is one call, behind all layers, so that it can be cut short; None before the first forward."""
        args = getattr(model, "args", None)
        args = getattr(args, "text_config", None) or args
        self.context_length = int(_argument(args, ("max_position_embeddings", "max_seq_len", "n_ctx"), 1 << 20))
        self.num_layers = len(self._layers)
        probe = self.embed(mx.zeros((1, 1), mx.int32))
        self.hidden_size = int(probe.shape[-1])
        self.dtype = probe.dtype
        self.vocab_size = int(self.lm_head(probe).shape[-1])

    @property
    def eos_token_ids(self) -> frozenset[int]:
        return frozenset(self.tokenizer.eos_token_ids) if self.tokenizer is not None else frozenset()

    def embed(self, tokens: mx.array) -> mx.array:
        """Token ids [...] -> embeddings [..., H]."""
        out: mx.array = self._embed(tokens)
        return out

    def norm(self, hidden: mx.array) -> mx.array:
        """The last layer's output [..., H] through the final norm."""
        out: mx.array = self._norm(hidden)
        return out

    def lm_head(self, hidden: mx.array) -> mx.array:
        """Normed hidden states [..., H] -> logits [..., V]."""
        out: mx.array = self._lm_head(hidden)
        return out

    def forward(
        self,
        tokens: mx.array,
        cache: Sequence[Any] | None = None,
        aux_layers: Sequence[int] = (),
        ends: Sequence[int] | None = None,
    ) -> Forward:
        """Run the model over tokens [B, L] and keep the outputs of `aux_layers` (counted from 0).

        Whatever the caller does not use is never computed: MLX evaluates lazily. `ends`: row by row, the one position
        whose logits are wanted; they come as [B, 1, V], and the others are not computed either.
        """
        for layer in aux_layers:
            self._watch(layer)
        self._tape.clear()
        if ends is not None:
            self._watch(self.num_layers - 1)
            self._watch_norm()
            self._normed.clear()
            self._ends = mx.array(list(ends), mx.int32)[:, None, None]
        try:
            with self._angles.sharing():
                logits = self.model(tokens, cache=None if cache is None else list(cache))
        finally:
            wanted, self._ends = self._ends, None
        if wanted is not None:
            self._norm_is_last = self._normed == [True]
            logits = logits if logits.shape[1] == 1 else mx.take_along_axis(logits, wanted, axis=1)
        aux = tuple(self._tape[layer] for layer in aux_layers)
        self._tape.clear()
        return Forward(logits, aux)

    def _watch(self, index: int) -> None:
        """Give one layer a subclass of its own class that records what the layer returns."""
        if not 0 <= index < self.num_layers:
            raise TargetError(f"layer {index} was asked for, but the target has layers 0 to {self.num_layers - 1}")
        layer = self._layers[index]
        if isinstance(layer, _Watched):
            return
        tape, base = self._tape, type(layer)

        def record(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
            out = base.__call__(self, *args, **kwargs)
            tape[index] = out[0] if isinstance(out, tuple) else out
            return out

        layer.__class__ = type(base.__name__, (_Watched, base), {"__call__": record})

    def _watch_norm(self) -> None:
        """Let the final norm go on with the wanted positions alone, in models that call it once, behind all layers."""
        if isinstance(self._norm, _Watched):
            return
        target, base = self, type(self._norm)

        def cut(self: nn.Module, x: mx.array, *args: Any, **kwargs: Any) -> Any:
            if target._ends is not None:
                target._normed.append(target.num_layers - 1 in target._tape)
                x = mx.take_along_axis(x, target._ends, axis=1) if target._norm_is_last else x
            return base.__call__(self, x, *args, **kwargs)

        self._norm.__class__ = type(base.__name__, (_Watched, base), {"__call__": cut})


class _Watched:
    """Marks a module that does more than its class does."""


def load_target(name: str | Path, dtype: mx.Dtype | None = None) -> Target:
    """Load a target from a folder or a hub id through mlx-lm.

    `dtype` is the type of the weights that are not quantised; by default the file's own, except on a CPU under Linux,
    where only float32 goes through BLAS. Raises TargetError for a folder that mlx-lm cannot load.
    """
    folder = hub.resolve(name)
    try:
        loaded = mlx_lm.load(str(folder))
        model, tokenizer = loaded[0], loaded[1]
    except (FileNotFoundError, ValueError, KeyError, RuntimeError) as e:
        raise TargetError(f"{folder} cannot be loaded as a target: {e}") from e
    dtype = dtype or compute_dtype()
    if dtype is not None:
        model.set_dtype(dtype)
        mx.eval(model.parameters())
    return Target(model, tokenizer, name=str(name))


def compute_dtype() -> mx.Dtype | None:
    """The type to compute in where the file's own would be slow, else None."""
    return mx.float32 if sys.platform == "linux" and mx.default_device() == mx.Device(mx.cpu) else None


def _find(root: Any, paths: Sequence[str]) -> Any | None:
    for path in paths:
        node: Any = root
        for name in path.split("."):
            node = getattr(node, name, None)
            if node is None:
                break
        else:
            return node
    return None


def _backbone(model: nn.Module) -> Any:
    """The first of the places that holds a token embedding, else the first that exists."""
    places = [_find(model, (path,)) for path in _BACKBONES]
    with_embedding = (place for place in places if place is not None and _find(place, _EMBEDDINGS) is not None)
    return next(with_embedding, None) or _first(model, _BACKBONES, "backbone", model)


def _first(root: Any, paths: Sequence[str], what: str, model: nn.Module) -> Any:
    found = _find(root, paths)
    if found is None:
        kind = type(model).__module__.rsplit(".", 1)[-1]
        raise TargetError(f"no {what} found in a model of type {kind}; looked for {', '.join(paths)}")
    return found


def _argument(args: Any, names: Sequence[str], default: int) -> int:
    for name in names:
        value = getattr(args, name, None)
        if isinstance(value, int) and value > 0:
            return value
    return default
