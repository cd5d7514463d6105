"""How often the judge of heads errs, and how many prompts it needs: simulated from recorded rounds of a real head.

    python benchmarks/judge.py
    python benchmarks/judge.py --target checkpoints/target --head checkpoints/head \\
        --prompts checkpoints/prompts.jsonl --record 100

A simulated conversation has the rounds of a recorded one, drawn again with replacement, for each of two heads. A head
that is better or worse than the other accepts one draft token more or fewer in a share of its rounds. `--record`
decodes prompts and writes their rounds into `judge_rounds.json`.
"""

from __future__ import annotations

import argparse
import json
from collections import Counter
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

import eagle_mlx as em
from eagle_mlx.judge import Judge
from eagle_mlx.paired import Decoded, Verdict, gain_of
from eagle_mlx.serve.prompts import read_questions

ROUNDS = Path(__file__).with_name("judge_rounds.json")
DEPTH = 4
TOKENS = 128
SPREAD = 0.05
TRIALS = 200
SIZES = (8, 20, 40, 80, 160)


@dataclass(frozen=True)
class World:
    """Recorded conversations: for each, the draft tokens that its rounds accepted."""

    conversations: list[NDArray[np.int64]]

    @classmethod
    def read(cls, file: Path = ROUNDS) -> World:
        rows = json.loads(file.read_text(encoding="utf-8"))["accepted"]
        return cls([np.array([int(digit) for digit in row]) for row in rows])

    def pair(
        self, count: int, rng: np.random.Generator, effect: float = 0.0, spread: float = SPREAD, tokens: int = TOKENS
    ) -> tuple[list[Decoded], list[Decoded]]:
        """Return two heads' counts over `count` conversations.

        effect: the gain in τ of the second, 0.03 for 3 %. In each conversation, one of the two, at random, also gains
        or loses `spread` times a draw from Student's t with three degrees of freedom, which has heavy tails.
        """
        pairs = []
        for picked in rng.integers(len(self.conversations), size=count):
            rounds = self.conversations[picked]
            accepted = [rng.choice(rounds, tokens) for _ in range(2)]
            for head, gain in ((rng.integers(2), spread * float(rng.standard_t(3))), (1, effect)):
                accepted[head] = _changed(accepted[head], gain, rng)
            pairs.append([_decoded(part, tokens) for part in accepted])
        first, second = zip(*pairs, strict=True)
        return list(first), list(second)


def _changed(accepted: NDArray[np.int64], gain: float, rng: np.random.Generator) -> NDArray[np.int64]:
    """Add or take one accepted token in so many rounds that τ changes by the factor 1 + gain, as far as possible."""
    free = accepted < DEPTH if gain > 0 else accepted > 0
    share = abs(gain) * (1 + accepted.mean()) / max(free.mean(), 1e-9)
    changed: NDArray[np.int64] = accepted + (1 if gain > 0 else -1) * (free & (rng.random(len(accepted)) < share))
    return changed


def _decoded(accepted: NDArray[np.int64], tokens: int) -> Decoded:
    return Decoded(tokens, 1 + int(np.searchsorted(np.cumsum(accepted + 1), tokens)))


def verdicts(world: World, count: int, effect: float, trials: int = TRIALS) -> Counter[Verdict]:
    """Return how often the second head is judged better, worse, or not told apart in so many comparisons."""
    rng = np.random.default_rng(count)
    seen = [gain_of(*world.pair(count, rng, effect)).verdict for _ in range(trials)]
    return Counter(seen)


def record(target: str, head: str, prompts: Path, count: int) -> None:
    loaded = em.load_target(target)
    judge = Judge(loaded, em.HeadProposer(em.load_head(head, loaded)), em.NgramProposer(), DEPTH)
    questions = [question.encode(loaded) for question in read_questions(prompts, count)]
    judge.compare(questions, em.SamplingParams(max_tokens=TOKENS))
    rows = ["".join(map(str, first.accepted)) for first, _ in judge.drafted]
    about = {"head": Path(head).name, "prompts": prompts.name, "depth": DEPTH, "tokens": TOKENS}
    ROUNDS.write_text(json.dumps({**about, "accepted": rows}, indent=0) + "\n", encoding="utf-8")


def report(world: World) -> None:
    print("| prompts | tokens | equal: better | equal: worse | 5 % worse: better | 3 % better: better | 10 %: better |")
    print("|---|---|---|---|---|---|---|")
    for count in SIZES:
        equal, worse, better, much = (verdicts(world, count, effect) for effect in (0.0, -0.05, 0.03, 0.1))
        cells = (equal["better"], equal["worse"], worse["better"], better["better"], much["better"])
        print(f"| {count} | {count * TOKENS:,} | {' | '.join(f'{cell / TRIALS:.1%}' for cell in cells)} |")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--target")
    parser.add_argument("--head")
    parser.add_argument("--prompts", type=Path)
    parser.add_argument("--record", type=int, metavar="N", help="decode N prompts and write their rounds")
    given = parser.parse_args()
    if given.record:
        record(given.target, given.head, given.prompts, given.record)
    report(World.read())


if __name__ == "__main__":
    main()
