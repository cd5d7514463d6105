"""Fit an existing head to a target and to its user's prompts (`--adapt`): it stays unless the judge finds a better one.

The run trains a copy, writes it in the head's own layout, and lets the judge compare both on held-out prompts.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

from eagle_mlx import hub, learn_costs
from eagle_mlx.data_pipelines import MakeLimits, Wanted, read_conversations
from eagle_mlx.errors import ConfigError, DataError, EagleError
from eagle_mlx.files import new_folder
from eagle_mlx.formats.tensors import HeadFolder
from eagle_mlx.head_check import load_head
from eagle_mlx.heads import Format, layout_of
from eagle_mlx.heads.block import BlockHead
from eagle_mlx.heads.precision import quantization_of, quantize
from eagle_mlx.hooks import without_hooks
from eagle_mlx.judge import Judge
from eagle_mlx.paired import FEWEST
from eagle_mlx.progress import counted
from eagle_mlx.proposers.head import HeadProposer
from eagle_mlx.sampling_params import SamplingParams
from eagle_mlx.setting import find
from eagle_mlx.target import Target

from .config import EvaluationConfig, TrainConfig, TrainSettings, file_type
from .convert.conversion import OURS, depth_of, exact_dtype, verifier_of
from .data import answer_prompts, data_config, heldout_prompts, learned_side, make_data, of_replay, replay_file
from .distributed import World
from .kind_settings import KIND_SETTINGS
from .kinds import Head

Prompts = Sequence[Sequence[int]]
_ANSWERING, _MAKING, LEARNING = 1 / 3, 1 / 2, 0.85
"""Shares of a run's time by which the target has answered the prompts and has made up other conversations, and by which
the head has learned. The rest is for the judge."""
_FEWEST_OTHERS = 10 * FEWEST
"""Conversations that the target makes up. One in ten is held out, so that the judge has enough of them."""


def settled(given: TrainConfig) -> TrainConfig:
    """Return the settings of a run that continues the head to adapt, if any, with its kind and block.

    Such a run has all data before training, so `hours` is only its time limit. Raises CheckpointError if the head
    cannot be read.
    """
    if not given.head.adapt:
        return given
    if (prompts := given.evaluation.prompts or FEWEST) < FEWEST:
        raise ConfigError(f"--eval-prompts {prompts}: the judge needs at least {FEWEST}; give more, or leave it out")
    name, folder = given.head.adapt, hub.head_folder(given.head.adapt)
    kind, _ = layout_of(HeadFolder.read(folder))
    name = str(folder) if Path(name).expanduser().is_dir() else name  # of a run, its best head
    changes: dict[str, Any] = {"adapt": name, "init_from": name, "hours": None}
    if kind.name in KIND_SETTINGS and given.head.kind == find(TrainConfig, "head").default:
        changes["head"] = kind.name
    if given.optimization.unroll is None and issubclass(kind.head_class, BlockHead):
        usual = KIND_SETTINGS.get(kind.name, KIND_SETTINGS["dflash"]).defaults["unroll"]
        changes["unroll"] = min(usual, load_head(folder, check=False).config.drafts)
    return given.changed(**changes)


def division(config: TrainConfig, seconds: float) -> str:
    steps = [("the target answers the prompts", _ANSWERING)] if config.data.prompts else []
    steps += [] if config.data.replay else [("the target writes conversations", _MAKING)]
    steps += [("the head learns", LEARNING)]
    shown = ", ".join(f"{what} until {timedelta(seconds=round(share * seconds))}" for what, share in steps)
    return f"{timedelta(seconds=round(seconds))} at most: {shown}, then the judge decides"


def making_limits(over: Callable[[float], bool]) -> MakeLimits:
    """Return the limits for conversations that the target writes. over: as in `prepare`."""
    return MakeLimits(over=lambda made: made > 0 and over(_MAKING))


def prepare(target: Target, config: TrainSettings, world: World, over: Callable[[float], bool]) -> None:
    """Have the target answer the prompts, and make up conversations on other subjects, unless the user gives them.

    over: whether more than a share of the run's time has passed. Raises as `answer_prompts`.
    """
    if config.data.prompts:
        head = load_head(config.head.adapt, target, check=False)
        answer_prompts(target, config, head, world, lambda: over(_ANSWERING))
    if not config.data.replay:
        count = sum(1 for _ in read_conversations(data_config(config), learned_side(config), target.tokenizer))
        wanted = Wanted(rows=max(_FEWEST_OTHERS, count))
        make_data(target, config, world, replay_file(config), wanted, making_limits(over))


@dataclass(frozen=True)
class Adaptation:
    """The head that a run adapts, as it is in its files, and the prompts to judge the candidate."""

    name: str
    target: Target
    measuring: EvaluationConfig
    files: HeadFolder
    layout: Format
    prompts: Prompts
    others: Prompts
    """Prompts of older conversations."""

    @classmethod
    def of(cls, config: TrainSettings, target: Target, prompts: Prompts, trained: Collection[int]) -> Adaptation:
        """Return the adaptation of a run that learns conversations with the keys in `trained`.

        Raises CheckpointError if the head cannot be read.
        """
        files = HeadFolder.read(hub.head_folder(config.head.adapt), target.num_layers)
        others: Prompts = ()
        if not config.data.is_self:
            with suppress(DataError):  # none is held out
                others = heldout_prompts(target, of_replay(config), trained, len(prompts)).tokens
        name = hub.public_name(config.head.adapt)
        return cls(name, target, config.evaluation, files, layout_of(files)[1], prompts, others)

    def save(self, head: Head, folder: Path, target_name: str, extra: Mapping[str, Any], config: TrainConfig) -> None:
        """Write a trained head in the layout, dtype and quantization of the head that it was adapted from.

        Raises ConfigError if the layout cannot express it.
        """
        read, more = self.files.config, dict[str, Any]()
        if self.layout.name == "speculators":
            verifier = verifier_of(read)
            more = {"base_model": verifier.get("name_or_path"), "depth": depth_of(read)}
            more["target_architectures"] = verifier.get("architectures") or ()
        noted = {name: value for name, value in (read.get("eagle_mlx") or {}).items() if name not in OURS}
        extra = {**noted, **extra, "adapted_from": self.name}
        dtype = file_type(config) if config.optimization.dtype else exact_dtype(self.files.tensors, read)
        if (quantization := read.get("quantization")) is not None and quantization_of(head) is None:
            head = without_hooks(head)
            quantize(head, quantization["bits"], quantization["group_size"])
        options = {"target_name": target_name, "extra": extra, "dtype": dtype, "overwrite": True}
        self.layout.save(head, folder, **options, **more)

    def judge(self, candidate: Path) -> dict[str, Any]:
        """Compare a candidate's files with the head's, both in the precision in which they are served.

        Returns the verdict, whether the candidate is taken, a summary, and the figures on the prompts and, if there are
        enough, on older conversations.
        """
        own = self._compare(candidate, self.prompts)
        others = None
        with suppress(EagleError):  # the answers to all of them loop
            others = self._compare(candidate, self.others) if len(self.others) >= FEWEST else None
        verdict, (before, after) = own["verdict"], own["acceptance_lengths"]
        summary = f"τ {before:.3f} to {after:.3f}, {own['shown']}"
        if others is not None:
            summary += f"; on older ones {others['shown']}"
        about = {"from": self.name, "verdict": verdict, "taken": verdict == "better", "summary": summary}
        return {**about, "own": own, "others": others}

    def _compare(self, candidate: Path, prompts: Prompts) -> dict[str, Any]:
        target = self.target
        heads = [load_head(folder, target, check=False) for folder in (self.files.folder, candidate)]
        first, second = map(HeadProposer, heads)
        judge = Judge(target, first, second, self.measuring.depth)
        curve = None if first.weight_bytes == second.weight_bytes else learn_costs(target)
        result = judge.compare(prompts, SamplingParams(temperature=0.0, max_tokens=self.measuring.tokens), curve)
        gain, taus = result.gain, [part.acceptance_length for part in (result.first, result.second)]
        shown = f"{gain.interval} on {counted(gain.conversations, 'held-out prompt')}"
        shown += f" ({gain.advice})" if gain.verdict == "not told apart" else ""
        return {**asdict(gain), "acceptance_lengths": taus, "left_out": result.left_out, "shown": shown}


def copy_head(source: Path, folder: Path) -> None:
    """Write a copy of a head's folder over a folder, which changes only once the copy is complete."""
    with new_folder(folder, overwrite=True) as part:
        shutil.copytree(source, part, dirs_exist_ok=True)
