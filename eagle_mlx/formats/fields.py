"""Read and write the fields of a head's config.json, and refuse unsupported ones."""

from __future__ import annotations

import json
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, cast

from eagle_mlx.errors import CheckpointError, ConfigError, HeadWarning, check, in_one_line

NOTED = "zero_centred_norms"
"""Key under `eagle_mlx` in a config: every norm is zero-centered, so readers need not guess from the means."""
Quantization = Mapping[str, int]  # `group_size` and `bits` of a head's quantized layers
_QUANTIZATION = {"group_size": (32, 64, 128), "bits": (2, 3, 4, 5, 6, 8)}  # what mlx.core.quantize accepts
LAYER_IDS = "eagle_aux_hidden_state_layer_ids"

_ROPE = {
    "linear": {"factor"},
    "llama3": {"factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings"},
    "yarn": {"factor", "original_max_position_embeddings", "beta_fast", "beta_slow", "mscale", "mscale_all_dim"},
    "mrope": {"mrope_section", "mrope_interleaved"},
}
"""Types of RoPE scaling that match mlx-lm's, with their fields. For text only, mrope is plain RoPE."""

_REFUSED: dict[str, tuple[Callable[[Any], bool], str]] = {
    "hidden_act": (lambda v: v in ("silu", "swish"), "only silu is known"),
    "tie_word_embeddings": (lambda v: not v, "a head has its own output projection"),
    "is_causal": (bool, "heads that see later tokens are not supported"),
    "logit_scale": (lambda v: v == 1, "logits are not scaled"),
    "partial_rotary_factor": (lambda v: v == 1, "RoPE rotates whole heads"),
    "parallel_drafting": (lambda v: not v, "tokens are drafted one after another"),
    "parallel_draft_step": (lambda v: v == 1, "tokens are drafted one after another"),
    "eagle_aux_injection_mode": (lambda v: v == "fused_fc", "the hidden states go through one projection"),
    "quantization_config": (lambda v: not v, "of quantized heads only those that MLX has quantized can be read"),
    "compression_config": (lambda v: not v, "the weights must be plain numbers"),
}
"""Unsupported fields that change the forward pass: a check for values without effect, and the reason."""

_FLAGS = (
    *("norm_before_residual", "norm_before_fc", "fc_norm", "norm_output", "qk_norm", "hidden_norm"),
    *("attention_bias", "qkv_bias", "mlp_bias", "bias", "eagle_fc_bias", "use_sliding_window"),
)
_OBJECTS = ("eagle_config", "eagle_mlx", "rope_scaling", "rope_parameters", "text_config", "speculators_config")
_OTHERS = f"""
hidden_size intermediate_size num_attention_heads num_key_value_heads head_dim vocab_size num_hidden_layers
max_position_embeddings rms_norm_eps rope_theta sliding_window layer_types draft_vocab_size target_hidden_size
{LAYER_IDS} transformer_layer_config speculators_model_type quantization

architectures model_type auto_map dtype torch_dtype transformers_version use_cache speculators_version
embed_requires_grad initializer_range attention_dropout pretraining_tp bos_token_id eos_token_id pad_token_id
max_window_layers output_attentions return_dict output_hidden_states chunk_size_feed_forward id2label label2id
problem_type is_encoder_decoder is_decoder cache_implementation
num_anchors confidence_head_alpha attention_mode loss_decay_gamma ce_loss_alpha l1_loss_alpha selector_loss_weight
attn_implementation block_size_policy dflash_initial_block_size runtime_block_size
"""
"""Fields that are read; then those that transformers and trainers write, and that do not affect drafts."""
_KNOWN = frozenset((*_OTHERS.split(), *_FLAGS, *_OBJECTS, *_REFUSED))
_MODE = "affine"  # mlx-lm's name for quantization with a scale and a bias per group
_LAYER_TYPES = frozenset({"full_attention", "sliding_attention"})
_MOST_LAYERS = 64
_MOST = 1 << 31


def read_config(folder: Path) -> dict[str, Any]:
    """Return the folder's config.json. Raises CheckpointError if it is missing or not a JSON object."""
    file = folder / "config.json"
    try:
        config = json.loads(file.read_text(encoding="utf-8"))
    except FileNotFoundError as e:
        raise CheckpointError(f"{folder} has no config.json; a head is a folder with config.json and weights") from e
    except (OSError, ValueError) as e:
        raise CheckpointError(f"{file} cannot be read: {in_one_line(e)}") from e
    if not isinstance(config, dict):
        raise CheckpointError(f"{file} is not a JSON object")
    for name in _OBJECTS:
        if not isinstance(config.get(name, {}), dict | None):
            raise CheckpointError(f"{file}: {name} must be an object, not {config[name]!r}")
    return config


@contextmanager
def reading(file: Path) -> Iterator[None]:
    """Convert errors while reading a config's fields to a CheckpointError with the file's name."""
    try:
        yield
    except KeyError as e:
        raise CheckpointError(f"{file} lacks {e.args[0]}") from e
    except (TypeError, ValueError, AttributeError, ArithmeticError, ConfigError) as e:
        raise CheckpointError(f"{file} is not usable: {e}") from e


def refuse(file: Path, config: Mapping[str, Any]) -> None:
    """Raise CheckpointError if a field's value changes the forward pass in an unsupported way."""
    for name, (harmless, reason) in _REFUSED.items():
        value = config.get(name)
        if name == "quantization_config" and value == config.get("quantization"):
            continue  # mlx-lm writes the same value under both names
        if value is not None and not harmless(value):
            raise CheckpointError(f"{file} sets {name} to {value!r}, which is not supported: {reason}")
    for name in _FLAGS:
        if config.get(name) not in (None, True, False):
            raise CheckpointError(f"{file} sets {name} to {config[name]!r}; it must be true or false")


def unknown_fields(config: Mapping[str, Any]) -> list[str]:
    """Return the names of fields that are not known, unless they are off."""
    return sorted(
        name
        for name, value in config.items()
        if name not in _KNOWN and not name.startswith("_") and value not in (None, False, "", [], {})
    )


def warn_of_unknown(file: Path, config: Mapping[str, Any]) -> None:
    """Issue a HeadWarning with the names of unknown fields, unless they are off."""
    if unknown := unknown_fields(config):
        warnings.warn(
            f"{file} sets {', '.join(unknown)}, not known here; if that changes the head's output, it drafts badly",
            HeadWarning,
            stacklevel=2,
        )


def read_quantization(config: Mapping[str, Any]) -> Quantization | None:
    """Return a head's quantization from the field that mlx-lm writes, or None. Raises ConfigError for other modes."""
    written = config.get("quantization")
    if written is None:
        return None
    check(isinstance(written, dict), f"quantization is {written!r}; it must be an object with group_size and bits")
    mode = written.get("mode", _MODE)
    check(mode == _MODE, f"quantization has mode {mode!r}; only {_MODE} is supported")
    return {name: value for name, value in written.items() if name != "mode"}


def check_quantization(quantization: Quantization | None) -> None:
    """Raise ConfigError if a quantization is invalid. MLX would crash on some invalid values."""
    if quantization is None:
        return
    named = sorted(quantization) if isinstance(quantization, Mapping) else []
    check(named == sorted(_QUANTIZATION), f"quantization is {quantization!r}; give group_size and bits")
    for name, values in _QUANTIZATION.items():
        value = quantization[name]
        is_valid = type(value) is int and value in values
        check(is_valid, f"quantization sets {name} to {value!r}; MLX knows {', '.join(map(str, values))}")


def quantization_json(quantization: Quantization | None) -> dict[str, Any]:
    """Return the config fields for a quantization, as mlx-lm writes them; empty if there is none."""
    written = {**(quantization or {}), "mode": _MODE}
    return {} if quantization is None else {"quantization": written, "quantization_config": written}


def layer_fields(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return the fields of a decoder layer, with the names in head configs. Raises KeyError, ConfigError."""
    hidden, heads = _size(config, "hidden_size"), _size(config, "num_attention_heads")
    layers = _size(config, "num_hidden_layers", 1)
    check(layers <= _MOST_LAYERS, f"num_hidden_layers is {layers}; that is a model, not a head")
    longest = _size(config, "max_position_embeddings", 2048)
    windows = _windows(config, layers)
    theta, scaling = rope_fields(config, longest, windows)
    return {
        "hidden_size": hidden,
        "num_attention_heads": heads,
        "num_key_value_heads": _size(config, "num_key_value_heads", heads),
        "head_dim": _size(config, "head_dim", hidden // heads),
        **{name: _size(config, name) for name in ("intermediate_size", "vocab_size")},
        **{name: bool(config.get(name)) for name in ("attention_bias", "qkv_bias", "mlp_bias")},
        "rms_norm_eps": float(config.get("rms_norm_eps", 1e-6)),
        "rope_theta": theta,
        "rope_scaling": scaling,
        "max_position_embeddings": longest,
        "num_hidden_layers": layers,
        "windows": windows,
    }


def _size(config: Mapping[str, Any], name: str, otherwise: int | None = None) -> int:
    """Return a size, at least 1. Raises KeyError, ConfigError."""
    value = config[name] if otherwise is None else config.get(name)
    size = otherwise if value is None and otherwise is not None else int(cast(Any, value))
    check(0 < size <= _MOST, f"{name} is {size}")
    return size


def rope_fields(
    config: Mapping[str, Any], longest: int, windows: Sequence[int | None] = ()
) -> tuple[float, dict[str, Any] | None]:
    """Return RoPE's base and scaling from old or new transformers fields. Raises ConfigError for unknown scaling.

    As in transformers, `rope_scaling` precedes `rope_parameters`, and a base in either precedes the top-level one.
    """
    given = _rope_of(config.get("rope_scaling") or config.get("rope_parameters") or {}, windows)
    scaling = {name: value for name, value in given.items() if value is not None}
    theta = float(scaling.pop("rope_theta", 0) or config.get("rope_theta") or 10000.0)
    check(scaling.pop("partial_rotary_factor", 1) == 1, "partial_rotary_factor is set; RoPE rotates whole heads")
    old_name = scaling.pop("type", "default")
    kind = scaling.pop("rope_type", old_name)
    if kind == "default" and "mrope_section" not in scaling:
        return theta, None
    kind = "mrope" if kind == "default" else kind
    check(kind in _ROPE, f"RoPE scaling of type {kind} is not supported, only {', '.join(sorted(_ROPE))}")
    unknown = sorted(scaling.keys() - _ROPE[kind])
    check(not unknown, f"RoPE scaling {kind} with {', '.join(unknown)} is not supported")
    if kind == "mrope":
        return theta, None
    check("factor" in scaling, f"RoPE scaling {kind} lacks factor")
    if kind == "yarn":
        scaling.setdefault("original_max_position_embeddings", longest)
    return theta, {"rope_type": kind, **scaling}


def _rope_of(parameters: Mapping[str, Any], windows: Sequence[int | None]) -> dict[str, Any]:
    """Return the RoPE parameters. If they are given by type of layer, all layers of the head must have the same."""
    if not any(isinstance(value, dict) for value in parameters.values()):
        return dict(parameters)
    check(parameters.keys() <= _LAYER_TYPES, f"RoPE parameters for {', '.join(parameters)} are not supported")
    used = {"full_attention" if window is None else "sliding_attention" for window in windows or (None,)}
    check(all(map(parameters.get, used)), f"the RoPE parameters lack {' or '.join(sorted(used))}")
    first, *others = (parameters[kind] for kind in used)
    alike = all(other == first for other in others)
    check(alike, "the RoPE parameters differ by type of layer; those of a head must be the same")
    return dict(first)


def _windows(config: Mapping[str, Any], layers: int) -> tuple[int | None, ...]:
    """Return each layer's attention window. Only layers marked by `layer_types` or `use_sliding_window` have one."""
    window, kinds = config.get("sliding_window"), config.get("layer_types")
    if kinds:
        unknown = sorted(set(kinds) - _LAYER_TYPES)
        check(not unknown, f"layer_types name {', '.join(unknown)}; only sliding and full attention are known")
        check(len(kinds) >= layers, f"layer_types name {len(kinds)} of {layers} layers")
        sliding = [kind == "sliding_attention" for kind in kinds[:layers]]
    else:
        sliding = [bool(config.get("use_sliding_window"))] * layers
    if not any(sliding):
        return ()
    if not window:
        raise ConfigError("a layer has sliding attention but sliding_window is not given")
    return tuple(int(window) if slides else None for slides in sliding)


def window_json(windows: tuple[int | None, ...]) -> dict[str, Any]:
    """Return the config fields for these windows. Raises ConfigError if their sizes differ."""
    sizes = {window for window in windows if window is not None}
    if not sizes:
        return {"sliding_window": None}
    check(len(sizes) == 1, f"windows of {sorted(sizes)} positions cannot be written: a config names one size")
    kinds = ["full_attention" if window is None else "sliding_attention" for window in windows]
    return {"sliding_window": sizes.pop(), "layer_types": kinds}


LAYER_DEFAULTS: dict[str, dict[str, Any]] = {
    name: {"hidden_size": 4096, "num_attention_heads": 32, "num_hidden_layers": 32, **others}
    for name, others in {
        "llama": {"intermediate_size": 11008, "vocab_size": 32000, "max_position_embeddings": 2048},
        "qwen3": {
            **{"intermediate_size": 22016, "vocab_size": 151936, "max_position_embeddings": 32768},
            **{"num_key_value_heads": 32, "head_dim": 128},
        },
    }.items()
}
"""The defaults of transformers for the fields of a layer, which its files may leave out."""
NOT_READ = ("verifier_norm.weight", "verifier_lm_head.weight")
"""Copies of the target's weights in files of speculators, needed only for training."""


def speculators_layer(file: Path, config: Mapping[str, Any], *kinds: str) -> dict[str, Any]:
    """Return the config of the layers in a speculators config. Raises CheckpointError if it is none of these types."""
    layer = config.get("transformer_layer_config")
    if not isinstance(layer, dict):
        raise CheckpointError(f"{file} lacks transformer_layer_config")
    if (kind := layer.get("model_type", "qwen3")) not in kinds:
        raise CheckpointError(f"{file} has a layer of type {kind}; only {' and '.join(kinds)} layers can be read")
    return layer


def of_class(config: Mapping[str, Any], *classes: str) -> bool:
    """Return whether a head is of these classes. speculators writes some of these names too, with other fields."""
    named = config.get("architectures")
    is_named = isinstance(named, list) and any(name in named for name in classes)
    return is_named and config.get("speculators_model_type") is None
