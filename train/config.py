"""The trainer's settings: frozen groups of fields, filled by name from YAML files, recipes, flags and saved runs."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from eagle_mlx.data_pipelines import FilterOptions
from eagle_mlx.errors import ConfigError
from eagle_mlx.files import read_yaml
from eagle_mlx.setting import ABOVE_0, AT_LEAST_0, AT_LEAST_1, SEED, SHARE, Group, Limit, between, find, flag, setting
from eagle_mlx.target_options import TargetOptions

from .kind_settings import KIND_SETTINGS

if TYPE_CHECKING:
    import mlx.core as mx

SELF = "self"
MOST_PROMPTS = 100
"""Maximum number of prompts of a measurement, unless the user sets it."""
_KIND_NAMES = f"{{{','.join(KIND_SETTINGS)}}}"
_KINDS = Limit(KIND_SETTINGS.__contains__, f"must be one of {', '.join(KIND_SETTINGS)}, not {{!r}}")
_CACHE_BITS = Limit((16, 8).__contains__, "must be 16 or 8, not {}")
_AUX_LAYERS = "target layers to read, from 0 (default: a low, a middle and a high one, or those of --shards)"


def open_number(help: str, unset: float = 0, **more: Any) -> Any:
    """Return a number of at least 0 that a user need not give; `unset`, a zero, is the same as leaving it out."""
    return setting(None, help, AT_LEAST_0, unset=unset, **more)


@dataclass(frozen=True)
class HeadConfig(Group):
    """The head: its target, its kind, its shape. By default, the shape follows the target."""

    target: str = setting("", "folder or hub id of the model", metavar="MODEL")
    kind: str = setting("eagle3", "kind of head (docs/heads.md)", _KINDS, name="head", metavar=_KIND_NAMES)
    init_from: str = setting("", "folder or hub id of a head of this kind to continue from; it sets the shape")
    adapt: str = setting(
        "", "folder or hub id of a head to fit to --prompts or --data; it stays unless the judge finds a better one"
    )
    lora_rank: int | None = open_number(
        "with --adapt: rank of LoRA adapters, merged into the head; 0 to train all weights"
    )
    draft_vocab: int | None = open_number("size of the draft vocabulary; with --init-from, 0 keeps the head's own")
    aux_layers: tuple[int, ...] | None = setting(None, _AUX_LAYERS, AT_LEAST_0, unset=())
    window: int | None = open_number(
        "newest positions of a text that drafts see, in training and in decoding; 0 for all, or as --init-from"
    )
    layers: int | None = open_number(
        "decoder layers; more draft better but slower; all but the first start as copies of the target's; with "
        "--init-from, EAGLE-3 heads get more layers that add nothing at first"
    )
    intermediate_size: int | None = open_number("width of the head's MLP; 0 for the target's width, if it has one")
    heads: int | None = open_number("attention heads; 0 for the target's number")
    kv_heads: int | None = open_number("key and value heads; 0 for the target's number")
    feature_norm: Literal["each", "all", "none"] | None = setting(
        None, "norm of the layers read: one per layer (fc_norm), one over all (norm_before_fc), or none", unset="auto"
    )
    feedback: Literal["normed", "output"] | None = setting(
        None, "a draft step passes on its output before or after the final norm", name="recycle", unset="auto"
    )
    norm_before_residual: bool = setting(False, "use the normed feature as the residual; otherwise the feature itself")
    start: Literal["linear", "random"] = setting(
        "linear", "weights of a new head; linear predicts the target's next state, by least squares on some of the data"
    )


@dataclass(frozen=True)
class TrainingDataConfig(Group):
    """The training data, and where the target's hidden states are kept."""

    sources: tuple[str, ...] = setting(
        ("builtin:python",),
        "files, hub ids or presets; mix with SOURCE=WEIGHT (docs/data.md); self: the target writes them first, as it "
        "does without --data, except for the included target",
        name="data",
    )
    prompts: tuple[str, ...] = setting(
        (), "with --adapt: sources of prompts, which the target answers, instead of --data", metavar="SOURCE"
    )
    replay: tuple[str, ...] = setting(
        (),
        "with --adapt: older conversations, of which as many tokens are learned as of new ones, so that the head does "
        "not forget (default: the target writes some on many subjects)",
        metavar="SOURCE",
    )
    # One night's output of a small model on two cores: 17 tokens per second for eight hours.
    self_tokens: int = setting(500_000, "with --data self: tokens that the target writes first", AT_LEAST_1)
    map: tuple[str, ...] = setting((), "field names of the rows (role=from,content=value or SOURCE:prompt=question)")
    shards: tuple[str, ...] = setting(
        (), "folders of hidden states from `eagle-data`, instead of --data; a head may read any layers", metavar="DIR"
    )
    limit: int | None = open_number("maximum number of conversations from all sources; 0 for all")
    max_length: int = setting(2048, "maximum tokens of a conversation; the rest is cut off", AT_LEAST_1)
    states: Literal["memory", "disk", "online"] | None = setting(
        None, "where hidden states are kept; online: not at all; auto follows --cache-gb and the machine", unset="auto"
    )
    cache_gb: float = setting(4.0, "gigabytes for hidden states; those that need more are captured online", AT_LEAST_0)
    cache_bits: int = setting(16, "bits per value on disk, 16 or 8", _CACHE_BITS)
    cache_dir: str = setting("", "folder for hidden states, for later runs too (default: OUTPUT.shards)", metavar="DIR")
    filters: FilterOptions = dataclasses.field(default_factory=FilterOptions)

    @property
    def is_self(self) -> bool:
        return self.sources == (SELF,)

    def _check(self) -> None:
        if not self.is_self and any(source.partition("=")[0] == SELF for source in self.sources):
            raise ConfigError(
                f"--data {' '.join(self.sources)}: self cannot be mixed with other sources or have a weight; make a "
                "file first (eagle-data make --target MODEL --output own.jsonl), and mix that"
            )
        if self.is_self and self.shards:
            raise ConfigError("--shards replaces --data; leave out --data self, and choose prompts with --eval-data")


@dataclass(frozen=True)
class OptimizationConfig(Group):
    """The loss, the batches and the updates. Open settings follow the kind of head."""

    unroll: int | None = open_number("draft steps in the loss")
    decay: float | None = setting(None, "weight of a draft step's loss relative to the one before", SHARE, unset=0.0)
    step_weights: tuple[float, ...] | None = setting(
        None, "weight of each draft step's loss, instead of --decay", ABOVE_0, unset=()
    )
    loss: Literal["soft", "hard", "tv", "lk"] | None = setting(
        None,
        "cross-entropy with the target's distribution (soft) or its most likely token (hard), total variation (tv), "
        "or lk: soft for poor drafts, tv for good ones",
        unset="auto",
    )
    loss_weights: tuple[float, ...] | None = setting(
        None, "weights of the feature (eagle) or distribution distance (dspark), and of --loss", AT_LEAST_0, unset=()
    )
    feature_noise: float | None = setting(
        None, "maximum uniform noise on the head's features; less in long conversations", AT_LEAST_0, unset=-1.0
    )
    rows: int | None = open_number("rows of a batch, per process of mlx.launch; 0 to choose by the data")
    length: int | None = open_number("tokens of a row, shared by short conversations; 0 to choose by the data")
    accumulate: int = setting(1, "parts of a batch, one after another: the same update in less memory", AT_LEAST_1)
    dtype: Literal["float32", "bfloat16"] | None = setting(
        None, "dtype of steps and of the saved head; auto: bfloat16, but float32 for steps on a CPU", unset="auto"
    )
    grad_checkpoint: bool = setting(False, "recompute draft steps for the gradient: less memory, slightly more time")
    epochs: int | None = open_number("passes over the data, without another limit; 0 to choose 1 to 4 by the data")
    max_steps: int | None = open_number("number of optimizer steps; 0: as in --minutes or --epochs")
    minutes: float | None = open_number("time limit of the training, which sets the schedule; 0 for none", unset=0.0)
    hours: float | None = open_number(
        "time limit of the whole run: making data and training alternate, and each phase's head drafts the next data; "
        "each token is learned --epochs times; 0 to have all data before training. With --adapt, only a limit",
        unset=0.0,
    )
    optimizer: Literal["adamw", "muon"] = setting("adamw", "for all weights, or muon for the head's inner matrices")
    lr: float | None = open_number("peak learning rate of AdamW; 0: by the target's width, 1e-4 for 4,096", unset=0.0)
    muon_lr: float | None = open_number("peak learning rate of Muon; 0: updates as large as AdamW's", unset=0.0)
    warmup: float = setting(0.015, "share of the run in which the learning rate rises", SHARE)
    final_lr: float = setting(0.0, "final learning rate, as a share of the peak", SHARE)
    weight_decay: float = setting(0.0, "weight decay of AdamW", AT_LEAST_0)
    clip: float = setting(0.5, "maximum norm of the gradient", ABOVE_0)

    def _check(self) -> None:
        if self.length and self.length < (self.unroll or 0) + 2:
            raise ConfigError(f"--length {self.length} is too short for {self.unroll or 0} draft steps; make it longer")
        if self.step_weights and self.unroll not in (None, len(self.step_weights)):
            raise ConfigError(
                f"--step-weights has {len(self.step_weights)} draft steps, but --unroll is {self.unroll}; leave out "
                "--unroll"
            )
        if self.step_weights and self.decay:
            raise ConfigError("--step-weights and --decay are both given; leave one of them out")
        parts = self.loss_weights
        if parts and not (len(parts) == 2 and any(parts)):
            raise ConfigError(
                "--loss-weights must be two numbers of 0 or more, for the feature distance and the cross-entropy, not "
                + " ".join(f"{part:g}" for part in parts)
            )


@dataclass(frozen=True)
class EvaluationConfig(Group):
    """Measuring acceptance, by decoding held-out prompts."""

    data: str = setting("", "source of prompts (default: the held-out parts of all --data, in turn)", name="eval_data")
    prompts: int | None = open_number(
        "held-out prompts per measurement; 0 for 48 to 100, in a tenth of the time", name="eval_prompts"
    )
    tokens: int = setting(128, "tokens decoded per prompt", AT_LEAST_1, name="eval_tokens")
    depth: int = setting(4, "draft tokens per round in measurements", between(1, 20), name="eval_depth")
    batch: int = setting(8, "prompts decoded together", AT_LEAST_1, name="eval_batch")
    steps: int | None = open_number("measure and save a checkpoint every N steps", name="eval_steps", metavar="N")
    minutes: float | None = open_number(
        "the same every N minutes (default: ten times per run)", name="eval_minutes", metavar="N", shown="", unset=0.0
    )


@dataclass(frozen=True)
class RunConfig(Group):
    """The output of a run, its checkpoints and its seed."""

    output: str = setting("out/head", "folder for heads, metrics, plots and report; must not exist", metavar="DIR")
    overwrite: bool = setting(False, "replace an existing output; it stays until the new one is complete")
    seed: int = setting(0, "seed of everything random", SEED)
    checkpoints: int = setting(2, "checkpoints to keep for --resume, each three times as large as a head", AT_LEAST_1)
    checkpoint_minutes: float | None = setting(
        10.0, "save a checkpoint every N minutes too; 0 for only after measurements", AT_LEAST_0, metavar="N", unset=0.0
    )
    log_steps: int = setting(10, "steps between lines of metrics.jsonl", AT_LEAST_1)
    wandb: bool = setting(False, "also log to Weights & Biases; WANDB_MODE=offline works without a network")
    wandb_project: str = setting("eagle-mlx", "project in Weights & Biases")
    streams: int | None = open_number("MLX streams per batch; 0: one per core on a Linux CPU, else one", name="lanes")


@dataclass(frozen=True)
class TrainConfig(Group):
    """Settings of a training run as a user gives them; None is not given. `kinds.resolve` makes TrainSettings of them.

    Flags, YAML files and saved runs use unique names: `config.evaluation.depth` is `--eval-depth` and `eval_depth`.
    The defaults are common ones for targets of 1 to 30 billion parameters.
    """

    head: HeadConfig = HeadConfig()
    loading: TargetOptions = dataclasses.field(default_factory=TargetOptions)
    data: TrainingDataConfig = TrainingDataConfig()
    optimization: OptimizationConfig = OptimizationConfig()
    evaluation: EvaluationConfig = EvaluationConfig()
    run: RunConfig = RunConfig()

    def _check(self) -> None:
        if self.loading.shard == "pipeline":
            raise ConfigError(
                "--shard pipeline keeps the layers' outputs on several machines, but training needs them on one; use "
                "--shard tensor"
            )
        if self.head.adapt:
            check_adaptation(self)
        elif self.data.prompts or self.data.replay:
            name = "--prompts" if self.data.prompts else "--replay"
            raise ConfigError(f"{name} belongs to --adapt: name the head to adapt, or leave {name} out")
        elif self.optimization.hours:
            check_with_hours(self)

    @property
    def prompts_are_heldout(self) -> bool:
        return self.evaluation.data in ("", *self.data.sources[:1])


class ChosenOptimization(OptimizationConfig):
    """The same settings, with the choices of the kind of head, the target and the data."""

    unroll: int
    loss: Literal["soft", "hard", "tv", "lk"]
    feature_noise: float
    rows: int
    length: int
    epochs: int
    lr: float


class TrainSettings(TrainConfig):
    """Settings that a run uses. None that is left means none: no limit, or what target and head have."""

    optimization: ChosenOptimization


NOT_WITH_HOURS = (
    *("minutes", "max_steps", "self_tokens", "limit", "keep_turns", "keep_tokens", "dedupe", "shards", "cache_dir"),
    *("eval_steps", "eval_minutes"),
)
"""Settings that a run with `hours` determines itself."""


def check_adaptation(config: TrainConfig) -> None:
    head, step = config.head, config.optimization
    if head.init_from not in ("", head.adapt):
        raise ConfigError("--adapt and --init-from both name a head to begin with; leave --init-from out")
    if config.data.shards:
        raise ConfigError("--adapt learns from conversations: give them with --data or --prompts instead of --shards")
    if config.data.prompts and config.data.sources != find(TrainConfig, "data").default:
        raise ConfigError("--prompts and --data are both given: the target answers --prompts, --data has answers")
    if step.hours and (step.minutes or step.max_steps):
        raise ConfigError("--hours limits the whole run: leave --minutes and --max-steps out")


def check_with_hours(config: TrainConfig) -> None:
    for name in NOT_WITH_HOURS:
        if config.value(name) != find(TrainConfig, name).default:
            raise ConfigError(f"{flag(name)} cannot be used with --hours, which determines it; leave {flag(name)} out")
    if config.data.states in ("memory", "online"):
        raise ConfigError(
            f"--states {config.data.states} cannot be used with --hours, which saves hidden states on disk"
        )


def load_config(
    file: str | Path | None = None, overrides: Mapping[str, Any] | None = None, recipe: Mapping[str, Any] | None = None
) -> TrainConfig:
    """Merge defaults, recipe, YAML file and overrides (flags). Raises ConfigError with file and key."""
    return TrainConfig.of(**named_settings(file, overrides, recipe))


def named_settings(
    file: str | Path | None = None, overrides: Mapping[str, Any] | None = None, recipe: Mapping[str, Any] | None = None
) -> dict[str, Any]:
    """Return the settings in recipe, YAML file and overrides; later ones win. Raises ConfigError."""
    values = (read_yaml(Path(file), "config file") if file else None) or {}
    if not isinstance(values, dict):
        raise ConfigError(f"{file} must hold settings as `key: value` lines, not a {type(values).__name__}")
    try:
        TrainConfig.of(**values)  # report the file's errors with its name
    except ConfigError as e:
        raise ConfigError(f"{file}: {e}") from e
    return {**(recipe or {}), **values, **(overrides or {})}


def pass_type(config: TrainConfig, device: mx.Device | None = None) -> mx.Dtype:
    """Return the dtype of the forward and backward pass on a device, by default the default device.

    On a GPU, the default is bfloat16, as in other trainers: it halves the memory for gradients with the same result
    (karpathy/nanochat#793, on MPS: 26 % less memory, 0.04 % of the loss). MLX's float32 products on an M5 keep 11 bits
    anyway (ml-explore/mlx#4411). On a CPU only float32 uses BLAS, which is ten times faster.
    """
    import mlx.core as mx

    if config.optimization.dtype is not None:
        return file_type(config)
    on_gpu = (device or mx.default_device()).type == mx.DeviceType.gpu
    return mx.bfloat16 if on_gpu else mx.float32


def file_type(config: TrainConfig) -> mx.Dtype:
    """Return the dtype of the saved head: as configured, else bfloat16, as is usual for published heads."""
    import mlx.core as mx

    return mx.float32 if config.optimization.dtype == "float32" else mx.bfloat16
