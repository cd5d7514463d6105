"""The trainer's settings: one frozen dataclass that YAML, flags and code fill alike."""

from __future__ import annotations

import ast
import dataclasses
import difflib
import functools
import inspect
import itertools
import math
import typing
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import yaml

from eagle_mlx.errors import ConfigError
from eagle_mlx.shards import BITS

Optimizer = Literal["adamw", "muon"]
HeadKind = Literal["eagle3", "eagle", "mtp"]
Loss = Literal["auto", "soft", "hard"]
FeatureNorm = Literal["auto", "each", "all", "none"]
Recycle = Literal["auto", "normed", "output"]


@dataclass(frozen=True)
class TrainConfig:
    """How a head is trained. The defaults are the field's for targets of 1 to 30 billion parameters.

    Every field is a flag (`draft_vocab` is `--draft-vocab`) and a key of the YAML file. Where a default depends on the
    kind of head, the field is left open here and `kinds.settled` fills it in.
    """

    target: str = ""
    """folder or hub id of the model that the head is for"""
    head: HeadKind = "eagle3"
    """what to train: an EAGLE-3 head, one of EAGLE-1 and 2, or a multi-token-prediction layer"""
    init_from: str = ""
    """folder or hub id of a head of that kind to go on from; it gives the shape and the draft vocabulary"""
    data: tuple[str, ...] = ("builtin:python",)
    """sources of conversations, files, hub ids or presets; SOURCE=WEIGHT for each makes a mix of them (docs/data.md)"""
    map: tuple[str, ...] = ()
    """what the rows call their fields, such as role=from,content=value or SOURCE:prompt=question"""
    stream: bool = False
    """read rows as they come and store none, for sets that are larger than the disk"""
    skip_bad: bool = False
    """leave out and count rows that cannot be used, in place of ending with an error"""
    keep_turns: str = ""
    """keep conversations of MIN:MAX turns of the user; either may be left out"""
    keep_tokens: str = ""
    """keep conversations of MIN:MAX tokens"""
    dedupe: Literal["none", "prompt", "conversation"] = "none"
    """keep the first of conversations with the same prompt, or of the same whole"""
    shards: str = ""
    """folder of hidden states made by `eagle-data collect`, in place of --data"""
    output: str = "out/head"
    """folder for checkpoints, metrics, plots and report; must not exist"""
    overwrite: bool = False
    """replace an output folder that exists, once the new one is complete"""

    limit: int = 0
    """use at most this many conversations, all sources together; 0 for all"""
    max_length: int = 2048
    """cut conversations after this many tokens"""
    states: Literal["auto", "memory", "disk", "online"] = "auto"
    """hidden states captured once and kept in memory or on the disk, or anew for each batch; auto: by --cache-gb"""
    cache_gb: float = 4.0
    """capture the hidden states once where they fit this many gigabytes of free memory, or else of the disk"""
    cache_bits: int = 16
    """bits of a value that is kept on the disk, 16 or 8"""
    cache_dir: str = ""
    """folder of the states kept on the disk, where later runs find them; default: the output folder's name + .shards"""

    draft_vocab: int = 0
    """entries of the draft vocabulary, the most frequent tokens; all of them where the target has no more"""
    aux_layers: tuple[int, ...] = ()
    """target layers that the head reads, counted from 0; default: a low, a middle and a high one"""
    intermediate_size: int = 0
    """width of the head's MLP; 0 for the target's own, where it has one"""
    heads: int = 0
    """attention heads of the head; 0 for as many as the target has"""
    kv_heads: int = 0
    """key and value heads of the head; 0 for as many as the target has"""
    feature_norm: FeatureNorm = "auto"
    """norm of the layers that are read: one for each (EAGLE-3.1's fc_norm), one over all (norm_before_fc), or none"""
    recycle: Recycle = "auto"
    """what a draft step hands to the next: its output, or that behind the final norm (EAGLE-3.1's norm_output)"""
    norm_before_residual: bool = False
    """start the residual stream from the normed feature"""

    unroll: int = 0
    """draft steps over which the loss is taken"""
    decay: float = 0.0
    """weight of a draft step's loss, relative to the step before it"""
    step_weights: tuple[float, ...] = ()
    """weights of the draft steps' losses one by one, in place of --decay"""
    loss: Loss = "auto"
    """cross entropy with the target's distribution (soft) or with its most likely token (hard)"""
    loss_weights: tuple[float, ...] = ()
    """what the distance of the features and the cross entropy count for"""
    feature_noise: float = -1.0
    """uniform noise of up to this size on the features that are read; less in conversations of more than 512 tokens"""
    rows: int = 4
    """rows of a batch; with several processes (mlx.launch), rows that each of them adds to it"""
    length: int = 1024
    """tokens of a row; short conversations share one, long ones are cut"""
    accumulate: int = 1
    """compute a batch's rows in so many parts, one after the other: the same update with less memory"""
    grad_checkpoint: bool = False
    """compute draft steps again for the gradient and keep no logits: far less memory, somewhat more time"""
    epochs: int = 2
    """passes over the data; --max-steps or --minutes end the run in its place"""
    max_steps: int = 0
    """optimizer steps of the run; 0 to count epochs"""
    minutes: float = 0.0
    """time budget of the run, over which the schedule is laid; 0 to count steps or epochs"""

    optimizer: Optimizer = "adamw"
    """adamw for all weights, or muon for the matrices inside the head and adamw for the rest"""
    lr: float = 1e-4
    """peak learning rate of AdamW"""
    muon_lr: float = 0.02
    """peak learning rate of Muon"""
    warmup: float = 0.015
    """share of the run over which the learning rate rises"""
    final_lr: float = 0.0
    """share of the peak learning rate at which the cosine ends"""
    weight_decay: float = 0.0
    """weight decay of AdamW"""
    clip: float = 0.5
    """largest norm of the gradient"""
    seed: int = 0
    """seed of the weights and of the order of the data"""

    eval_data: str = ""
    """source of the held-out prompts; default: the held-out part of the first --data"""
    eval_prompts: int = 100
    """held-out prompts on which acceptance is measured by decoding"""
    eval_tokens: int = 128
    """tokens decoded for each of them"""
    eval_depth: int = 4
    """draft tokens per round when acceptance is measured"""
    eval_batch: int = 8
    """prompts decoded side by side"""
    eval_steps: int = 0
    """measure acceptance and keep a checkpoint every so many steps"""
    eval_minutes: float = 0.0
    """the same every so many minutes; with neither, ten times in the run"""

    checkpoints: int = 2
    """states kept to resume from, the newest; each takes about three times the memory of the head's weights"""
    checkpoint_minutes: float = 10.0
    """save a state every so many minutes, besides after each measurement of acceptance; 0 for after those alone"""

    log_steps: int = 10
    """steps between lines of metrics.jsonl"""
    wandb: bool = False
    """log to Weights & Biases as well (WANDB_MODE=offline works without a network)"""
    wandb_project: str = "eagle-mlx"
    """project of Weights & Biases"""
    lanes: int = 0
    """parts of a batch computed side by side; 0 for one per core on a CPU under Linux, else one"""

    def __post_init__(self) -> None:
        for name, type_ in _types().items():
            value = getattr(self, name)
            if not _fits(value, type_):
                raise ConfigError(f"{name} must be {_describe(type_)}, not {value!r}")
        for name in (
            "max_length",
            "rows",
            "length",
            "accumulate",
            "epochs",
            "eval_prompts",
            "eval_tokens",
            "checkpoints",
            "log_steps",
        ):
            if getattr(self, name) < 1:
                raise ConfigError(f"{name} must be at least 1, not {getattr(self, name)}")
        for name in ("eval_depth", "eval_batch", "lr", "muon_lr", "clip"):
            if getattr(self, name) <= 0:
                raise ConfigError(f"{name} must be above 0, not {getattr(self, name)}")
        for name in (
            "limit",
            "draft_vocab",
            "unroll",
            "max_steps",
            "minutes",
            "cache_gb",
            "eval_steps",
            "eval_minutes",
            "checkpoint_minutes",
            "lanes",
            "weight_decay",
        ):
            if getattr(self, name) < 0:
                raise ConfigError(f"{name} must not be negative, but is {getattr(self, name)}")
        if self.cache_bits not in BITS:
            raise ConfigError(f"cache_bits must be {' or '.join(map(str, BITS))}, not {self.cache_bits}")
        for name in ("decay", "warmup", "final_lr"):
            if not 0 <= getattr(self, name) <= 1:
                raise ConfigError(f"{name} must be between 0 and 1, not {getattr(self, name)}")
        self._check_loss()

    def _check_loss(self) -> None:
        if self.length < self.unroll + 2:
            raise ConfigError(f"length {self.length} leaves no room for {self.unroll} draft steps; make it longer")
        if not all(0 < weight < math.inf for weight in self.step_weights):
            raise ConfigError(f"step_weights must be above 0, but are {_list(self.step_weights)}")
        if self.step_weights and self.unroll not in (0, len(self.step_weights)):
            raise ConfigError(
                f"step_weights are given for {len(self.step_weights)} draft steps and unroll is {self.unroll}; "
                "leave unroll out"
            )
        if self.step_weights and self.decay:
            raise ConfigError("step_weights and decay are both given; leave one of them out")
        parts = self.loss_weights
        if parts and not (len(parts) == 2 and all(0 <= part < math.inf for part in parts) and any(parts)):
            raise ConfigError(
                "loss_weights are two numbers of 0 or more, for the features and for the cross entropy, not "
                f"{_list(parts)}"
            )
        if self.feature_noise < 0 and self.feature_noise != -1:
            raise ConfigError(f"feature_noise must not be negative, but is {self.feature_noise}")


def load_config(
    file: str | Path | None = None, overrides: Mapping[str, Any] | None = None, recipe: Mapping[str, Any] | None = None
) -> TrainConfig:
    """Defaults, then the recipe, the YAML file and the overrides (flags). Raises ConfigError naming file and key."""
    values = _read_yaml(Path(file)) if file else {}
    try:
        from_mapping(values)  # so that what is wrong with the file is said of the file
    except ConfigError as e:
        raise ConfigError(f"{file}: {e}") from e
    return from_mapping({**(recipe or {}), **values, **(overrides or {})})


def from_mapping(values: Mapping[str, Any]) -> TrainConfig:
    """A config from plain values; lists become tuples, whole numbers become floats where a float is meant."""
    known = _types()
    for key in values:
        if key not in known:
            near = difflib.get_close_matches(str(key).replace("-", "_"), known, n=1, cutoff=0.0)
            raise ConfigError(f"unknown setting {key!r}; did you mean {near[0]!r}?")
    return TrainConfig(**{key: _coerce(value, known[key]) for key, value in values.items()})


@functools.cache
def field_help() -> dict[str, str]:
    """The docstring under each field of TrainConfig, which is also the flag's help."""
    tree = ast.parse(inspect.getsource(TrainConfig))
    body = typing.cast(ast.ClassDef, tree.body[0]).body
    found: dict[str, str] = {}
    for field, doc in itertools.pairwise(body):
        if (
            isinstance(field, ast.AnnAssign)
            and isinstance(field.target, ast.Name)
            and isinstance(doc, ast.Expr)
            and isinstance(doc.value, ast.Constant)
        ):
            found[field.target.id] = str(doc.value.value)
    return found


@functools.cache
def _types() -> dict[str, Any]:
    hints = typing.get_type_hints(TrainConfig)
    return {field.name: hints[field.name] for field in dataclasses.fields(TrainConfig)}


def _read_yaml(file: Path) -> dict[str, Any]:
    try:
        values = yaml.safe_load(file.read_text(encoding="utf-8"))
    except FileNotFoundError as e:
        raise ConfigError(f"there is no config file {file}") from e
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as e:
        raise ConfigError(f"{file} cannot be read as YAML: {e}") from e
    if values is None:
        return {}
    if not isinstance(values, dict):
        raise ConfigError(f"{file} must hold settings as `key: value` lines, not a {type(values).__name__}")
    return values


def _coerce(value: Any, type_: Any) -> Any:
    if typing.get_origin(type_) is tuple:
        items = value if isinstance(value, (list, tuple)) else [value]
        return tuple(_coerce(item, typing.get_args(type_)[0]) for item in items)
    if type_ is float and isinstance(value, str):  # YAML reads 1e-4 as a string
        try:
            return float(value)
        except ValueError:
            return value
    return float(value) if type_ is float and type(value) is int else value


def _fits(value: Any, type_: Any) -> bool:
    if typing.get_origin(type_) is tuple:
        return isinstance(value, tuple) and all(_fits(item, typing.get_args(type_)[0]) for item in value)
    if typing.get_origin(type_) is Literal:
        return value in typing.get_args(type_)
    return type(value) is type_


def _list(values: tuple[float, ...]) -> str:
    return " ".join(f"{value:g}" for value in values)


def _describe(type_: Any) -> str:
    if typing.get_origin(type_) is tuple:
        return f"a list, each {_describe(typing.get_args(type_)[0])}"
    if typing.get_origin(type_) is Literal:
        return f"one of {', '.join(typing.get_args(type_))}"
    names = {int: "a whole number", float: "a number", str: "text", bool: "true or false"}
    return names[type_]
