"""The value of `--speculative-config`: how to draft, as one JSON object in vLLM's words."""

from __future__ import annotations

import json
from typing import Any

from eagle_mlx.errors import ConfigError

_METHODS = {"eagle": "eagle", "eagle3": "eagle", "mtp": "mtp", "ngram": "ngram", "draft_model": "draft"}
"""Modes of speculation by vLLM's methods."""


def from_json(text: str) -> dict[str, Any]:
    """Return the fields of `Speculation` that the object sets. Raises ConfigError."""
    said = "--speculative-config"
    try:
        config = json.loads(text)
    except json.JSONDecodeError as e:
        raise ConfigError(f"{said} is not JSON: {e}") from e
    if not isinstance(config, dict):
        raise ConfigError(f'{said} must be an object, such as {{"method": "ngram"}}')
    method = config.pop("method", None)
    if method not in _METHODS:
        raise ConfigError(f"{said}: `method` must be one of {', '.join(_METHODS)}; got {method!r}")
    mode = _METHODS[method]
    names = {"num_speculative_tokens": "num_tokens"}
    if mode == "ngram":
        names |= {"prompt_lookup_max": "ngram_max", "prompt_lookup_min": "ngram_min"}
    else:
        names["model"] = "draft_model" if mode == "draft" else "head"
    for key, value in config.items():
        if key not in names:
            known = ", ".join(["method", *names])
            raise ConfigError(f"{said}: unknown key {key!r} for {method}; the keys are {known}")
        kind = str if key == "model" else int
        if type(value) is not kind:
            raise ConfigError(f"{said}: {key} must be of type {kind.__name__}; got {value!r}")
    return {"mode": mode, **{names[key]: value for key, value in config.items()}}
