"""EAGLE heads written down once more, in NumPy and double precision, from the papers and the layouts' descriptions.

Nothing of this project's is imported: what agrees with it here was written twice.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

Weights = Mapping[str, np.ndarray]


def rms(x: np.ndarray, weight: np.ndarray | None, eps: float) -> np.ndarray:
    return x if weight is None else x / np.sqrt((x * x).mean(-1, keepdims=True) + eps) * weight


def linear(x: np.ndarray, weights: Weights, name: str) -> np.ndarray:
    return x @ weights[f"{name}.weight"].T + weights.get(f"{name}.bias", 0.0)


def frequencies(dim: int, config: Mapping[str, Any]) -> tuple[np.ndarray, float]:
    """Angles per position [dim / 2], and what cosines and sines are multiplied by. Yarn: Peng et al. 2023."""
    theta = float(config.get("rope_theta", 10000.0))
    plain = theta ** (-np.arange(0, dim, 2) / dim)
    scaling = config.get("rope_scaling")
    if not scaling:
        return plain, 1.0
    factor = float(scaling["factor"])
    if scaling.get("rope_type", scaling.get("type")) == "linear":
        return plain / factor, 1.0
    longest = scaling["original_max_position_embeddings"]
    turns = lambda n: dim * math.log(longest / (n * 2 * math.pi)) / (2 * math.log(theta))  # noqa: E731
    low = max(math.floor(turns(scaling.get("beta_fast", 32))), 0)
    high = min(math.ceil(turns(scaling.get("beta_slow", 1))), dim - 1)
    ramp = np.clip((np.arange(dim // 2) - low) / max(high - low, 0.001), 0, 1)
    return plain / factor * ramp + plain * (1 - ramp), 0.1 * math.log(factor) + 1


def rotated(x: np.ndarray, config: Mapping[str, Any]) -> np.ndarray:
    """x [L, heads, D] with its halves turned against each other by position."""
    angles, scale = frequencies(x.shape[-1], config)
    turn = np.arange(len(x))[:, None, None] * angles
    a, b = np.split(x, 2, axis=-1)
    return scale * np.concatenate([a * np.cos(turn) - b * np.sin(turn), b * np.cos(turn) + a * np.sin(turn)], axis=-1)


def attention(x: np.ndarray, weights: Weights, name: str, config: Mapping[str, Any], window: int | None) -> np.ndarray:
    length, heads, kv_heads = len(x), config["num_attention_heads"], config["num_key_value_heads"]
    q, k, v = (linear(x, weights, f"{name}.{part}_proj") for part in "qkv")
    q, k, v = q.reshape(length, heads, -1), k.reshape(length, kv_heads, -1), v.reshape(length, kv_heads, -1)
    q = rms(q, weights.get(f"{name}.q_norm.weight"), config["rms_norm_eps"])
    k = rms(k, weights.get(f"{name}.k_norm.weight"), config["rms_norm_eps"])
    q, k = rotated(q, config), rotated(k, config)
    k, v = (np.repeat(y, heads // kv_heads, axis=1) for y in (k, v))
    scores = np.einsum("qhd,khd->hqk", q, k) / math.sqrt(q.shape[-1])
    ago = np.arange(length)[:, None] - np.arange(length)
    seen = (ago >= 0) & (ago < (window or length))
    scores = np.where(seen, scores, -np.inf)
    shares = np.exp(scores - scores.max(-1, keepdims=True))
    shares /= shares.sum(-1, keepdims=True)
    return linear(np.einsum("hqk,khd->qhd", shares, v).reshape(length, -1), weights, f"{name}.o_proj")


def mlp(x: np.ndarray, weights: Weights, name: str) -> np.ndarray:
    gate = linear(x, weights, f"{name}.gate_proj")
    return linear(gate / (1 + np.exp(-gate)) * linear(x, weights, f"{name}.up_proj"), weights, f"{name}.down_proj")


def layer(x: np.ndarray, weights: Weights, name: str, config: Mapping[str, Any], window: int | None) -> np.ndarray:
    """A Llama layer; without an input norm where the weights have none."""
    eps = config["rms_norm_eps"]
    normed = rms(x, weights.get(f"{name}.input_layernorm.weight"), eps)
    h = x + attention(normed, weights, f"{name}.self_attn", config, window)
    return h + mlp(rms(h, weights[f"{name}.post_attention_layernorm.weight"], eps), weights, f"{name}.mlp")


def eagle(weights: Weights, config: Mapping[str, Any]) -> Callable[[np.ndarray, np.ndarray], np.ndarray]:
    """EAGLE-1: (embeddings, features) [L, H] -> the next features."""

    def step(embeddings: np.ndarray, g: np.ndarray) -> np.ndarray:
        h = linear(np.concatenate([embeddings, g], axis=-1), weights, "fc")
        for index in range(config["num_hidden_layers"]):
            h = layer(h, weights, f"layers.{index}", config, None)
        return h

    return step


def eagle3(weights: Weights, config: Mapping[str, Any], first: str) -> Callable[[np.ndarray, np.ndarray], np.ndarray]:
    """EAGLE-3: (embeddings, features) [L, H] -> the output before the final norm."""
    eps, window = config["rms_norm_eps"], config.get("sliding_window") if config.get("use_sliding_window") else None

    def step(embeddings: np.ndarray, g: np.ndarray) -> np.ndarray:
        normed = rms(g, weights.get(f"{first}.hidden_norm.weight"), eps)
        x = np.concatenate([rms(embeddings, weights.get(f"{first}.input_layernorm.weight"), eps), normed], axis=-1)
        residual = normed if config.get("norm_before_residual") else g
        h = residual + attention(x, weights, f"{first}.self_attn", config, window)
        h = h + mlp(rms(h, weights[f"{first}.post_attention_layernorm.weight"], eps), weights, f"{first}.mlp")
        for index in range(1, config["num_hidden_layers"]):
            h = layer(h, weights, f"layers.{index}", config, window)
        return h

    return step


def features(weights: Weights, config: Mapping[str, Any], states: list[np.ndarray]) -> np.ndarray:
    """The target's hidden states through the norms and the projection that there are."""
    eps = config["rms_norm_eps"]
    states = [rms(x, weights.get(f"fc_norm.{i}.weight"), eps) for i, x in enumerate(states)]
    return linear(rms(np.concatenate(states, axis=-1), weights.get("input_norm.weight"), eps), weights, "fc")
