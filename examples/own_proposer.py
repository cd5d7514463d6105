"""Draft with your own proposer: after each token, guess the one that most often follows it in this file.

The target verifies every draft, so even this simple guess cannot change the text; the program checks that.
docs/write-a-proposer.md explains the methods. Run it in the folder of the repository: python examples/own_proposer.py
"""

from collections import Counter
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path

import eagle_mlx as em  # before mlx.core

import mlx.core as mx  # isort: skip
from eagle_mlx.decoding.draft import Draft
from eagle_mlx.plan import Plan
from eagle_mlx.proposers.base import Observation, Proposer, ProposerState


class Bigrams(Proposer):
    name = "bigrams"

    def bind(self, target: em.Target) -> None:
        assert target.tokenizer is not None
        pairs = Counter(pairwise(target.tokenizer.encode(Path(__file__).read_text())))
        self.following = {first: second for (first, second), _ in reversed(pairs.most_common())}

    def open(self, prompts: Sequence[Sequence[int]]) -> ProposerState:
        return BigramState(self.following, [prompt[-1] for prompt in prompts])


class BigramState(ProposerState):
    def __init__(self, following: dict[int, int], newest: list[int]):
        self.following, self.newest = following, newest  # the newest token of each row

    def draft(self, plan: Plan, sampling: object, positions: mx.array) -> Draft:
        rows = [[token] for token in self.newest]
        for row in rows * plan.depth:
            row.append(self.following.get(row[-1], row[-1]))
        return Draft(mx.array(rows)[:, 1:], mx.array([plan.depth] * len(rows)))

    def observe(self, seen: Observation) -> None:
        self.newest = [new[-1] if new else old for new, old in zip(seen.tokens, self.newest, strict=True)]

    def append(self, other: "BigramState") -> None:
        self.newest += other.newest

    def remove(self, row: int) -> None:
        self.newest[row] = self.newest[-1]  # the last row takes its place
        self.newest.pop()


if __name__ == "__main__":
    target, prompt = em.load_target("checkpoints/target"), "def median(data):\n    data = sorted(data)\n"
    output = em.Engine(target, Bigrams(), policy=em.FixedPolicy(2)).generate(prompt)
    assert output.tokens == em.Engine(target).generate(prompt).tokens
    print(f"{prompt}{output.text}\n[{output.accepted} of {output.drafted} drafts accepted, and the text is unchanged]")
