"""The trainer's settings in six groups: frozen dataclasses with defaults and help texts."""

from __future__ import annotations

import dataclasses
import math
from dataclasses import dataclass
from typing import Literal

from eagle_mlx.errors import ConfigError
from eagle_mlx.heads import KINDS
from eagle_mlx.setting import ABOVE_0, AT_LEAST_1, NOT_NEGATIVE, SHARE, Group, Limit, find, flag, setting
from eagle_mlx.shards import BITS
from eagle_mlx.target_options import TargetOptions

SELF = "self"
"""The data source for conversations that the target makes up."""
_KNOWN = Limit(lambda kind: kind in KINDS, f"must be one of {', '.join(KINDS)}, not {{!r}}")
_SELF_TOKENS = 500_000
"""What one night yields: 17 tokens a second for eight hours, with a small model on two cores."""


@dataclass(frozen=True)
class HeadConfig(Group):
    """The head: its target, its kind, its shape. Shapes left open follow the target."""

    target: str = setting("", "folder or hub id of the model that the head is for")
    kind: str = setting(
        "eagle3",
        "what to train: an EAGLE-3 head, one of EAGLE-1 and 2, or a multi-token-prediction layer",
        _KNOWN,
        name="head",
        metavar=f"{{{','.join(KINDS)}}}",
    )
    init_from: str = setting(
        "",
        "folder or hub id of a head of that kind to continue from; it gives the shape and the draft vocabulary",
    )
    draft_vocab: int = setting(
        0,
        "entries of the draft vocabulary, the most frequent tokens; all of them where the target has no more",
        NOT_NEGATIVE,
    )
    aux_layers: tuple[int, ...] = setting(
        (),
        "target layers that the head reads, counted from 0; default: a low, a middle and a high one, or what --shards "
        "hold besides the last",
    )
    layers: int = setting(
        1,
        "decoder layers of the head; those behind the first begin as the target's last ones: better drafts, that take "
        "longer",
        AT_LEAST_1,
    )
    intermediate_size: int = setting(0, "width of the head's MLP; 0 for the target's own, where it has one")
    heads: int = setting(0, "attention heads of the head; 0 for as many as the target has")
    kv_heads: int = setting(0, "key and value heads of the head; 0 for as many as the target has")
    feature_norm: Literal["auto", "each", "all", "none"] = setting(
        "auto",
        "norm of the layers that are read: one for each (EAGLE-3.1's fc_norm), one over all (norm_before_fc), or none",
    )
    feedback: Literal["auto", "normed", "output"] = setting(
        "auto",
        "what a draft step feeds to the next: its output, or that behind the final norm (EAGLE-3.1's norm_output)",
        name="recycle",
    )
    norm_before_residual: bool = setting(False, "start the residual stream from the normed feature")
    start: Literal["linear", "random"] = setting(
        "linear",
        "how a new head begins: as the best linear guess of the target's next state, found by least squares in one "
        "pass over some of the data, or at random",
    )


@dataclass(frozen=True)
class DataConfig(Group):
    """What the head learns from, and where the target's hidden states are kept."""

    sources: tuple[str, ...] = setting(
        ("builtin:python",),
        "sources of conversations: files, hub ids, presets; SOURCE=WEIGHT for each makes a mix of them (docs/data.md); "
        "self for some that the target makes up, which is the default of all targets but the included one",
        name="data",
    )
    self_tokens: int = setting(
        _SELF_TOKENS, "with --data self: tokens of conversations that the target makes up first", AT_LEAST_1
    )
    map: tuple[str, ...] = setting(
        (),
        "what the rows call their fields, such as role=from,content=value or SOURCE:prompt=question",
    )
    stream: bool = setting(False, "read rows as they come and store none, for sets that are larger than the disk")
    skip_bad: bool = setting(False, "leave out and count rows that cannot be used, in place of ending with an error")
    keep_turns: str = setting(
        "", "keep conversations of so many turns of the user; either number may be left out", metavar="MIN:MAX"
    )
    keep_tokens: str = setting("", "keep conversations of so many tokens", metavar="MIN:MAX")
    dedupe: Literal["none", "prompt", "conversation"] = setting(
        "none",
        "keep the first of conversations with the same prompt, or of the same whole",
    )
    shards: tuple[str, ...] = setting(
        (), "folders of hidden states made by `eagle-data`, in place of --data; any of their layers", metavar="DIR"
    )
    limit: int = setting(0, "use at most this many conversations, all sources together; 0 for all", NOT_NEGATIVE)
    max_length: int = setting(2048, "cut conversations after this many tokens", AT_LEAST_1)
    states: Literal["auto", "memory", "disk", "online"] = setting(
        "auto",
        "hidden states captured once and kept in memory or on the disk, or anew for each batch; auto: by --cache-gb",
    )
    cache_gb: float = setting(
        4.0,
        "capture the hidden states once where they fit this many gigabytes of free memory, or else of the disk",
        NOT_NEGATIVE,
    )
    cache_bits: int = setting(16, "bits of a value that is kept on the disk, 16 or 8")
    cache_dir: str = setting(
        "",
        "folder of the states kept on the disk, where later runs find them; default: the output's name + .shards",
        metavar="DIR",
    )

    @property
    def is_self(self) -> bool:
        """Whether the target makes up the training data."""
        return self.sources == (SELF,)

    def _check(self) -> None:
        if not self.is_self and any(source.partition("=")[0] == SELF for source in self.sources):
            raise ConfigError(
                f"--data {' '.join(self.sources)}: self stands alone, without a weight; for a mix make a file first, "
                "with eagle-data make --target MODEL --output own.jsonl, and name that beside the others"
            )
        if self.is_self and self.shards:
            raise ConfigError("--shards is in place of --data; leave --data self out, and name prompts by --eval-data")
        if self.cache_bits not in BITS:
            raise ConfigError(f"--cache-bits must be {' or '.join(map(str, BITS))}, not {self.cache_bits}")


@dataclass(frozen=True)
class OptimizationConfig(Group):
    """The loss, the batches and the updates. What is left open follows the kind of head."""

    unroll: int = setting(0, "draft steps over which the loss is taken", NOT_NEGATIVE)
    decay: float = setting(0.0, "weight of a draft step's loss, relative to the step before it", SHARE)
    step_weights: tuple[float, ...] = setting((), "weights of the draft steps' losses one by one, in place of --decay")
    loss: Literal["auto", "soft", "hard"] = setting(
        "auto",
        "cross entropy with the target's distribution (soft) or with its most likely token (hard)",
    )
    loss_weights: tuple[float, ...] = setting((), "what the distance of the features and the cross entropy count for")
    feature_noise: float = setting(
        -1.0,
        "uniform noise of up to this size on the features that are read; less in conversations of more than 512 tokens",
    )
    rows: int = setting(
        4,
        "rows of a batch; with several processes (mlx.launch), rows that each of them adds to it",
        AT_LEAST_1,
    )
    length: int = setting(1024, "tokens of a row; short conversations share one, long ones are cut", AT_LEAST_1)
    accumulate: int = setting(
        1,
        "compute a batch's rows in so many parts, one after the other: the same update with less memory",
        AT_LEAST_1,
    )
    dtype: Literal["auto", "float32", "bfloat16"] = setting(
        "auto",
        "numbers of the forward and backward pass, and of the head that is written; weights and moments are kept in "
        "float32. auto: bfloat16 on a GPU, float32 on a CPU, and the head in bfloat16",
    )
    grad_checkpoint: bool = setting(
        False,
        "compute draft steps again for the gradient: far less memory, somewhat more time",
    )
    epochs: int = setting(2, "passes over the data; --max-steps or --minutes end the run in its place", AT_LEAST_1)
    max_steps: int = setting(0, "optimizer steps of the run; 0 to count epochs", NOT_NEGATIVE)
    minutes: float = setting(
        0.0,
        "time budget of the run, over which the schedule is laid; 0 to count steps or epochs",
        NOT_NEGATIVE,
    )
    hours: float = setting(
        0.0,
        "time budget of all there is to do: the target makes data, the head learns and then drafts the next data, both "
        "measured here and divided so that the tokens are passed over --epochs times; 0 to make the data first",
        NOT_NEGATIVE,
    )
    optimizer: Literal["adamw", "muon"] = setting(
        "adamw",
        "adamw for all weights, or muon for the matrices inside the head and adamw for the rest",
    )
    lr: float = setting(
        0.0,
        "peak learning rate of AdamW; 0 for one that follows the target's width: 1e-4 at 4,096, twice that at half",
        NOT_NEGATIVE,
    )
    muon_lr: float = setting(
        0.0,
        "peak learning rate of Muon as its author has it; 0 for steps as large as AdamW's at --lr, whatever the shape",
        NOT_NEGATIVE,
    )
    warmup: float = setting(0.015, "share of the run over which the learning rate rises", SHARE)
    final_lr: float = setting(0.0, "share of the peak learning rate at which the cosine ends", SHARE)
    weight_decay: float = setting(0.0, "weight decay of AdamW", NOT_NEGATIVE)
    clip: float = setting(0.5, "largest norm of the gradient", ABOVE_0)

    def _check(self) -> None:
        if self.length < self.unroll + 2:
            raise ConfigError(f"--length {self.length} leaves no room for {self.unroll} draft steps; make it longer")
        if not all(0 < weight < math.inf for weight in self.step_weights):
            raise ConfigError(f"--step-weights must be above 0, but are {_list(self.step_weights)}")
        if self.step_weights and self.unroll not in (0, len(self.step_weights)):
            raise ConfigError(
                f"--step-weights are given for {len(self.step_weights)} draft steps and --unroll is {self.unroll}; "
                "leave --unroll out"
            )
        if self.step_weights and self.decay:
            raise ConfigError("--step-weights and --decay are both given; leave one of them out")
        parts = self.loss_weights
        if parts and not (len(parts) == 2 and all(0 <= part < math.inf for part in parts) and any(parts)):
            raise ConfigError(
                "--loss-weights are two numbers of 0 or more, for the features and for the cross entropy, not "
                f"{_list(parts)}"
            )
        if self.feature_noise < 0 and self.feature_noise != -1:
            raise ConfigError(f"--feature-noise must not be negative, but is {self.feature_noise}")


@dataclass(frozen=True)
class EvaluationConfig(Group):
    """How acceptance is measured, by decoding held-out prompts."""

    data: str = setting(
        "",
        "source of the held-out prompts; default: the held-out part of the first --data",
        name="eval_data",
    )
    prompts: int = setting(
        100,
        "held-out prompts on which acceptance is measured by decoding",
        AT_LEAST_1,
        name="eval_prompts",
    )
    tokens: int = setting(128, "tokens decoded for each of them", AT_LEAST_1, name="eval_tokens")
    depth: int = setting(4, "draft tokens per round when acceptance is measured", ABOVE_0, name="eval_depth")
    batch: int = setting(8, "prompts decoded side by side", ABOVE_0, name="eval_batch")
    steps: int = setting(
        0,
        "measure acceptance and keep a checkpoint every so many steps",
        NOT_NEGATIVE,
        name="eval_steps",
    )
    minutes: float = setting(
        0.0,
        "the same every so many minutes; with neither, ten times in the run",
        NOT_NEGATIVE,
        name="eval_minutes",
    )


@dataclass(frozen=True)
class RunConfig(Group):
    """Where the run writes, what it keeps, how it is repeated."""

    output: str = setting(
        "out/head", "folder for checkpoints, metrics, plots and report; must not exist", metavar="DIR"
    )
    overwrite: bool = setting(False, "replace an output folder that exists, once the new one is complete")
    seed: int = setting(0, "seed of the weights and of the order of the data")
    checkpoints: int = setting(
        2,
        "states kept to resume from, the newest; each takes about three times the memory of the head's weights",
        AT_LEAST_1,
    )
    checkpoint_minutes: float = setting(
        10.0,
        "save a state every so many minutes, besides after each measurement of acceptance; 0 for after those alone",
        NOT_NEGATIVE,
    )
    log_steps: int = setting(10, "steps between lines of metrics.jsonl", AT_LEAST_1)
    wandb: bool = setting(False, "log to Weights & Biases as well (WANDB_MODE=offline works without a network)")
    wandb_project: str = setting("eagle-mlx", "project of Weights & Biases")
    streams: int = setting(
        0,
        "MLX streams that compute parts of a batch in parallel; 0 for one per core on a CPU under Linux, else one",
        NOT_NEGATIVE,
        name="lanes",
    )


@dataclass(frozen=True)
class TrainConfig(Group):
    """How a head is trained. The defaults are common ones for targets of 1 to 30 billion parameters.

    In code, settings are grouped; flags, YAML files and saved runs use unique names: `config.evaluation.depth` is
    `--eval-depth` and `eval_depth`. If a default depends on the kind of head, `kinds.resolved` sets it.
    """

    head: HeadConfig = HeadConfig()
    loading: TargetOptions = dataclasses.field(default_factory=TargetOptions)
    data: DataConfig = DataConfig()
    optimization: OptimizationConfig = OptimizationConfig()
    evaluation: EvaluationConfig = EvaluationConfig()
    run: RunConfig = RunConfig()

    def _check(self) -> None:
        if self.loading.shard == "pipeline":
            raise ConfigError(
                "--shard pipeline has the layers on several machines, and a head learns from what they return; use "
                "--shard tensor"
            )
        if self.optimization.hours:
            check_beside_hours(self)

    @property
    def prompts_are_heldout(self) -> bool:
        """Whether acceptance is measured on the held-out part of the first source."""
        return self.evaluation.data in ("", *self.data.sources[:1])


NOT_BESIDE_HOURS = {
    "minutes": "it is the time of the training alone",
    "max_steps": "the time says how many steps there are",
    "self_tokens": "the time says how much is made",
    "limit": "all that is made is learnt from",
    "keep_turns": "all that is made is learnt from",
    "keep_tokens": "all that is made is learnt from",
    "dedupe": "no two of what is made begin alike",
    "shards": "the data are made in the run",
    "cache_dir": "what is made stands in the folder of the run",
    "eval_steps": "acceptance is measured behind each portion of data",
    "eval_minutes": "acceptance is measured behind each portion of data",
}


def check_beside_hours(config: TrainConfig) -> None:
    """Raise ConfigError for settings that conflict with `hours`."""
    for name, why in NOT_BESIDE_HOURS.items():
        if config.value(name) != find(TrainConfig, name).default:
            raise ConfigError(f"{flag(name)} is not for --hours: {why}; leave {flag(name)} out")
    if not config.data.is_self:
        raise ConfigError("--hours is for data that the target makes up: leave --data out, or give --minutes instead")
    if config.data.states in ("memory", "online"):
        raise ConfigError(f"--states {config.data.states} is not for --hours: what is made is captured on to the disk")


def _list(values: tuple[float, ...]) -> str:
    return " ".join(f"{value:g}" for value in values)
