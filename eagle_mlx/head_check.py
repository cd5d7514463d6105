"""Check whether a head drafts usefully for its target, by decoding a few rounds."""

from __future__ import annotations

import warnings
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from eagle_mlx import heads
from eagle_mlx.cache import check_cacheable
from eagle_mlx.engine import Engine
from eagle_mlx.errors import EagleError, HeadWarning, TargetError, require
from eagle_mlx.heads.base import DraftHead
from eagle_mlx.heads.precision import check_bits, quantize_for
from eagle_mlx.policy import FixedPolicy
from eagle_mlx.progress import progress_bar
from eagle_mlx.proposers.head import HeadProposer
from eagle_mlx.request import encode
from eagle_mlx.sampling_params import SamplingParams
from eagle_mlx.target import Target

PROMPTS = (
    "Write a Python function that returns the median of a list of numbers.",
    "Why is the sky blue?",
    "Explain to a child how a letter finds its way from one town to another.",
    "List the things that one should pack for a week at sea.",
)
TOKENS = 64  # to decode for each prompt
DEPTH = 2
SOUND = 0.4  # the share of first draft tokens accepted from the weakest fitting heads; good heads reach 0.9
BOUND = 0.11
"""A head is no better than chance if it has both of two draft tokens accepted in a smaller share of rounds.

A head that gets nothing from the hidden states still predicts the next token in 1 to 25 % of rounds, from the last one,
and two in at most 5 %. The weakest fitting heads reach 40 % and 20 %. Between shares p < q, both errors are equally
likely at 1 / (1 + log(q / p) / log((1 - p) / (1 - q))), here 0.11. The first token alone would not tell: on easy text a
head with layers in the wrong order reaches 0.3, a good head on hard text no more. A head with a norm for each layer may
do too well to be noticed: the included one reaches 15 % with layers in the wrong order.
"""


@dataclass(frozen=True)
class HeadTrial:
    rounds: int  # rounds with two draft tokens
    first: int  # rounds of these in which the first was accepted
    both: int


def load_head(name: str | Path, target: Target | None = None, check: bool = True, bits: int | None = None) -> DraftHead:
    """Load a head from a folder, the output of eagle-train or a hub id; with a target, check that it fits and drafts.

    `bits`: 4, 8, or 16 for no quantization; by default large matrices get the bits of most of the target's weights. A
    head that is quantized on disk stays so.

    If a head fits but drafts almost nothing, this gives a HeadWarning with the likely causes. The check decodes four
    answers of 64 tokens: at most 64 forwards of the target, about 30 with a good head, four times as many for the few
    models that decode one row at a time. With `check=False` nothing is decoded. Raises CheckpointError if files cannot
    be read, HeadError if the head is for another target, ConfigError for other `bits`.
    """
    require("target", target, Target | None, "a Target, such as em.load_target(name)")
    check_bits(bits)
    head = heads.load_head(name, target)
    quantize_for(head, target, bits)
    if target is not None and check:
        warning = head_warning(head, target)
        if warning is not None:
            warnings.warn(warning, HeadWarning, stacklevel=2)
    return head


def head_warning(head: DraftHead, target: Target, progress: bool = False) -> str | None:
    """Return a one-line warning about a head that hardly drafts for its target, else None.

    Never raises; if the rounds cannot be run, the warning says so.
    """
    try:
        trial = try_out(head, target, progress)
    except TargetError:
        return None  # decoding with this target will raise the same error
    except Exception as e:  # whatever it is, it must not stop a head that works
        return f"the head could not be tried on its target: {type(e).__name__}: {' '.join(str(e).split())}"
    return warning_of(trial, head.named_layers)


def try_out(head: DraftHead, target: Target, progress: bool = False) -> HeadTrial:
    """Decode the built-in prompts greedily with drafts, ignoring stop tokens. Does not change random state."""
    rows = 1
    with suppress(TargetError):
        check_cacheable(target.model, len(PROMPTS))
        rows = len(PROMPTS)
    engine = Engine(target, HeadProposer(head), policy=FixedPolicy(DEPTH), max_batch=rows)
    params = SamplingParams(max_tokens=TOKENS, ignore_eos=True, seed=0)
    requests = [engine.prepare(prompt, params) for prompt in trial_prompts(target)]
    for request in requests:
        engine.submit(request)
    whole = sum(request.limit for request in requests)
    with progress_bar(total=whole, desc="trying the head", unit="token", disable=not progress) as bar:
        while not all(request.finish_reason for request in requests):
            engine.step()
            bar.update(sum(len(request.tokens) for request in requests) - bar.n)
    outputs = [engine.output(request) for request in requests]
    if errors := [output.error for output in outputs if output.error is not None]:
        raise EagleError(errors[0])
    rounds = sum(sum(output.drafted_by_position[1:2]) for output in outputs)
    first, both = (sum(sum(output.accepted_by_position[at : at + 1]) for output in outputs) for at in (0, 1))
    return HeadTrial(rounds, min(first, rounds), both)  # a text's last round may have drafted only one token


def warning_of(trial: HeadTrial, layers: tuple[int, ...] = ()) -> str | None:
    """Return the warning for a trial, if any; `layers` are those that the head reads."""
    if trial.both >= BOUND * trial.rounds:
        return None
    share, both = trial.first / trial.rounds, trial.both / trial.rounds
    seen = f"in {trial.rounds} rounds the target accepted {share:.0%} of first draft tokens, and two in {both:.0%}"
    if share >= SOUND:
        return (
            f"{seen}: good at depth 1 and poor after it. Likely causes: norm_output (the input of the next draft step) "
            "differs from training; or the head was trained for one step and should draft one token"
        )
    read = f" (it reads the outputs of layers {', '.join(map(str, layers))}, counted from 0)" if layers else ""
    return (
        f"{seen}; heads that fit reach {SOUND:.0%} to 90%, and more than half as many pairs. Likely causes: layer ids "
        f"in another convention or order{read}; norm_before_residual or another norm flag differs from training; the "
        "head was trained for another model, fine-tune or quantization; hardly any training. The text stays correct, "
        "but is not faster"
    )


def trial_prompts(target: Target) -> list[list[int]]:
    """Return the prompts' token ids; arbitrary ids without a tokenizer."""
    longest = max(1, target.context_length - TOKENS - 1)
    if target.tokenizer is None:
        return [[(11 + 31 * row + 17 * i) % target.vocab_size for i in range(16)] for row in range(len(PROMPTS))]
    return [_encode(target, text)[-longest:] for text in PROMPTS]


def _encode(target: Target, text: str) -> list[int]:
    """Encode a user's turn, or the plain text if the chat template is missing or fails."""
    with suppress(Exception):  # templates are programs and may raise anything
        return encode(target, [{"role": "user", "content": text}])
    return encode(target, text)
