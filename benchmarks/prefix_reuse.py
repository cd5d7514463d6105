"""Measure how much of a prompt is read again, and its first token's time, if an earlier prompt shares a prefix.

    python benchmarks/prefix_reuse.py
    python benchmarks/prefix_reuse.py --tokens 1000 --repeats 1
    python benchmarks/prefix_reuse.py --restart

The models are tiny and random, of four kinds. In each case, one engine reads a prompt cold, and then another that has
answered an earlier prompt reads it. The earlier request names its boundaries as the server does: after the system
prompt and after the last message. With `--restart`, the second engine has answered nothing, but has the files of one
that did. The exit status is 0 if both limits are met.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import eagle_mlx as em

# isort: split
# After eagle_mlx, which must be imported before MLX so that MLX gets OpenBLAS.
import mlx.core as mx
import mlx.nn as nn
import numpy as np
from mlx_lm.models import gemma3_text, qwen3, qwen3_next

from eagle_mlx.engine.disk import DiskTier

READ_AGAIN, FIRST_TOKEN = 0.10, 0.15
"""The bars: shares of a cold engine's tokens read, and of its time to the first token."""
VOCAB = 512
SHARED = {"vocab_size": VOCAB, "hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 4,
          "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 32, "rms_norm_eps": 1e-6,
          "rope_theta": 1e6, "max_position_embeddings": 16384}  # fmt: skip


def full() -> nn.Module:
    return qwen3.Model(qwen3.ModelArgs(model_type="qwen3", tie_word_embeddings=True, **SHARED))  # type: ignore[arg-type]


def window() -> nn.Module:
    """Return a model in which every fourth layer has full attention and the others a window of 512, like Gemma 3."""
    args = {**SHARED, "model_type": "gemma3_text", "sliding_window": 512, "sliding_window_pattern": 4}
    return gemma3_text.Model(gemma3_text.ModelArgs.from_dict(args))


def hybrid() -> nn.Module:
    """Return a model in which every fourth layer has attention and the others are gated delta nets, like Qwen3-Next."""
    args = {**SHARED, "model_type": "qwen3_next", "linear_num_value_heads": 4, "linear_num_key_heads": 2,
            "linear_key_head_dim": 32, "linear_value_head_dim": 32, "linear_conv_kernel_dim": 4, "num_experts": 0,
            "num_experts_per_tok": 1, "decoder_sparse_step": 1, "shared_expert_intermediate_size": 64,
            "moe_intermediate_size": 64, "mlp_only_layers": [], "norm_topk_prob": True, "partial_rotary_factor": 0.25,
            "full_attention_interval": 4, "tie_word_embeddings": True}  # fmt: skip
    return qwen3_next.Model(qwen3_next.ModelArgs.from_dict(args))


@dataclass(frozen=True)
class Kind:
    name: str
    model: Callable[[], nn.Module]
    kv_bits: int | None = None


KINDS = (
    Kind("full attention", full),
    Kind("quantised, 8 bits", full, 8),
    Kind("window", window),
    Kind("recurrent, hybrid", hybrid),
)


@dataclass(frozen=True)
class Case:
    """A prompt, and the earlier prompt with the boundaries that it named."""

    name: str
    earlier: list[int]
    boundaries: tuple[int, ...]
    prompt: list[int]


def cases(tokens: int, rng: np.random.Generator) -> list[Case]:
    """Return prompts of this many tokens. A turn's question has 40, and the template adds 5 before an answer."""

    def some(count: int) -> list[int]:
        return [int(token) for token in rng.integers(1, VOCAB, count)]

    question, opening = 40, some(5)
    system = some(tokens - question - len(opening))
    first = [*system, *some(question), *opening]
    ends = (len(system), len(system) + question)
    turn = 2 * question + len(opening)  # an answer without its reasoning, and the next question
    chat = first[: -turn - 2 * len(opening)]
    begun = [*chat, *opening]
    return [
        Case("next turn, thought left out", begun, (question, len(chat)), [*begun, *some(turn), *opening]),
        Case("same system prompt", first, ends, [*system, *some(question), *opening]),
    ]


@dataclass(frozen=True)
class Figures:
    read: int
    """Tokens of the prompt that were read."""
    seconds: float
    """Seconds to the first token."""
    cpu: float
    """CPU seconds of the process until then, which other load affects less."""
    tokens: list[int]


def first_token(engine: em.Engine, prompt: list[int]) -> Figures:
    row = engine.prepare(prompt, em.SamplingParams(max_tokens=4, ignore_eos=True))
    engine.submit(row)
    begin, cpu = time.perf_counter(), time.process_time()
    while not row.tokens:
        engine.step()
    seconds, cpu = time.perf_counter() - begin, time.process_time() - cpu
    while row.finish_reason is None:
        engine.step()
    return Figures(len(prompt) - row.counts.cached_tokens, seconds, cpu, row.tokens)


def measure(kind: Kind, target: em.Target, case: Case, folder: Path | None) -> tuple[Figures, Figures]:
    """Return the figures cold and then with the earlier prompt, from files if a folder is given."""

    def engine(prefixes: int) -> em.Engine:
        files = DiskTier(folder, 1 << 30, target, None, kind.kv_bits) if prefixes and folder is not None else None
        return em.Engine(target, max_batch=1, prefix_cache_bytes=prefixes, prefix_files=files, kv_bits=kind.kv_bits)

    warm = engine(1 << 30)
    earlier = warm.prepare(case.earlier, em.SamplingParams(max_tokens=32, ignore_eos=True), case.boundaries)
    warm.submit(earlier)
    while earlier.finish_reason is None:
        warm.step()
    if folder is not None:
        finish_writing(warm)
        warm = engine(1 << 30)
    figures = first_token(engine(0), case.prompt), first_token(warm, case.prompt)
    finish_writing(warm)
    return figures


def finish_writing(engine: em.Engine) -> None:
    if engine.prefixes is not None and engine.prefixes.disk is not None:
        engine.prefixes.disk.close(600)


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--tokens", type=int, default=4000, help="tokens per prompt (default 4000)")
    parser.add_argument("--repeats", type=int, default=3, help="measurements; the median counts (default 3)")
    parser.add_argument("--restart", action="store_true", help="start with another engine's files")
    names = [kind.name for kind in KINDS]
    parser.add_argument("--kind", choices=names, nargs="+", default=names, help="kinds of models (default: all)")
    args = parser.parse_args()
    print("| kind | case | read again | first token, of cold | of the CPU's time | cold |\n|---|---|---|---|---|---|")
    met = True
    for kind in (kind for kind in KINDS if kind.name in args.kind):
        mx.random.seed(0)
        target = em.Target(kind.model(), name=kind.name)
        mx.eval(target.model.parameters())
        for case in cases(args.tokens, np.random.default_rng(0)):
            pairs = list[tuple[Figures, Figures]]()
            for _ in range(args.repeats):
                with tempfile.TemporaryDirectory() as folder:
                    pairs.append(measure(kind, target, case, Path(folder) if args.restart else None))
            if any(cold.tokens != warm.tokens for cold, warm in pairs):
                print(f"{kind.name}, {case.name}: the text is not the cold engine's")
                met = False
            cold, warm = pairs[0]
            ratio = statistics.median(warm.seconds / cold.seconds for cold, warm in pairs)
            cpu = statistics.median(warm.cpu / cold.cpu for cold, warm in pairs)
            seconds = statistics.median(cold.seconds for cold, _ in pairs)
            print(
                f"| {kind.name} | {case.name} | {warm.read} of {cold.read} ({warm.read / cold.read:.1%}) | {ratio:.3f} "
                f"| {cpu:.3f} | {seconds:.2f} s |",
                flush=True,
            )
            met = met and warm.read <= READ_AGAIN * cold.read and ratio <= FIRST_TOKEN
    return 0 if met else 1


if __name__ == "__main__":
    sys.exit(main())
