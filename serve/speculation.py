"""How to speculate, as flags of a command: which proposer, how deep, by what policy; shared by all that decode."""

from __future__ import annotations

import argparse
import json
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, get_args

import mlx.core as mx
import mlx.nn as nn

from eagle_mlx.catalog import embedded
from eagle_mlx.catalog.head_search import load_found
from eagle_mlx.engine import Engine
from eagle_mlx.engine.prior import Prior
from eagle_mlx.errors import ConfigError
from eagle_mlx.head_check import head_warning
from eagle_mlx.heads.base import DraftHead
from eagle_mlx.heads.precision import described, quantize_for
from eagle_mlx.policy import AcceptancePolicy, FixedPolicy, HybridPolicy, Policy, ThroughputPolicy
from eagle_mlx.policy.throughput import MOST_TOKENS, levels_for
from eagle_mlx.proposers.base import Proposer
from eagle_mlx.proposers.draft_model import DraftModelProposer
from eagle_mlx.proposers.head import HeadProposer
from eagle_mlx.proposers.hybrid import MAX_NGRAM, MIN_NGRAM, HybridProposer, model_of
from eagle_mlx.proposers.ngram import NgramProposer
from eagle_mlx.target import Target, load_target

Mode = Literal["none", "ngram", "draft", "eagle", "mtp"]
_HEADS: tuple[Mode, ...] = ("eagle", "mtp")
"""Modes in which a head drafts."""
HeadBits = Literal[4, 8, 16]
PolicyName = Literal["throughput", "acceptance-ema", "fixed"]
Bits = Literal["4bit", "8bit"]
AUTO, NO_HEAD = "auto", "none"
"""What `--head` says for one that is looked for (`head_choice.py`), and for none."""
DEFAULT_TOKENS: dict[PolicyName, int] = {"throughput": MOST_TOKENS, "acceptance-ema": 4, "fixed": 4}
"""Draft tokens a round."""

_METHODS: dict[str, Mode] = {
    "eagle": "eagle",
    "eagle3": "eagle",
    "mtp": "mtp",
    "ngram": "ngram",
    "draft_model": "draft",
}
"""Names of other servers' `--speculative-config`, and what they are here."""


@dataclass(frozen=True)
class Speculation:
    """What the flags say. Raises ConfigError for flags that contradict each other."""

    mode: Mode | None = None
    """None: what the head is, else draft with a draft model, else none."""
    head: str | None = None
    head_bits: HeadBits | None = None
    """Bits to which the head is quantised, 16 for as it is; None: as the target is, where that is in 4 or 8 bits."""
    num_tokens: int | None = None
    """Draft tokens a round; the most where the policy adapts. None: `DEFAULT_TOKENS` of the policy."""
    draft_model: str | None = None
    draft_bits: Bits | None = None
    ngrams: bool = True
    """Whether n-grams draft beside a head or a draft model too, under the policy throughput."""
    ngram_max: int | None = None
    ngram_min: int | None = None
    """None: 3 and 1 where n-grams draft alone, 4 and 2 beside a model."""
    prompt_lookup: bool = True
    tree_nodes: int = 0
    """Tokens of a draft tree, the most where the policy adapts; 0 for chains."""
    policy: PolicyName = "throughput"
    disable_at_rows: int | None = None
    threshold: float = 0.3
    alpha: float = 0.1
    adaptive: bool = True
    keep: bool = True
    """Whether what the policy throughput learns is kept, and what earlier engines learnt is its beginning."""

    def __post_init__(self) -> None:
        if self.depth < 0:
            raise ConfigError(f"--num-speculative-tokens must be at least 0; got {self.depth}")
        if self.tree_nodes < 0:
            raise ConfigError(f"--draft-tree-nodes must be at least 0; got {self.tree_nodes}")
        if self.tree_nodes and self.policy == "acceptance-ema":
            raise ConfigError("--draft-tree-nodes needs --spec-policy throughput or fixed: acceptance-ema sizes chains")
        if self.mode == "draft" and self.draft_model is None:
            raise ConfigError("--spec-decode draft needs a model that drafts: give --draft-model")
        if self.head is not None and self.draft_model is not None:
            raise ConfigError("a --head and a --draft-model are two ways to draft; give one of them")
        for flag, given, modes in (
            ("--head", self.head, _HEADS),
            ("--head-bits", self.head_bits, _HEADS),
            ("--draft-model", self.draft_model, ("draft",)),
        ):
            if given is not None and self.mode not in (None, "none", *modes):
                raise ConfigError(f"--spec-decode {self.mode} does not use a {flag}; leave one of the two out")
        if self.head_bits is not None and self.head is None:
            raise ConfigError("--head-bits needs a --head")
        if self.draft_bits is not None and self.draft_model is None:
            raise ConfigError("--draft-model-quantize needs a --draft-model")

    @property
    def depth(self) -> int:
        """Draft tokens a round, the most where the policy adapts."""
        return DEFAULT_TOKENS[self.policy] if self.num_tokens is None else self.num_tokens

    def resolved_mode(self) -> Mode:
        """The mode that is on."""
        if self.depth == 0:
            return "none"
        if self.mode is not None:
            return self.mode
        return "eagle" if self.head is not None else "draft" if self.draft_model is not None else "none"

    @property
    def max_depth(self) -> int:
        """The most draft tokens below one another."""
        grown = levels_for(self.tree_nodes) if self.policy == "throughput" else 0
        return max(self.depth, grown)

    def proposer(self, target: Target) -> Proposer | None:
        """Load what drafts; None for plain decoding. A head that hardly drafts is worth a line on standard error.

        Raises an EagleError where it cannot be had or does not fit.
        """
        mode = self.resolved_mode()
        if mode == "ngram":
            return self._ngrams(3, 1)
        model = self._model(target, mode)
        if model is None or not self.ngrams or self.policy != "throughput":
            return model
        return HybridProposer(model, self._ngrams(MAX_NGRAM, MIN_NGRAM))

    def _ngrams(self, longest: int, shortest: int) -> NgramProposer:
        """N-grams of these lengths, but for what the flags say."""
        longest = longest if self.ngram_max is None else self.ngram_max
        shortest = shortest if self.ngram_min is None else self.ngram_min
        return NgramProposer(longest, shortest, self.prompt_lookup)

    def _model(self, target: Target, mode: Mode) -> HeadProposer | DraftModelProposer | None:
        """What drafts beside n-grams."""
        if mode in _HEADS:
            if self.head is None:
                raise ConfigError(f"--spec-decode {mode} needs a head for {target.name}: give --head")
            proposer = HeadProposer(load_quantized(self.head, target, self.head_bits))
            if self.mode is not None and proposer.name != self.mode:
                raise ConfigError(f"--spec-decode {mode}: {self.head} is an {proposer.name} head; leave the flag out")
            warn_of_head(proposer.head, target)
            return proposer
        if mode == "draft":
            assert self.draft_model is not None
            draft = load_target(self.draft_model)
            if self.draft_bits is not None:
                quantize(draft.model, self.draft_bits)
            return DraftModelProposer(draft)
        return None

    def make_policy(self) -> Policy:
        """A new policy, as an engine needs one of its own."""
        if self.policy == "fixed":
            return FixedPolicy(self.depth, self.tree_nodes)
        if self.policy == "throughput":
            return HybridPolicy(self.depth, max_nodes=self.tree_nodes)
        return AcceptancePolicy(self.depth, self.alpha, self.threshold, self.disable_at_rows, self.adaptive)

    def prior(self, engine: Engine) -> Prior | None:
        """What the engine's policy begins with, and keeps what it learns; None where it is not to, or learns nothing.

        For an engine that has not decoded yet.
        """
        policy = engine.policy
        if self.keep and isinstance(policy, ThroughputPolicy) and engine.proposer is not None:
            return Prior(engine, policy)
        return None

    def about_head(self, engine: Engine) -> list[str]:
        """A line on the numbers that a head's weights are, where one drafts."""
        proposer = model_of(engine.proposer)
        return [f"head numbers: {described(proposer.head)}"] if isinstance(proposer, HeadProposer) else []

    def why_chains(self, engine: Engine) -> list[str]:
        """A line on why there will be no trees, where some were asked for."""
        return [f"no draft trees for this target: {engine.chains_only}; it gets chains"] if engine.chains_only else []

    def __str__(self) -> str:
        mode = self.resolved_mode()
        source = f" head {self.head}" if mode in _HEADS else f" model {self.draft_model}" if mode == "draft" else ""
        if mode == "none":
            return "none, plain decoding"
        trees = f", or trees of up to {self.tree_nodes}" if self.tree_nodes else ""
        also = " and n-grams" if self.ngrams and mode != "ngram" and self.policy == "throughput" else ""
        return f"{mode}{source}{also}, up to {self.depth} tokens a round{trees}, policy {self.policy}"


def load_quantized(name: str | Path, target: Target, bits: int | None) -> DraftHead:
    """Load a head and quantise it as `--head-bits` asks. Raises an EagleError where it cannot be had."""
    head = load_found(name, target)
    quantize_for(head, target, bits)
    return head


def warn_of_head(head: DraftHead, target: Target) -> None:
    """Try a head on its target, and say on standard error what speaks against it, if anything does."""
    if (said := head_warning(head, target)) is not None:
        print(f"warning: {said}", file=sys.stderr)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The flags, under the names of the field."""
    default = Speculation()
    what = parser.add_argument_group("speculation")
    what.add_argument("--target", help="folder or hub id of the model (default: the embedded one)")
    what.add_argument(
        "--head",
        "--eagle-head-path",
        help="folder or hub id of its head, or none; auto, the default, takes one that was trained or fetched here, "
        "the model's own MTP layers or a published head, else n-grams (without --target: the embedded one's)",
    )
    add_head_bits(what)
    what.add_argument("--spec-decode", choices=get_args(Mode), help="what drafts (default: whatever is given)")
    what.add_argument(
        "--num-speculative-tokens",
        "--num-draft-tokens",
        type=int,
        metavar="K",
        help=f"draft tokens a round, the most where the policy adapts; 0 is off (default {default.depth}, or "
        f"{DEFAULT_TOKENS['fixed']} with --spec-policy fixed and acceptance-ema)",
    )
    what.add_argument(
        "--draft-tree-nodes",
        type=int,
        metavar="N",
        help="draft trees of up to N tokens where they pay; the target must be able to read them (default: chains)",
    )
    what.add_argument("--draft-model", metavar="MODEL", help="folder or hub id of a small model of the same tokenizer")
    what.add_argument("--draft-model-quantize", choices=get_args(Bits), help="quantise the draft model on load")
    what.add_argument(
        "--no-ngram",
        action="store_true",
        help="a head or draft model alone drafts (default: n-grams do where the text repeats itself and they pay more)",
    )
    what.add_argument("--ngram-max", type=int, metavar="N", help="longest n-gram (default 3; 4 beside a model)")
    what.add_argument("--ngram-min", type=int, metavar="N", help="shortest n-gram (default 1; 2 beside a model)")
    what.add_argument("--no-ngram-prompt-lookup", action="store_true", help="look in the answer alone")
    what.add_argument(
        "--speculative-config",
        metavar="JSON",
        help='all in one, as other servers take it: {"method": "eagle3", "model": "...", "num_speculative_tokens": 3}',
    )
    how = parser.add_argument_group("how deep to draft")
    how.add_argument("--spec-policy", choices=get_args(PolicyName), help=f"rule (default {default.policy})")
    how.add_argument(
        "--no-prior",
        action="store_true",
        help="with --spec-policy throughput: neither begin with what was learnt on this machine before nor keep it",
    )
    ema = "with --spec-policy acceptance-ema: "
    how.add_argument("--disable-by-batch-size", type=int, metavar="N", help=f"{ema}no drafts from N requests on")
    how.add_argument("--acceptance-rate-threshold", type=float, metavar="R", help=f"{ema}none below R (0.3)")
    how.add_argument("--acceptance-rate-ema-alpha", type=float, metavar="A", help=f"{ema}weight of a round (0.1)")
    how.add_argument("--no-adaptive-k", action="store_true", help=f"{ema}all K tokens or none")
    how.add_argument("--no-dynamic-spec-decode", action="store_true", help=f"{ema}never switch off")


def add_head_bits(what: argparse._ArgumentGroup) -> None:
    what.add_argument(
        "--head-bits",
        type=int,
        choices=get_args(HeadBits),
        help="quantise the head on load; 16 leaves it as it is (default: 4 or 8 bits where the target has as many)",
    )


def from_arguments(args: argparse.Namespace) -> tuple[str | Path, Speculation]:
    """The target's name, and how to speculate; with no target named, the embedded one with its head.

    With a target and nothing that drafts, the head is `AUTO`, which `head_choice.load_proposer` looks for.

    Raises ConfigError for flags that cannot be used together.
    """
    given: dict[str, Any] = {
        "mode": args.spec_decode,
        "head": args.head,
        "head_bits": args.head_bits,
        "num_tokens": args.num_speculative_tokens,
        "tree_nodes": args.draft_tree_nodes,
        "draft_model": args.draft_model,
        "draft_bits": args.draft_model_quantize,
        "ngrams": False if args.no_ngram else None,
        "ngram_max": args.ngram_max,
        "ngram_min": args.ngram_min,
        "prompt_lookup": False if args.no_ngram_prompt_lookup else None,
        "policy": args.spec_policy,
        "keep": False if args.no_prior else None,
        **_ema_settings(args),
    }
    given = {name: value for name, value in given.items() if value is not None}
    if args.speculative_config is not None:
        known = _from_json(args.speculative_config)
        if clash := sorted(known.keys() & given.keys()):
            raise ConfigError(f"--speculative-config and a flag of its own both set {', '.join(clash)}; give one")
        given |= known
    head, mode = given.pop("head", None), given.get("mode")
    if head in (None, AUTO) and "draft_model" not in given and mode in (None, *_HEADS):
        given["head"] = AUTO if args.target is not None or mode == "mtp" else str(embedded("head"))
    elif head == NO_HEAD and "draft_model" not in given:
        given.setdefault("mode", "none")
    elif head not in (None, NO_HEAD):
        given["head"] = head
    return args.target or embedded("target"), Speculation(**given)


def _ema_settings(args: argparse.Namespace) -> dict[str, Any]:
    """The settings of the acceptance policy; ConfigError where another policy would ignore them."""
    settings = {
        "disable_at_rows": args.disable_by_batch_size,
        "threshold": 0.0 if args.no_dynamic_spec_decode else args.acceptance_rate_threshold,
        "alpha": args.acceptance_rate_ema_alpha,
        "adaptive": False if args.no_adaptive_k else None,
    }
    if args.spec_policy != "acceptance-ema" and any(value is not None for value in settings.values()):
        raise ConfigError("flags of the acceptance rate need --spec-policy acceptance-ema; other policies ignore them")
    return settings


def _from_json(text: str) -> dict[str, Any]:
    """The fields that a `--speculative-config` sets."""
    try:
        config = json.loads(text)
    except json.JSONDecodeError as e:
        raise ConfigError(f"--speculative-config is not JSON: {e}") from e
    if not isinstance(config, dict):
        raise ConfigError('--speculative-config must be an object, such as {"method": "ngram"}')
    method = config.pop("method", None)
    if method not in _METHODS:
        raise ConfigError(f"--speculative-config: `method` must be one of {', '.join(_METHODS)}; got {method!r}")
    mode = _METHODS[method]
    names: dict[str, tuple[str, type]] = {"num_speculative_tokens": ("num_tokens", int)}
    if mode == "ngram":
        names |= {"prompt_lookup_max": ("ngram_max", int), "prompt_lookup_min": ("ngram_min", int)}
    else:
        names["model"] = ("head" if mode in _HEADS else "draft_model", str)
    fields: dict[str, Any] = {"mode": mode}
    for key, value in config.items():
        if key not in names:
            known = ", ".join(["method", *names])
            raise ConfigError(f"--speculative-config: unknown key {key!r} for {method}; the keys are {known}")
        name, kind = names[key]
        if type(value) is not kind:
            raise ConfigError(f"--speculative-config: {key} must be of type {kind.__name__}; got {value!r}")
        fields[name] = value
    return fields


def quantize(model: nn.Module, bits: Bits, group_size: int = 64) -> None:
    """Quantise the weights of a model in place, where their rows can be cut into groups; the rest stays as it is."""

    def fits(_: str, module: nn.Module) -> bool:
        return hasattr(module, "to_quantized") and module.weight.shape[-1] % group_size == 0

    nn.quantize(model, group_size, int(bits.removesuffix("bit")), class_predicate=fits)
    mx.eval(model.parameters())
