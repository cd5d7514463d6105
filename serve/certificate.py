"""`eagle-heads certify` and `show`: the certificate of a head, with figures for one target and hashes of all inputs."""

from __future__ import annotations

import hashlib
import json
import math
import sys
from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from datetime import date
from pathlib import Path
from typing import TYPE_CHECKING, Any

import eagle_mlx as em
from eagle_mlx import hub
from eagle_mlx.errors import ConfigError, EagleError
from eagle_mlx.files import check_file
from eagle_mlx.machine import describe
from eagle_mlx.paired import Decoded, tau, tau_interval
from eagle_mlx.progress import counted, progress_bar, show_step

from .bench.report import TextComparison, write_json
from .head_choice import load_head
from .head_options import Answers, Certify, Show

if TYPE_CHECKING:
    from eagle_mlx.engine.cost_curve import Curve
    from eagle_mlx.judge import Recording

    from .prompts import Question

TEMPERATURES = (0.0, 1.0)
TEXTS = 24  # the most texts that are decoded with the head, spread over the prompts: three batches of eight
ALL = "all"


@dataclass(frozen=True)
class Acceptance:
    """τ over the answers to the prompts of one category, at one temperature."""

    temperature: float
    category: str
    tau: float
    interval: float | None  # half-width of the 95 % interval over prompts; None for fewer than six
    answers: int
    left_out: int  # prompts that were left out because the target's answer loops

    def __str__(self) -> str:
        interval = "" if self.interval is None else f" ± {self.interval:.3f}"
        left_out = f", {self.left_out} left out as loops" if self.left_out else ""
        return f"{self.tau:.3f}{interval} ({counted(self.answers, 'answer')}{left_out})"

    def against(self, old: Acceptance) -> str:
        """Return how τ compares with an older measurement: higher, lower, or not told apart."""
        if self.interval is None or old.interval is None or abs(self.tau - old.tau) <= self.interval + old.interval:
            return "not told apart"
        return "higher" if self.tau > old.tau else "lower"


@dataclass(frozen=True)
class Certificate:
    """Measurements of a head, with its target and machine. Names are hub ids, or names without local paths."""

    date: str
    head: str
    head_sha256: str  # of its files of weights
    head_precision: str  # while it was measured
    target: str
    target_fingerprint: str
    prompts: list[str]
    prompts_sha256: str  # of their tokens
    depth: int
    max_tokens: int
    texts: TextComparison  # greedy texts decoded with the head, compared with plain decoding
    acceptance: list[Acceptance]
    cost_curve: Curve | None  # seconds of a target forward by number of tokens
    eagle_mlx: str
    machine: dict[str, Any]

    @property
    def values(self) -> dict[str, object]:
        curve = [f"{size}: {1000 * seconds:.2f} ms" for size, seconds in self.cost_curve or ()]
        shown = dict(vars(self))
        parts = {f"tau at temperature {part.temperature:g}, {part.category}": part for part in shown.pop("acceptance")}
        shown |= parts | shown.pop("machine")
        shown["prompts"] = ", ".join(self.prompts)
        shown["texts"] = "{identical} identical, {excused} tied, {different} different".format(**vars(self.texts))
        shown["cost_curve"] = ", ".join(curve) or "unknown"
        return {name.replace("_", " "): value for name, value in shown.items()}

    def changes(self, old: Certificate) -> list[str]:
        """Return a line for each value that differs from an older certificate's, except the date."""
        before, after, lines = old.values, self.values, list[str]()
        for name in before | after:
            was, now = before.get(name, "none"), after.get(name, "none")
            if was != now and name != "date":
                line = f"{name}: {was} -> {now}"
                if isinstance(was, Acceptance) and isinstance(now, Acceptance):
                    line += f", {now.against(was)}"
                lines.append(line)
        return lines

    def __str__(self) -> str:
        return "\n".join(f"{name:32} {value}" for name, value in self.values.items())


def read_certificate(file: Path) -> Certificate | None:
    """Return the certificate in a file, or None without a file. Raises ConfigError if it is something else."""
    try:
        content = json.loads(file.read_text(encoding="utf-8"))
        content["texts"] = TextComparison(**content["texts"])
        content["acceptance"] = [Acceptance(**part) for part in content["acceptance"]]
        certificate = Certificate(**content)
        str(certificate)  # raises an error for values of other types
    except FileNotFoundError:
        return None
    except (OSError, ValueError, TypeError, KeyError, AttributeError) as e:
        raise ConfigError(f"{file} is not a certificate of this version; move it away, and certify again") from e
    return certificate


def certify(options: Certify) -> int:
    """Measure a head and write its certificate; return the exit status, 1 if a text differs. Raises EagleError."""
    from eagle_mlx.heads.precision import described  # mlx-lm waits until a model is loaded
    from eagle_mlx.target import fingerprint

    from .comparison import files_of, load_prompts

    answers = options.answers
    folder = hub.head_folder(options.head)
    file = options.output or folder / hub.CERTIFICATE
    check_file(file)
    old = read_certificate(file)
    target, questions, prompts = load_prompts(options.target, answers)
    head = load_head(options.head, target, answers.head_bits)
    answers.loading.wire_active()
    texts, acceptance = measure(target, em.HeadProposer(head), questions, prompts, answers)
    certificate = Certificate(
        date=date.today().isoformat(),
        head=hub.public_name(options.head),
        head_sha256=hub.weights_digest(folder),
        head_precision=described(head),
        target=hub.public_name(target.name),
        target_fingerprint=fingerprint(target),
        prompts=[path.name for path in files_of(answers)],
        prompts_sha256=hashlib.sha256(json.dumps(prompts).encode()).hexdigest(),
        depth=answers.depth,
        max_tokens=answers.max_tokens,
        texts=texts,
        acceptance=acceptance,
        cost_curve=em.learn_costs(target),
        eagle_mlx=em.__version__,
        machine=asdict(describe()),
    )
    write_json(asdict(certificate), file)
    print(certificate)
    if old is not None:
        other = "" if old.head_sha256 == certificate.head_sha256 else " was of other weights, and"
        changes = certificate.changes(old) or ["nothing"]
        print(f"\nthe certificate of {old.date}{other} is replaced; changed:", *changes, sep="\n  ")
    print(f"written to {file}", file=sys.stderr)
    return 1 if texts.different else 0


def measure(
    target: em.Target,
    proposer: em.HeadProposer,
    questions: Sequence[Question],
    prompts: Sequence[list[int]],
    answers: Answers,
) -> tuple[TextComparison, list[Acceptance]]:
    """Compare greedy texts with plain decoding, and measure τ. Raises EagleError if all answers loop."""
    from eagle_mlx.judge import draft_along, record

    proposer.bind(target)
    texts: list[Recording] = []
    acceptance, total = list[Acceptance](), len(TEMPERATURES) * len(prompts)
    with progress_bar(total=total, desc="certifying", unit="answer", disable=answers.quiet) as bar:
        for temperature in TEMPERATURES:
            params, left_out = em.SamplingParams(temperature, max_tokens=answers.max_tokens), Counter[str]()
            decoded = defaultdict[str, list[Decoded]](list)
            recordings = record(target, proposer.aux_layers, prompts, params)
            for question, recording in zip(questions, recordings, strict=True):
                categories = {ALL, question.category or ALL}
                if recording is None:
                    left_out.update(categories)
                else:
                    drafting = draft_along(proposer, recording, answers.depth, target)
                    for category in categories:
                        decoded[category].append(drafting.decoded)
                    if temperature == 0:
                        texts.append(replace(recording, states={}))
                bar.update()
            if not decoded:
                raise EagleError(f"the target's answers to all {len(prompts)} prompts loop; use other prompts")
            acceptance += [
                Acceptance(temperature, category, tau(parts), tau_interval(parts), len(parts), left_out[category])
                for category, parts in sorted(decoded.items())
            ]
        show_step(bar, "comparing texts", first=True)
        spread = texts[:: math.ceil(len(texts) / TEXTS)]
        return identity(target, proposer, spread, answers.depth), acceptance


def identity(target: em.Target, proposer: em.HeadProposer, texts: Sequence[Recording], depth: int) -> TextComparison:
    """Decode recorded greedy answers again with a proposer, and compare the texts."""
    from .bench.measure import compare

    params = [recording.params for recording in texts]
    prompts = [list(recording.text[: recording.answer]) for recording in texts]
    expected = [recording.text[recording.answer :] for recording in texts]
    outputs = em.Engine(target, proposer=proposer, policy=em.FixedPolicy(depth)).generate(prompts, params)
    tokens = [output.tokens for output in outputs]
    return compare(target, prompts, expected, tokens, params)


def show(options: Show) -> int:
    """Print a head's certificate; return the exit status, 1 if there is none for its weights. Raises EagleError."""
    name = options.head
    folder = hub.head_folder(name)
    certificate = read_certificate(folder / hub.CERTIFICATE)
    if certificate is None:
        print(f"{name} has no certificate; to make one: eagle-heads certify {name} --target MODEL", file=sys.stderr)
        return 1
    print(certificate)
    if certificate.head_sha256 == hub.weights_digest(folder):
        return 0
    print(f"warning: the certificate is of other weights; certify {name} again", file=sys.stderr)
    return 1
