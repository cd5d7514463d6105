"""What a memory of texts gains on work that repeats: replayed texts, and extraction jobs decoded for real.

    python benchmarks/agents.py --target out/real/smollm2-135m-instruct
    python benchmarks/agents.py --target out/real/smollm2-135m-instruct \\
        --head checkpoints/smollm2-135m-instruct --decode 60
    git clone https://github.com/SWE-agent/SWE-agent out/SWE-agent
    python benchmarks/agents.py --target out/real/smollm2-135m-instruct --sessions out/SWE-agent

A replay asks the real proposer and the real policy in each round and compares drafts with the recorded answer. Time
comes from a cost curve of forwards; a head accepts at random, as often as measured. `make_workloads.py` made the texts.
"""

from __future__ import annotations

import argparse
import gzip
import json
import time
from dataclasses import dataclass, field
from itertools import groupby
from pathlib import Path
from random import Random
from typing import Any

import numpy as np

import eagle_mlx as em
from eagle_mlx.plan import MATCH, Abilities, Context, RoundResult
from eagle_mlx.proposers.ngram import MIN_NGRAM

TEXTS = Path(__file__).with_name("workloads.jsonl.gz")
CURVE = {1: 46, 2: 51, 3: 55, 4: 64, 5: 71, 8: 78, 16: 95, 32: 138}
"""Milliseconds of a forward of SmolLM2-135M in float32 by tokens, on two cores of an AMD EPYC."""
DRAFT_MS = 3.7
"""Milliseconds of a step of its head."""
ACCEPTED = (0.55, 0.55, 0.53, 0.56, 0.56, 0.6, 0.67, 0.67)
"""The share of its drafts that were accepted at each position after all before, on Spec-Bench (chains of seven in
benchmarks/results/real-model.md)."""


AFTER = {"retried": "extraction", "one task tried again": "sessions of different tasks"}
"""Kinds of texts that are decoded after those of another kind, whose memory they have."""
PREFIX_BYTES = 1 << 28
"""A server has a prefix cache too. Jobs of one template share two thirds of their prompts."""


@dataclass(frozen=True)
class Text:
    kind: str
    prompt: list[int]
    answer: list[int]


@dataclass
class Replay:
    """Decodes texts that are known, one after the other, with a clock that follows the cost curve."""

    ngrams: em.NgramProposer
    head: bool
    policy: em.ThroughputPolicy = field(default_factory=lambda: em.ThroughputPolicy(curve=_seconds()))
    rng: Random = field(default_factory=lambda: Random(0))
    seconds: float = 0.0
    tokens: int = 0

    @property
    def speed(self) -> float:
        """Tokens per second, relative to plain decoding."""
        return self.tokens * forward_ms(1) / 1000 / self.seconds

    def decode(self, text: Text) -> None:
        state = self.ngrams.open([text.prompt])
        state.enter([""])
        [row] = state.rows
        at = 0
        while at < len(text.answer):
            sources = (MATCH * row.length,) if row.match else ()
            plan = self.policy.plan(Context(1, Abilities(model=self.head), sources=sources))
            left = text.answer[at:]
            if not plan.lookups:
                drafted, ms = plan.depth, plan.depth * DRAFT_MS
                misses = (place for place in range(drafted) if self.rng.random() >= ACCEPTED[place])
                accepted = min(next(misses, drafted), len(left))
            else:
                draft, ms = row.match[: plan.size], 0.0
                drafted = len(draft)
                pairs = enumerate(zip(draft, left, strict=False))
                accepted = next((place for place, (a, b) in pairs if a != b), min(drafted, len(left)))
            taken = min(accepted + 1, len(left))
            seconds = (ms + forward_ms(1 + drafted)) / 1000
            row.extend(left[:taken])
            self.policy.observe(RoundResult(plan, [drafted], [accepted], [taken], seconds=seconds, trials=row.ended()))
            at += taken
            self.seconds += seconds
            self.tokens += taken
        if self.ngrams.memory is not None:
            self.ngrams.memory.add([*text.prompt, *text.answer])


def forward_ms(tokens: int) -> float:
    return float(np.interp(tokens, list(CURVE), list(CURVE.values())))


def _seconds() -> list[tuple[int, float]]:
    return [(tokens, ms / 1000) for tokens, ms in CURVE.items()]


def read(path: Path, tokenizer: Any) -> list[Text]:
    with gzip.open(path, "rt", encoding="utf-8") as file:
        rows = [json.loads(line) for line in file]
    end = [tokenizer.eos_token_id]
    return [Text(row["kind"], chat(row["prompt"], tokenizer), [*tokenizer.encode(row["answer"]), *end]) for row in rows]


def chat(prompt: str, tokenizer: Any) -> list[int]:
    return rendered([{"role": "user", "content": prompt}], tokenizer)


def rendered(messages: list[dict[str, str]], tokenizer: Any) -> list[int]:
    return list(tokenizer.apply_chat_template(messages, add_generation_prompt=True))


def sessions(folder: Path, tokenizer: Any) -> dict[str, list[Text]]:
    """Return the answers of recorded sessions (SWE-agent's `.traj` files), each with all that was before it.

    Files of the same name are sessions of one task, so there are different tasks, and a task tried again.
    """
    first, again, names = list[Text](), list[Text](), set[str]()
    for path in sorted(folder.rglob("*.traj")):
        texts = again if path.name in names else first
        names.add(path.name)
        messages: list[dict[str, str]] = []
        for turn in json.loads(path.read_text("utf-8"))["history"]:
            message = {"role": turn["role"], "content": written(turn)}
            if turn["role"] == "assistant":
                answer = [*tokenizer.encode(message["content"]), tokenizer.eos_token_id]
                texts.append(Text(path.name, rendered(messages, tokenizer), answer))
            messages.append(message)
    return {"sessions of different tasks": first, "one task tried again": again}


def written(turn: dict[str, Any]) -> str:
    """Return a message as text, with its calls as most models write them."""
    content = turn["content"] or ""
    parts = [content] if isinstance(content, str) else [part["text"] for part in content]
    for call in turn.get("tool_calls") or ():
        name, arguments = call["function"]["name"], call["function"]["arguments"]
        parts.append(f'<tool_call>\n{{"name": "{name}", "arguments": {arguments}}}\n</tool_call>')
    return "\n".join(parts)


def proposer(memory: bool, shortest: int) -> em.NgramProposer:
    return em.NgramProposer(min_ngram=shortest, memory=em.Memory() if memory else None)


def replays(kinds: dict[str, list[Text]]) -> None:
    print("| texts | number | tokens | n-grams | with memory | head and n-grams | with memory |")
    print("|---|---|---|---|---|---|---|")
    for kind, texts in kinds.items():
        speeds = []
        for head in (False, True):
            for memory in (False, True):
                replay = Replay(proposer(memory, MIN_NGRAM if head else 1), head)
                for text in kinds.get(AFTER.get(kind, ""), ()):
                    replay.decode(text)
                replay.seconds, replay.tokens = 0.0, 0
                for text in texts:
                    replay.decode(text)
                speeds.append(f"{replay.speed:.2f}")
        count = sum(len(text.answer) for text in texts)
        print(f"| {kind} | {len(texts)} | {count} | {' | '.join(speeds)} |", flush=True)


def decode(target: em.Target, head: str, count: int) -> None:
    """Decode extraction jobs by mlx-lm, and by the default with and without a memory, job by job in turns."""
    from mlx_lm import stream_generate

    with gzip.open(TEXTS, "rt", encoding="utf-8") as file:
        jobs = [row["prompt"] for row in map(json.loads, file) if row["kind"] == "extraction"][:count]
    assert target.tokenizer is not None
    loaded = em.HeadProposer(em.load_head(head, target))
    engines = {
        name: em.Engine(
            target,
            em.HybridProposer(loaded, proposer(memory, MIN_NGRAM)),
            policy=em.ThroughputPolicy(),
            prefix_cache_bytes=PREFIX_BYTES,
        )
        for name, memory in (("default without memory", False), ("default", True))
    }
    seconds, tokens = dict.fromkeys(["mlx-lm", *engines], 0.0), 0
    for job in jobs:
        prompt = chat(job, target.tokenizer)
        began = time.perf_counter()
        stock = [part.token for part in stream_generate(target.model, target.tokenizer, prompt, max_tokens=160)]
        seconds["mlx-lm"] += time.perf_counter() - began
        tokens += len(stock)
        for name, engine in engines.items():
            began = time.perf_counter()
            output = engine.generate(prompt, em.SamplingParams(max_tokens=160))
            seconds[name] += time.perf_counter() - began
            if output.tokens != stock:
                print(f"another text with {name}")
    for name, spent in seconds.items():
        print(f"{name}: {tokens / spent:.1f} tokens/s, {seconds['mlx-lm'] / spent:.2f} of mlx-lm, prompts included")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--target", required=True, help="its tokenizer reads the texts")
    parser.add_argument("--texts", type=Path, default=TEXTS)
    parser.add_argument("--sessions", type=Path, metavar="FOLDER", help="replay SWE-agent's recorded sessions instead")
    parser.add_argument("--head")
    parser.add_argument("--decode", type=int, default=0, metavar="N", help="decode N extraction jobs (needs --head)")
    arguments = parser.parse_args()
    target = em.load_target(arguments.target)
    if arguments.decode:
        decode(target, arguments.head, arguments.decode)
    elif arguments.sessions:
        replays(sessions(arguments.sessions, target.tokenizer))
    else:
        texts = read(arguments.texts, target.tokenizer)
        replays({kind: list(group) for kind, group in groupby(texts, lambda text: text.kind)})


if __name__ == "__main__":
    main()
