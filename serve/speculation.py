"""Settings of speculation and memory that all decoding commands share."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, Self

import eagle_mlx as em
from eagle_mlx.catalog import embedded
from eagle_mlx.errors import ConfigError
from eagle_mlx.late import late
from eagle_mlx.plan import PREFILL_CHUNK
from eagle_mlx.policy import AcceptancePolicy, FixedPolicy, Policy, ThroughputPolicy
from eagle_mlx.policy.throughput import MOST_TOKENS, levels_for
from eagle_mlx.sampling_params import Acceptance, Drafter, SamplingParams, limit_of
from eagle_mlx.setting import AT_LEAST_0, AT_LEAST_1, DRAFT_TOKENS, SHARE, Group, Limit, between, find, flag, setting

if TYPE_CHECKING:
    from eagle_mlx.proposers.base import Proposer

Mode = Literal["none", "ngram", "draft", "eagle", "mtp"]
_HEADS: tuple[Mode, ...] = ("eagle", "mtp")
_METHODS = {"eagle": "eagle", "eagle3": "eagle", "mtp": "mtp", "ngram": "ngram", "draft_model": "draft"}
"""Modes by the methods of vLLM's `--speculative-config`."""
HeadBits = Literal[4, 8, 16]
PolicyName = Literal["throughput", "acceptance-ema", "fixed"]
Bits = Literal["4bit", "8bit"]
TARGET_HELP = "folder or hub id of the model (default: the embedded one)"
AUTO, NO_HEAD = "auto", "none"  # values of `--head`: search for one (`load_proposer`), or use none
NODES = between(0, 64)  # tokens of a draft tree; EAGLE-2's largest published tree has 60
DEFAULT_TOKENS: dict[PolicyName, int] = {"throughput": MOST_TOKENS, "acceptance-ema": 4, "fixed": 4}

_EMA = "with acceptance-ema: "
_OF_EMA = (
    *("disable_by_batch_size", "acceptance_rate_threshold", "acceptance_rate_ema_alpha"),
    *("adaptive_k", "dynamic_spec_decode"),
)
DRAFT_WINDOW = "the head sees only the newest N tokens of a text; 0 for all (default: as it was trained)"
DRAFT_SINK = "with a draft window: the head also sees the first S tokens (default: 4; 0 if trained with a window)"
HEAD_BITS = "quantize the head on load; 16: do not (default: the target's bits if it has 4 or 8)"
THINKING = "tokens of thought, after which its end tag is forced (default: no limit)"
IN_MEMORY = Limit(
    lambda gigabytes: gigabytes >= 1e-9 and late("eagle_mlx.memory:fits_machine")(gigabytes),
    "must be above 0 and at most this machine's memory, not {} GB",
)


@dataclass(frozen=True)
class MemoryOptions(Group):
    """The engine's memory for the KV cache, and its positions per forward."""

    prefill_chunk: int = setting(
        PREFILL_CHUNK,
        "prompt tokens per forward, for all requests together; more need more memory and delay decoding requests",
        AT_LEAST_1,
    )
    kv_gb: float | None = setting(
        None,
        "memory for KV caches; requests that do not fit wait (default: four fifths of the memory left after "
        "weights); on machines of up to 16 GB, three fifths",
        IN_MEMORY,
        metavar="GB",
    )
    exact: bool = setting(
        False,
        "read two positions in plain rounds, too, so that all rounds use the same kernels; eagle-doctor says whether "
        "your machine needs it",
    )

    @property
    def kv_bytes(self) -> int | None:
        """Bytes for the KV cache; None for a share of the memory left after the weights."""
        return bytes_of(self.kv_gb)


def bytes_of(gigabytes: float | None) -> int | None:
    return None if gigabytes is None else round(gigabytes * 1e9)


@dataclass(frozen=True)
class Speculation(Group):
    """The way to draft tokens, and how many."""

    mode: Mode | None = setting(None, "how to draft (default: with the given head or draft model)", name="spec_decode")
    head: str | None = setting(
        None,
        "folder or hub id of the head, or none; auto uses a head trained or downloaded here, the model's own "
        "MTP layers or a published head, else n-grams (default: auto; without --target, the embedded head)",
        also=("eagle_head_path",),
    )
    head_bits: HeadBits | None = setting(None, HEAD_BITS)
    draft_window: int | None = setting(None, DRAFT_WINDOW, AT_LEAST_0)
    draft_sink: int | None = setting(None, DRAFT_SINK, AT_LEAST_0, metavar="S")
    num_tokens: int | None = setting(
        None,
        "draft tokens per round, at most 20; the maximum if the policy adapts, which n-grams with a model may double; "
        "0 for none (default: "
        f"{DEFAULT_TOKENS['throughput']}, or {DEFAULT_TOKENS['fixed']} with --spec-policy fixed and acceptance-ema)",
        DRAFT_TOKENS,
        "num_speculative_tokens",
        "K",
        also=("num_draft_tokens", "spec_length"),
    )
    tree_nodes: int = setting(
        0,
        "draft trees of up to N tokens when they are faster; the target must support them (default: chains)",
        NODES,
        "draft_tree_nodes",
        shown="",
    )
    draft_model: str | None = setting(
        None, "folder or hub id of a small model with the same tokenizer", metavar="MODEL", also=("draft_model_path",)
    )
    draft_bits: Bits | None = setting(None, "quantize the draft model on load", name="draft_model_quantize")
    ngrams: bool = setting(True, "also draft with n-grams if the text repeats itself and they are faster", name="ngram")
    ngram_max: int | None = setting(None, "most tokens that a match compares (default: 16)", AT_LEAST_1)
    ngram_min: int | None = setting(
        None, "fewest tokens that must match (default: 1; 2 with a head or draft model)", between(1, 16)
    )
    prompt_lookup: bool = setting(True, "look for n-grams in the prompt, too", name="ngram_prompt_lookup")
    memory_mb: int = setting(
        64,
        "megabytes of earlier texts to draft with, prompts and answers, 8 bytes a token; those of a key or cache_salt "
        "draft for no other; 0 for none",
        AT_LEAST_0,
    )
    no_memory: bool = setting(False, "draft with no earlier texts, as --memory-mb 0")
    memory_texts: tuple[str, ...] = setting(
        (),
        "texts to begin with, for all: a .jsonl file of conversations, a file of text, or a folder of source code",
        name="memory",
        metavar="PATH",
    )
    acceptance: Acceptance = setting(
        "auto", "rule that accepts drafts of sampled text (threshold is lossy: drafts change the text)"
    )
    least_probability: float = setting(
        SamplingParams.threshold,
        "with acceptance threshold: keep draft tokens that the target gives at least this probability",
        limit_of("threshold"),
        name="acceptance_threshold",
        metavar="P",
    )
    in_one: str | None = setting(
        None,
        'how to draft, as one JSON object; as in vLLM: {"method": "eagle3", "model": "...", '
        '"num_speculative_tokens": 3}',
        name="speculative_config",
        metavar="JSON",
    )
    policy: PolicyName = setting(
        "throughput",
        "policy that sets the draft depth of each round; a flag of acceptance-ema chooses that one",
        name="spec_policy",
    )
    keep: bool = setting(
        True,
        "with --spec-policy throughput: start from the target's cost curve; it is measured at the start and saved",
        name="prior",
    )
    disable_at_rows: int = setting(0, f"{_EMA}no drafts for N or more requests", AT_LEAST_0, "disable_by_batch_size")
    threshold: float = setting(0.3, f"{_EMA}no drafts below this acceptance", SHARE, "acceptance_rate_threshold", "R")
    alpha: float = setting(
        0.1,
        f"{_EMA}weight of the newest round",
        Limit(lambda alpha: 0 < alpha <= 1, "must be above 0 and at most 1, not {}"),
        "acceptance_rate_ema_alpha",
        "A",
    )
    adaptive: bool = setting(True, f"{_EMA}draft fewer than K tokens if fewer are accepted", name="adaptive_k")
    dynamic: bool = setting(True, f"{_EMA}turn drafting off below the threshold", name="dynamic_spec_decode")

    def _check(self) -> None:
        ema, has_model = self.policy == "acceptance-ema", self.draft_model is not None
        ignored = [flag(name) for name in _OF_EMA if self.value(name) != find(Speculation, name).default]
        named_head = None if self.head == NO_HEAD else self.head
        of_head = {"--head-bits": self.head_bits, "--draft-window": self.draft_window, "--draft-sink": self.draft_sink}
        needs = {name: (given, _HEADS) for name, given in {"--head": named_head, **of_head}.items()}
        needs["--draft-model"] = (self.draft_model, ("draft",))
        unused = [name for name, (given, modes) in needs.items() if given and self.mode not in (None, "none", *modes)]
        headless = [name for name, given in of_head.items() if given and (self.head == NO_HEAD or has_model)]
        low, high = self.ngram_min, self.ngram_max
        for wrong, message in (
            (low and high and low > high, f"--ngram-min {low} is more than --ngram-max {high}"),
            (self.tree_nodes and ema, "--draft-tree-nodes: acceptance-ema only drafts chains; choose another policy"),
            (ignored and not ema, f"only --spec-policy acceptance-ema uses {', '.join(ignored)}"),
            (self.mode == "draft" and not has_model, "--spec-decode draft needs a --draft-model"),
            (has_model and named_head, "--head and --draft-model cannot be combined; give one of them"),
            (unused, f"--spec-decode {self.mode} does not use {', '.join(unused)}; leave one of the two out"),
            (headless, f"{', '.join(headless)} needs a --head"),
            (self.draft_bits and not has_model, "--draft-model-quantize needs a --draft-model"),
            (self.memory_texts and (self.no_memory or not self.memory_mb), "--memory needs a memory; leave it out"),
        ):
            if wrong:
                raise ConfigError(message)

    @classmethod
    def of(cls, **settings: Any) -> Self:
        """Return the settings, including those of `--speculative-config` and the policy that they imply."""
        in_one = _from_json(settings.pop("speculative_config", None))
        if settings.get("spec_decode") == AUTO:
            is_plain = settings.get("head") == NO_HEAD and settings.get("draft_model") is None
            settings["spec_decode"] = "ngram" if is_plain else None
        given = [name for name, value in settings.items() if value is not None]
        if clash := [flag(name) for name in given if find(cls, name).field in in_one]:
            raise ConfigError(f"{', '.join(clash)}: set by both --speculative-config and a flag; give one of them")
        if "spec_policy" not in given and not set(_OF_EMA).isdisjoint(given):
            settings["spec_policy"] = "acceptance-ema"
        return cls(**{find(cls, name).field: value for name, value in settings.items()} | in_one)

    def for_target(self, target: str | None) -> tuple[str | Path, Self]:
        """Return the target, or the embedded one, and its speculation. AUTO is for `load_proposer` to find a head."""
        resolved, model = self, target or embedded("target")
        if self.head in (None, AUTO) and self.draft_model is None and self.mode in (None, *_HEADS):
            head = AUTO if target is not None or self.mode == "mtp" else str(embedded("head"))
            resolved = replace(self, head=head)
        elif self.head == NO_HEAD:
            resolved = replace(self, head=None, mode=self.mode or ("draft" if self.draft_model is not None else "none"))
        return model, resolved

    @property
    def depth(self) -> int:
        """Draft tokens per round, or their maximum if the policy adapts."""
        return DEFAULT_TOKENS[self.policy] if self.num_tokens is None else self.num_tokens

    def resolved_mode(self) -> Mode:
        if self.depth == 0:
            return "none"
        if self.mode is not None:
            return self.mode
        return "eagle" if self.head is not None else "draft" if self.draft_model is not None else "none"

    @property
    def max_depth(self) -> int:
        return max(self.depth, levels_for(self.tree_nodes) if self.policy == "throughput" else 0)

    def proposer(self, target: em.Target) -> Proposer | None:
        """Load the proposer, or return None for plain decoding. Raises EagleError if a model does not fit."""
        mode = self.resolved_mode()
        if mode == "ngram":
            return self._ngrams(1)
        model = self._model(target, mode)
        return self.for_requests(model) if self.policy == "throughput" and model is not None else model

    def for_requests(self, model: Proposer | None) -> Proposer | None:
        """Return a proposer that can also draft with n-grams, alone if there is no model, unless they are off."""
        from eagle_mlx.proposers.ngram import MIN_NGRAM

        if self.ngrams and isinstance(model, em.HeadProposer | em.DraftModelProposer):
            return em.HybridProposer(model, self._ngrams(MIN_NGRAM))
        return self._ngrams(1) if self.ngrams and model is None and self.depth else model

    @property
    def drafter(self) -> Drafter | None:
        """The default way to draft if both a model and n-grams can."""
        return None if self.policy == "throughput" else "model"

    @property
    def rule(self) -> dict[str, Any]:
        """The fields of `SamplingParams` that say how drafts are accepted."""
        return {"acceptance": self.acceptance, "threshold": self.least_probability}

    def with_policy(self, policy: PolicyName, num_tokens: int | None) -> Self:
        """Return these settings with another policy and depth. Raises ConfigError if the policy cannot have them."""
        ignored = [find(Speculation, name) for name in _OF_EMA if policy != "acceptance-ema"]
        defaults = {declared.field: declared.default for declared in ignored}
        return replace(self, policy=policy, num_tokens=num_tokens, **defaults)

    def _ngrams(self, shortest: int) -> em.NgramProposer:
        """Return an n-gram proposer that matches at least this many tokens, unless a flag says how many."""
        from eagle_mlx.proposers.suffixes import REACH

        longest = self.ngram_max or REACH
        memory = em.Memory(self.memory_mb << 20) if self.memory_mb and not self.no_memory else None
        return em.NgramProposer(longest, self.ngram_min or min(shortest, longest), self.prompt_lookup, memory)

    def _model(self, target: em.Target, mode: Mode) -> em.HeadProposer | em.DraftModelProposer | None:
        from .head_choice import load_head, quantize

        if mode in _HEADS:
            if self.head is None:
                raise ConfigError(f"--spec-decode {mode} needs a head for {target.name}: give --head")
            head = load_head(self.head, target, self.head_bits)
            proposer = em.HeadProposer(head, self.draft_window, self.draft_sink)
            if self.mode is not None and proposer.name != self.mode:
                raise ConfigError(f"--spec-decode {mode}: {self.head} has the mode {proposer.name}; leave the flag out")
            return proposer
        if mode == "draft":
            assert self.draft_model is not None
            draft = em.load_target(self.draft_model)
            if self.draft_bits is not None:
                quantize(draft.model, self.draft_bits)
            return em.DraftModelProposer(draft)
        return None

    def make_policy(self, target: em.Target | None = None, kv_bits: int | None = None, exact: bool = False) -> Policy:
        """Return a new policy; each engine needs its own. Unless `keep` is off, it knows the target's cost curve."""
        if self.policy == "fixed":
            return FixedPolicy(self.depth, self.tree_nodes)
        if self.policy == "throughput":
            curve = em.learn_costs(target, kv_bits, exact) if self.keep and target is not None else None
            return ThroughputPolicy(self.depth, max_nodes=self.tree_nodes, curve=curve)
        threshold = self.threshold if self.dynamic else 0.0
        return AcceptancePolicy(self.depth, self.alpha, threshold, self.disable_at_rows, self.adaptive)

    def engine(self, target: em.Target, proposer: Proposer | None, memory: MemoryOptions, **more: Any) -> em.Engine:
        more |= {"prefill_chunk": memory.prefill_chunk, "kv_bytes": memory.kv_bytes, "exact": memory.exact}
        measured = target if proposer is not None else None
        policy = self.make_policy(measured, more.get("kv_bits"), memory.exact)
        return em.Engine(target, proposer, policy=policy, **more)

    def notes(self, engine: em.Engine) -> list[str]:
        """Return lines on the head's number format, missing trees and lossy acceptance, if they apply."""
        from eagle_mlx.heads.precision import described

        head = engine.proposer.head if engine.proposer is not None else None
        notes = [f"head precision: {described(head)}"] if head is not None else []
        if engine.chains_only:
            notes.append(f"no draft trees for this target: {engine.chains_only}; it drafts chains")
        elif self.tree_nodes and engine.proposer is not None and not engine.proposer.abilities.trees:
            notes.append("no draft trees: n-grams draft chains")
        if self.acceptance == "threshold":
            notes.append(
                f"acceptance: threshold {self.least_probability:g}, which is lossy: drafts change sampled text"
            )
        return notes

    def __str__(self) -> str:
        mode = self.resolved_mode()
        if mode == "none":
            return "none, plain decoding"
        source = f" head {self.head}" if mode in _HEADS else f" model {self.draft_model}" if mode == "draft" else ""
        trees = f", or trees of up to {self.tree_nodes}" if self.tree_nodes and mode != "ngram" else ""
        also = " and n-grams" if self.ngrams and mode != "ngram" and self.policy == "throughput" else ""
        return f"{mode}{source}{also}, up to {self.depth} tokens a round{trees}, policy {self.policy}"


def _from_json(text: str | None) -> dict[str, Any]:
    """Return the fields of `Speculation` that a `--speculative-config` sets. Raises ConfigError."""
    if text is None:
        return {}
    try:
        config = json.loads(text)
    except json.JSONDecodeError as e:
        raise ConfigError(f"--speculative-config is not JSON: {e}") from e
    if not isinstance(config, dict):
        raise ConfigError('--speculative-config must be an object, such as {"method": "ngram"}')
    method = config.pop("method", None)
    if not isinstance(method, str) or method not in _METHODS:
        raise ConfigError(f"--speculative-config: `method` must be one of {', '.join(_METHODS)}; got {method!r}")
    mode = _METHODS[method]
    names = {"num_speculative_tokens": "num_tokens"}
    if mode == "ngram":
        names |= {"prompt_lookup_max": "ngram_max", "prompt_lookup_min": "ngram_min"}
    else:
        names["model"] = "draft_model" if mode == "draft" else "head"
    if unknown := [key for key in config if key not in names]:
        keys = ", ".join(["method", *names])
        raise ConfigError(f"--speculative-config: unknown key {unknown[0]!r} for {method}; the keys are {keys}")
    return {"mode": mode, **{names[key]: value for key, value in config.items()}}


def load_proposer(
    speculation: Speculation, target: em.Target, name: str | Path, say: Callable[[str], None]
) -> tuple[Speculation, Proposer | None]:
    """Return the speculation with the head that was found, and its proposer. `say` reports the choice.

    name: the target as the user named it. Skips found heads that do not load. Raises EagleError if a named model is not
    available, or if a required head is not found.
    """
    from eagle_mlx.target import fingerprint

    from .head_choice import usable_heads

    if speculation.head != AUTO or speculation.resolved_mode() == "none":
        return speculation, speculation.proposer(target)
    for match in usable_heads(name, say, fingerprint(target), speculation.mode):
        chosen = replace(speculation, head=match.head, mode=speculation.mode or match.mode)
        try:
            proposer = chosen.proposer(target)
            em.Engine(target, proposer, max_batch=1)  # check that the target has the hidden states that the head reads
        except em.EagleError as e:
            say(f"head: {match.head} is skipped: {e}")
            continue
        say(f"head: {match.about}")
        return chosen, proposer
    if speculation.mode is not None:
        raise ConfigError(f"--spec-decode {speculation.mode}: no head is known for {target.name}; give --head")
    say(f"head: none found for {target.name}; n-grams draft when that is faster (for other ways, see docs/heads.md)")
    ngrams = replace(speculation, head=None, head_bits=None, draft_window=None, draft_sink=None, mode="ngram")
    return ngrams, ngrams.proposer(target)
