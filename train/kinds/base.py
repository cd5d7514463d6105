"""Base class for the kinds of heads, and which weights of a head are trained: all, or low-rank additions (LoRA).

Source of LoRA: Hu et al. 2021, arXiv 2106.09685, section 4.1. The layers are mlx_lm's.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import replace
from operator import itemgetter
from pathlib import Path
from typing import Any, ClassVar, Generic, TypeVar

import mlx.core as mx
import mlx.nn as nn
import numpy as np
from mlx.utils import tree_map_with_path, tree_unflatten
from mlx_lm.tuner.lora import LoRALinear
from numpy.typing import NDArray

from eagle_mlx.errors import ConfigError
from eagle_mlx.formats.tensors import arrays_of, in_file_type, weights_of
from eagle_mlx.heads import KINDS, HeadBase, kind_of
from eagle_mlx.hidden_states import features_of, last_of
from eagle_mlx.target import Target, setting_of

from ..config import TrainSettings, pass_type
from ..kind_settings import KIND_SETTINGS
from ..unroll import unroll_feedback
from .least_squares import Matrix, Moments, Piece

Head = HeadBase[Any]
H = TypeVar("H", bound=Head)
Kept = NDArray[np.int64] | None  # [Vd]: the target's ids of a draft vocabulary, ascending; None for all
_ZERO = ("o_proj.weight", "down_proj.weight", "kernel_projection.weight", "successor_codebook.weight")
"""Matrices that begin at zero, by how their names end."""
SPREAD = 0.02  # standard deviation of random weights
Jitter = Callable[[mx.array], mx.array]  # adds noise to float32 hidden states [B, L, n], and casts them for the head
_SHAPE = {
    **{"draft_vocab": "draft_vocab_size", "aux_layers": "aux_layers", "layers": "num_hidden_layers"},
    **{"intermediate_size": "intermediate_size", "heads": "num_attention_heads", "kv_heads": "num_key_value_heads"},
}  # settings of a new head's shape, and the fields of its config that they determine


class Kind(ABC, Generic[H]):
    """A kind of head. By default it reads only the last layer, and drafts the target's whole vocabulary."""

    head_class: type[H]
    unroll: ClassVar[Callable[..., list[mx.array]]] = staticmethod(unroll_feedback)  # the outputs of all draft steps
    in_blocks: ClassVar[bool] = False  # whether the draft steps are the slots of one block after each anchor
    confidence_weight: ClassVar[float] = 0.0  # weight of the binary cross-entropy of the head's confidence
    selector_weight: ClassVar[float] = 0.0  # weight of the cross-entropy of the selector among its candidates

    @staticmethod
    def share(slot: int) -> float:
        """Return the share of anchors whose blocks reach this slot, from 0, in one pass."""
        return 1.0

    @property
    def name(self) -> str:
        """The value of `--head`."""
        return next(kind.name for kind in KINDS.values() if kind.head_class is self.head_class)

    @abstractmethod
    def head_config(self, target: Target, config: TrainSettings, vocab_size: int, aux_layers: tuple[int, ...]) -> Any:
        """Return the config of a new head. Raises ConfigError if the target cannot have such a head."""

    def blank(self, target: Target, config: TrainSettings) -> H:
        """Return a head with the configured shape, without meaningful weights.

        The draft vocabulary of a head to continue from, which is not loaded yet, has the default size. Raises
        ConfigError if the target cannot have such a head.
        """
        usual = KIND_SETTINGS[config.head.kind].defaults.get("draft_vocab") if config.head.init_from else None
        size = min(config.head.draft_vocab or usual or target.vocab_size, target.vocab_size)
        shape = self.head_config(target, config, size, self.aux_layers(target, config))
        return self.head_class(shape, mx.arange(size, dtype=mx.int32) if size < target.vocab_size else None)

    def check(self, target: Target, config: TrainSettings) -> None:
        """Raise ConfigError if no such head can be made for the target. Called before any states are captured."""
        layers = self.aux_layers(target, config)
        if not all(0 <= layer < target.num_layers for layer in layers):
            raise ConfigError(f"aux_layers {layers}: the target has layers 0 to {target.num_layers - 1}")
        self.blank(target, config)

    def aux_layers(self, target: Target, config: TrainSettings) -> tuple[int, ...]:
        """Return the target layers that a new head reads, without the last."""
        return ()

    def new(self, target: Target, config: TrainSettings, kept: Kept, aux_layers: tuple[int, ...]) -> H:
        """Return a random head with layers that add nothing, and, if it has them, the target's norm and projection."""
        shape = self.head_config(target, config, target.vocab_size if kept is None else len(kept), aux_layers)
        head = self.head_class(shape, None if kept is None else mx.array(kept, mx.int32))
        randomize(head, config.run.seed)
        if "norm" in head:
            head.norm.weight = final_norm(target)
        if "lm_head" in head:
            rows = projection(target)
            head.lm_head.weight = rows if kept is None else rows[mx.array(kept)]
        head.attach(target)
        mx.eval(head.parameters())
        return head

    @abstractmethod
    def guess(self, head: H, following: mx.array, aux: list[mx.array], last: mx.array) -> Piece:
        """Return the inputs and the desired outputs of a new head's linear start.

        following [1, L - 1, E] float32: the embeddings of tokens 1 to L - 1. aux, last [1, L, H] float32: the outputs
        of the layers that the head reads, and of the last layer. Returns inputs [1, L - 1, D] at positions 0 to L - 2,
        and the target's states [1, L - 1, H] at the next positions, scaled to a mean square of 1 if the head norms its
        output.
        """

    @abstractmethod
    def begin_as(self, head: H, guess: Matrix, by: Moments) -> None:
        """Initialize a new head to compute the linear map `guess` [D, H]. `by`: the moments used to find the map."""

    def adopt(self, head: H, layers: int = 0, seed: int = 0) -> H:
        """Return a loaded head to train: dequantized, with at least this many layers; new ones add nothing."""
        shape, missing = head.config, layers - head.cache_layers
        if missing <= 0 and shape.quantization is None:
            return head
        more: dict[str, Any] = {}
        if missing > 0:
            windows = (*shape.windows, *[None] * missing) if shape.windows else ()
            more = {"num_hidden_layers": layers, "windows": windows}
        plain = self.head_class(replace(shape, quantization=None, **more), head.token_ids)
        if more:
            randomize(plain, seed)
        plain.load_weights(list(plain_weights(head).items()), strict=not more)
        return plain

    def mismatches(self, head: H, config: TrainSettings) -> Mapping[str, Any]:
        """Return a loaded head's values of the settings that determine a new head's shape."""
        shape = head.config
        own = {name: getattr(shape, field) for name, field in _SHAPE.items() if hasattr(shape, field)}
        if "lm_head" in head and not config.head.lora_rank:
            own.pop("draft_vocab", None)  # the data may choose another
        elif own.get("draft_vocab") == shape.vocab_size <= (config.head.draft_vocab or 0):
            own["draft_vocab"] = config.head.draft_vocab
        return own

    def features(self, head: H, target: Target, states: mx.array, jitter: Jitter) -> mx.array:
        """Return the features [B, L, H] of the first draft step from captured states [B, L, (n + 1) * Ht], jittered."""
        if not (count := len(head.named_layers)):
            last = last_of(states, target.hidden_size).astype(target.dtype)
            return jitter(head.features([last]).astype(mx.float32))
        read = jitter(features_of(states, target.hidden_size).astype(mx.float32))
        return head.features(list(mx.split(read, count, axis=-1)))

    def save(
        self, head: H, folder: Path, target_name: str, extra: Mapping[str, Any], dtype: mx.Dtype = mx.bfloat16
    ) -> None:
        """Write the head over `folder`, in the first layout of its kind that can express it, else raise ConfigError."""
        refused: list[ConfigError] = []
        for layout in kind_of(head).formats:
            try:
                layout.save(head, folder, target_name=target_name, extra=extra, dtype=dtype, overwrite=True)
                return
            except ConfigError as e:
                refused.append(e)
        raise refused[0]


def plain_weights(module: nn.Module) -> dict[str, mx.array]:
    """Return a module's parameters by name, dequantized and in float32."""
    plain: dict[str, mx.array] = {}
    for path, part in module.named_modules():
        own = {name: value for name, value in part.items() if isinstance(value, mx.array) and not name.startswith("_")}
        if "scales" in own:
            form = {"group_size": part.group_size, "bits": part.bits, "mode": getattr(part, "mode", "affine")}
            own["weight"] = mx.dequantize(own["weight"], own.pop("scales"), own.pop("biases", None), **form)
        for name, value in own.items():
            full = f"{path}.{name}" if path else name
            plain[full] = value.astype(mx.float32) if mx.issubdtype(value.dtype, mx.floating) else value
    return plain


def layer_shape(target: Target, config: TrainSettings) -> dict[str, Any]:
    """Return the sizes of a decoder layer, with the names of head configs; by default the target's sizes."""

    def of_target(name: str, default: Any) -> Any:
        value = setting_of(target.model, name)
        value = default if value is None else value
        return max(value) if isinstance(value, list) else value  # one for each layer, as in Step-3.5

    hidden = target.hidden_size
    target_heads = int(of_target("num_attention_heads", max(1, hidden // 64)))
    heads = config.head.heads or target_heads
    return {
        "hidden_size": hidden,
        "intermediate_size": config.head.intermediate_size or int(of_target("intermediate_size", 3 * hidden)),
        "num_attention_heads": heads,
        "num_key_value_heads": config.head.kv_heads or int(of_target("num_key_value_heads", heads)),
        "head_dim": int(of_target("head_dim", hidden // target_heads)),
        "vocab_size": target.vocab_size,
        "rms_norm_eps": float(of_target("rms_norm_eps", 1e-6)),
        "rope_theta": float(of_target("rope_theta", 10000.0)),
        "max_position_embeddings": target.context_length,
    }


def mask_token(target: Target) -> int:
    """Return the id of a head's mask tokens: one that no text contains if there is one, else the end of text."""
    tokenizer: Any = target.tokenizer
    if tokenizer is not None and (used := len(tokenizer.get_vocab())) < target.vocab_size:
        return used
    return min(target.eos_token_ids, default=target.vocab_size - 1)


def randomize(module: nn.Module, seed: int) -> None:
    """Set norms to one, biases and the layers' output matrices to zero, so that they add nothing; others at random.

    Convolutions return their input, and a selector changes no logits.
    """
    rng = np.random.default_rng(seed)

    def start(path: str, weight: mx.array) -> mx.array:
        if weight.ndim == 1:
            return mx.ones_like(weight) if "norm" in path else mx.zeros_like(weight)
        if path.endswith("base_kernel"):
            return mx.broadcast_to(mx.arange(weight.shape[1])[:, None] == 0, weight.shape).astype(mx.float32)
        if path.endswith(_ZERO):
            return mx.zeros_like(weight)
        return mx.array(rng.normal(0.0, SPREAD, weight.shape), mx.float32)

    module.update(tree_map_with_path(start, module.parameters()))


def projection(target: Target) -> mx.array:
    """Return the matrix [V, H] float32 whose products with normed states are logits, but for a bias and a soft cap."""
    eye = mx.eye(target.hidden_size, dtype=target.dtype)
    bias = target.logits(mx.zeros_like(eye[:1]))
    return (target.logits(eye) - bias).T.astype(mx.float32)


def final_norm(target: Target) -> mx.array:
    """Return the weight [H] of the target's final norm in float32, however the target stores it."""
    return target.norm(mx.ones((1, target.hidden_size), target.dtype))[0].astype(mx.float32)


def choose_trained(head: Head, config: TrainSettings) -> None:
    """Choose which weights of an existing head are trained: all but its own embedding.

    With a rank, only additions, which begin at zero, to the matrices of its layers and to the one in front of them are
    trained; experts have none. The other weights are then kept in the dtype of the passes.
    """
    if not config.head.lora_rank:
        if "embed_tokens" in head:
            head["embed_tokens"].freeze()
        return
    head.load_weights(list(in_file_type(weights_of(head), pass_type(config)).items()))
    head.freeze()
    rng = np.random.default_rng(config.run.seed)
    in_logits = ("lm_head", "markov_head", "confidence_head", "candidate_selector")
    adapted = []
    for path, part in sorted(head.named_modules(), key=itemgetter(0)):
        if isinstance(part, nn.Linear) and not path.startswith(in_logits):
            added: LoRALinear = LoRALinear.from_base(part, config.head.lora_rank)
            most = 1 / math.sqrt(part.weight.shape[1])
            added.lora_a = mx.array(rng.uniform(-most, most, added.lora_a.shape), mx.float32)  # as in mlx_lm
            adapted.append((path, added))
    head.update_modules(tree_unflatten(adapted))


def merged(head: Head, before: Mapping[str, mx.array] | None = None) -> Head:
    """Return the head with its low-rank additions added to its matrices; the same object if there is nothing to do.

    before: the weights that it had before it learned. The result has the mean of both, which keeps most of what was
    learned and forgets less (Wortsman et al. 2022, Robust fine-tuning of zero-shot models, arXiv 2109.01903).
    """
    adapted = {path: part for path, part in head.named_modules() if isinstance(part, LoRALinear)}
    if not adapted and before is None:
        return head
    weights = {name.replace(".linear.", "."): x for name, x in weights_of(head).items() if ".lora_" not in name}
    weights |= {f"{path}.weight": part.fuse().weight for path, part in adapted.items()}
    if before is not None:
        weights = {name: (before[name] + x) / 2 for name, x in weights.items()}
    plain: Head = type(head)(head.config, head.token_ids)
    plain.load_weights(list(weights.items()))
    plain.attach(head.target)
    plain.draft_window = head.draft_window
    return plain


def parameters_of(head: Head) -> str:
    """Return the numbers of a head's parameters and of those that are trained, in words."""
    whole = sum(leaf.size for leaf in arrays_of(head.parameters()).values())
    return f"{whole:,} parameters, of which {trained_size(head):,} are trained"


def trained_size(head: Head) -> int:
    return sum(leaf.size for leaf in arrays_of(head.trainable_parameters()).values())
