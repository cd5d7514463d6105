"""Whether a head drafts for its target at all: a few real rounds when the two meet."""

from __future__ import annotations

import warnings
from dataclasses import dataclass
from pathlib import Path

from eagle_mlx import heads
from eagle_mlx.cache import check_cacheable
from eagle_mlx.engine import Engine
from eagle_mlx.errors import EagleError, HeadWarning, TargetError
from eagle_mlx.heads.base import DraftHead
from eagle_mlx.heads.load import named_layers
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
TOKENS = 64
"""Tokens that are decoded for each prompt."""
DEPTH = 2
SOUND = 0.4
"""The first draft token of the weakest heads that fit is accepted in so many rounds, of good ones in up to 0.9."""
BOUND = 0.11
"""A head counts as one of chance where fewer rounds accept both of two draft tokens.

A head to which the hidden states say nothing still sees the last token, and foresees the next in 1 to 25 of 100 rounds,
two in at most 5. The weakest that fit foresee one in 40 and two in 20. Between shares p < q both errors are equally
likely at 1 / (1 + log(q / p) / log((1 - p) / (1 - q))): 0.11 here. One token alone would not tell: on text that is easy
to foresee, a head with its layers in the wrong order reaches 0.3, and a good one on hard text no more. A head with a
norm for each layer may do well enough with them in the wrong order to go unnoticed: the included one has 15 in 100."""


@dataclass(frozen=True)
class Trial:
    """What came of the rounds."""

    rounds: int
    """Rounds that had two draft tokens."""
    first: int
    """Of these, the ones in which the first was accepted."""
    both: int


def load_head(name: str | Path, target: Target | None = None, check: bool = True, bits: int | None = None) -> DraftHead:
    """Load a head from a folder or a hub id, and with a target see that it fits and that it drafts.

    `bits` quantises its large matrices: 4 or 8, or 16 to leave it as it is. By default they are quantised where most of
    the target is, in as few bits. A head that is quantised on disk stays as it is there.

    A head that fits and yet drafts next to nothing is a HeadWarning that names the likely causes. To find out, four
    answers of 64 tokens are decoded side by side: at most 64 forwards of the target behind the one that reads the
    prompts, about 30 with a good head (four times as many with the few models that decode one row at a time). With
    `check=False` nothing is decoded. Raises CheckpointError for files that cannot be read, HeadError for a head of
    another target, ConfigError for other `bits`.
    """
    check_bits(bits)
    head = heads.load_head(name, target)
    quantize_for(head, target, bits)
    if target is not None and check:
        said = head_warning(head, target)
        if said is not None:
            warnings.warn(said, HeadWarning, stacklevel=2)
    return head


def head_warning(head: DraftHead, target: Target, progress: bool = False) -> str | None:
    """Return one line on a head that hardly drafts for its target; None for one that does.

    Never raises: if the rounds cannot be run, the line says that.
    """
    try:
        trial = try_out(head, target, progress)
    except TargetError:
        return None  # a target that cannot be drafted for says so itself, to whoever decodes with it
    except Exception as e:  # whatever it is, a head that works is not to fail for it
        return f"the head could not be tried on its target: {type(e).__name__}: {' '.join(str(e).split())}"
    return warning_of(trial, named_layers(head))


def try_out(head: DraftHead, target: Target, progress: bool = False) -> Trial:
    """Decode the built-in prompts greedily with drafts, past every end of text. Leaves no random state changed."""
    engine = Engine(target, HeadProposer(head), policy=FixedPolicy(DEPTH), max_batch=_rows(target))
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
    failed = next((output.error for output in outputs if output.error is not None), None)
    if failed is not None:
        raise EagleError(failed)
    rounds = sum(sum(output.drafted_by_position[1:2]) for output in outputs)
    first, both = (sum(sum(output.accepted_by_position[at : at + 1]) for output in outputs) for at in (0, 1))
    return Trial(rounds, min(first, rounds), both)  # the last round of a text may have had one draft token alone


def warning_of(trial: Trial, layers: tuple[int, ...] = ()) -> str | None:
    """The warning that a trial deserves, if any; `layers` are those that the head reads."""
    if trial.both >= BOUND * trial.rounds:
        return None
    share, both = trial.first / trial.rounds, trial.both / trial.rounds
    seen = f"in {trial.rounds} rounds the target accepted {share:.0%} of first draft tokens, and two in {both:.0%}"
    if share >= SOUND:
        return (
            f"{seen}: right at depth 1 and poor behind it. Likely causes: norm_output, which says what the next draft "
            "step reads, unlike in training; or a head trained for one step, which should draft one token"
        )
    read = f" (read are the outputs of {', '.join(map(str, layers))}, counted from 0)" if layers else ""
    return (
        f"{seen}; of heads that fit it accepts {SOUND:.0%} to 90% and more than half as many pairs. Likely causes: "
        f"layer ids in the other convention or order{read}; norm_before_residual or another norm flag unlike in "
        "training; a target that is another model, fine-tune or quantisation than the head was trained for; hardly any "
        "training. The text stays right, but comes no sooner"
    )


def _rows(target: Target) -> int:
    """As many rows as there are prompts, or one where the model decodes no more."""
    try:
        check_cacheable(target.model, len(PROMPTS))
    except TargetError:
        return 1
    return len(PROMPTS)


def trial_prompts(target: Target) -> list[list[int]]:
    """The prompts' token ids; without a tokenizer just some ids."""
    longest = max(1, target.context_length - TOKENS - 1)
    if target.tokenizer is None:
        return [[(11 + 31 * row + 17 * i) % target.vocab_size for i in range(16)] for row in range(len(PROMPTS))]
    return [_encode(target, text)[-longest:] for text in PROMPTS]


def _encode(target: Target, text: str) -> list[int]:
    """A text as a turn of a conversation, or as it is where the target's chat template has no place for it."""
    if target.tokenizer is not None and target.tokenizer.has_chat_template:
        try:
            return encode(target, [{"role": "user", "content": text}])
        except Exception:  # templates are programs, and fail as programs do
            return encode(target, text)
    return encode(target, text)
