"""Replay greedy texts with draft windows of several sizes: τ and CPU time of a round by context length.

    python benchmarks/draft_windows.py --target out/real/smollm2-135m-instruct \
      --head checkpoints/smollm2-135m-instruct --filler 512 2000 7000 --windows 512 1024

The target reads each prompt and writes its answer once. The head then drafts chains in the rounds of real decoding,
once for each window: greedy text does not depend on drafts. Relative speed is τ by the CPU time of a verify, measured
at that length, and of the head's drafts. Answers that loop are left out.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median
from typing import Any

import eagle_mlx as em

# isort: split
# After eagle_mlx, which must be imported before MLX so that MLX gets OpenBLAS.
import mlx.core as mx

from eagle_mlx.cache import RaggedCache
from eagle_mlx.decoding.sampling import SamplingBatch
from eagle_mlx.machine import describe
from eagle_mlx.plan import PREFILL_CHUNK, Plan
from eagle_mlx.proposers.base import Observation
from eagle_mlx.serve.prompts import read_questions, with_filler
from eagle_mlx.target import Target
from eagle_mlx.text import is_loop

GREEDY = SamplingBatch.of([em.SamplingParams()], [0])


@dataclass(frozen=True)
class Text:
    """A prompt and its greedy answer, with what a head reads at each position."""

    tokens: list[int]
    prompt: int  # tokens of the prompt
    aux: tuple[mx.array, ...]  # each [1, L, H]
    verify: float  # CPU seconds of a forward over a draft of this depth, at the end

    def observation(self, start: int, stop: int) -> Observation:
        return Observation([self.tokens[start + 1 : stop + 1]], tuple(x[:, start:stop] for x in self.aux))


def written(target: Target, prompt: Sequence[int], layers: Sequence[int], count: int, depth: int) -> Text:
    cache, tokens, parts = RaggedCache.of(target.model, 1), list(prompt), []
    read = 0
    while len(tokens) < len(prompt) + count:
        chunk = tokens[read : read + PREFILL_CHUNK]
        out = target.forward(mx.array([chunk]), cache, layers, [len(chunk) - 1])
        cache.advance(len(chunk))
        parts.append(out.aux)
        mx.eval(out.logits, out.aux, cache.state)
        read += len(chunk)
        if read == len(tokens):
            tokens.append(int(mx.argmax(out.logits[0, -1]).item()))
            if tokens[-1] in target.eos_token_ids:
                break
    aux = tuple(mx.concatenate(list(x), axis=1) for x in zip(*parts, strict=True))
    verifies = []
    for _ in range(5):
        begin = time.process_time()
        mx.eval(target.forward(mx.array([tokens[-depth - 1 :]]), cache, layers).logits)
        verifies.append(time.process_time() - begin)
    return Text(tokens, len(prompt), aux, median(verifies))


def replayed(proposer: em.HeadProposer, text: Text, depth: int) -> dict[str, Any]:
    """Return the tokens and rounds of an answer, and the CPU seconds of a draft with the read before it."""
    state, known, drafts, rounds = proposer.open([[]]), text.prompt + 1, [], 0
    for start in range(0, text.prompt, PREFILL_CHUNK):
        state.prefill(text.observation(start, min(start + PREFILL_CHUNK, text.prompt)))
    end = len(text.tokens) - 1
    while known < end:
        begin = time.process_time()
        draft = state.draft(Plan(min(depth, end - known)), GREEDY, mx.array([known])).tokens[0].tolist()
        drafts.append(time.process_time() - begin)
        wanted = text.tokens[known : known + len(draft)]
        kept = next((i for i, pair in enumerate(zip(draft, wanted, strict=True)) if pair[0] != pair[1]), len(draft))
        state.observe(text.observation(known - 1, known + kept))
        known, rounds = known + kept + 1, rounds + 1
    return {"tokens": known - text.prompt - 1, "rounds": rounds, "draft": median(drafts), "verify": text.verify}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--target", required=True, help="folder or hub id of the model")
    parser.add_argument("--head", required=True, help="folder or hub id of its head")
    parser.add_argument("--prompts", type=Path, default=Path("checkpoints/questions.jsonl"), help="jsonl (%(default)s)")
    parser.add_argument("--filler", type=int, nargs="+", default=[512, 2000], help="tokens before each prompt")
    parser.add_argument("--windows", type=int, nargs="+", default=[512], help="windows to compare with none")
    parser.add_argument("--sinks", type=int, nargs="+", default=[4], help="sinks of these windows (%(default)s)")
    parser.add_argument("--limit", type=int, default=8, help="questions, spread evenly (%(default)s)")
    parser.add_argument("--max-tokens", type=int, default=96, help="tokens of an answer (%(default)s)")
    parser.add_argument("--depth", type=int, default=4, help="draft tokens per round (%(default)s)")
    parser.add_argument("--json", type=Path, help="write all counts")
    args = parser.parse_args()
    target = em.load_target(args.target)
    head = em.load_head(args.head, target, check=False)
    windows = {"off": (0, None), **{f"{n}+{s}": (n, s) for n in args.windows for s in args.sinks}}
    proposers = {name: em.HeadProposer(head, *window) for name, window in windows.items()}
    for proposer in proposers.values():
        proposer.bind(target)
    print(describe(), flush=True)
    results: dict[int, list[dict[str, Any]]] = {}
    for filler in args.filler:
        results[filler] = rows = []
        for question in with_filler(read_questions(args.prompts, args.limit), target, filler):
            prompt = question.encode(target, max_tokens=args.max_tokens)
            text = written(target, prompt, head.aux_layers, args.max_tokens, args.depth)
            if is_loop(text.tokens[len(prompt) :]) or len(text.tokens) < len(prompt) + 8:
                continue
            rows.append({name: replayed(proposer, text, args.depth) for name, proposer in proposers.items()})
            print(f"{filler:6,} tokens of text, {len(rows)} answers: {summary(rows)}", flush=True)
    if args.json:
        args.json.write_text(json.dumps({"machine": asdict(describe()), "results": results}, indent=1))


def summary(rows: Sequence[dict[str, Any]]) -> str:
    """Return τ, milliseconds of a draft, and speed relative to no window, by window."""
    parts, base = [], 0.0
    for name in rows[0]:
        tau = sum(row[name]["tokens"] for row in rows) / sum(row[name]["rounds"] for row in rows)
        draft, verify = (median(row[name][part] for row in rows) for part in ("draft", "verify"))
        speed = tau / (draft + verify)
        base = base or speed
        parts.append(f"{name} τ {tau:.2f}, draft {1e3 * draft:.0f} ms, speed {speed / base:.2f}")
    return "; ".join(parts) + f"; verify {1e3 * verify:.0f} ms"


if __name__ == "__main__":
    main()
