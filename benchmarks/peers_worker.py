"""One engine of peers.py, in a process and an environment of its own.

    python benchmarks/peers_worker.py ENGINE TARGET HEAD

It writes a JSON line once it is ready, or with the error if it cannot run, then one for each turn that it reads.
"""

from __future__ import annotations

import functools
import importlib.metadata
import json
import os
import sys
import time
from collections.abc import Callable
from typing import Any, Protocol

Tokens = list[int]


class Peer(Protocol):
    def one(self, prompt: Tokens, max_tokens: int, depth: int | None) -> Tokens:
        """Decode one prompt greedily. `depth`: draft tokens per round and no n-grams; None: the engine's defaults."""

    def batch(self, prompts: list[Tokens], max_tokens: int, depth: int | None) -> list[Tokens]:
        """Decode these prompts together."""


class Ours:
    def __init__(self, target: str, head: str):
        from eagle_mlx.target import load_target

        self._target, self._head = load_target(target), head

    def one(self, prompt: Tokens, max_tokens: int, depth: int | None) -> Tokens:
        return self.batch([prompt], max_tokens, depth)[0]

    def batch(self, prompts: list[Tokens], max_tokens: int, depth: int | None) -> list[Tokens]:
        from eagle_mlx.sampling_params import SamplingParams

        outputs = self._engine(len(prompts), depth).generate(prompts, SamplingParams(max_tokens=max_tokens))
        return [list(output.tokens) for output in outputs]

    @functools.cache  # noqa: B019  (one object, as long as its process)
    def _engine(self, rows: int, depth: int | None) -> Any:
        from eagle_mlx.engine import Engine
        from eagle_mlx.serve.speculation import Speculation

        fixed: dict[str, Any] = {"policy": "fixed", "num_tokens": depth, "ngrams": False}
        speculation = Speculation(head=self._head, head_bits=16, no_memory=True, **({} if depth is None else fixed))
        proposer, policy = speculation.proposer(self._target), speculation.make_policy()
        return Engine(self._target, proposer, policy=policy, max_batch=rows)


class MlxLm:
    """Plain decoding; `depth` has no effect."""

    def __init__(self, target: str, _: str):
        import mlx_lm

        self._model, self._tokenizer = mlx_lm.load(target)[:2]

    def one(self, prompt: Tokens, max_tokens: int, depth: int | None) -> Tokens:
        import mlx_lm

        steps = mlx_lm.stream_generate(self._model, self._tokenizer, prompt, max_tokens=max_tokens)
        return [int(step.token) for step in steps]

    def batch(self, prompts: list[Tokens], max_tokens: int, depth: int | None) -> list[Tokens]:
        import mlx_lm

        batch = mlx_lm.batch_generate(
            self._model, self._tokenizer, prompts, max_tokens=max_tokens, return_token_ids=True
        )
        assert batch.token_ids is not None
        return batch.token_ids


class MlxDspark:
    def __init__(self, target: str, head: str):
        from mlx_dspark import load_drafter, load_target

        self._target, self._tokenizer = load_target(target, require_tap=True)
        self._head, _ = load_drafter(head, quantize=False)

    def one(self, prompt: Tokens, max_tokens: int, depth: int | None) -> Tokens:
        from mlx_dspark import speculative_generate

        settings = {} if depth is None else {"max_draft_tokens": depth, "lookup_drafts": False}
        answer = speculative_generate(
            self._target, self._tokenizer, self._head, prompt_ids=prompt, max_new_tokens=max_tokens, **settings
        )
        return list(answer.token_ids)

    def batch(self, prompts: list[Tokens], max_tokens: int, depth: int | None) -> list[Tokens]:
        from mlx_dspark.batch_engine import batch_spec_generate

        settings = {} if depth is None else {"max_draft_tokens": depth}
        answers = batch_spec_generate(
            self._target, self._tokenizer, self._head, prompts, max_new_tokens=max_tokens, **settings
        )
        return [list(answer.token_ids) for answer in answers]


class MlxVlm:
    def __init__(self, target: str, head: str):
        from mlx_vlm import load
        from mlx_vlm.speculative.drafters import load_drafter, validate_drafter_compatibility

        self._model, self._processor = load(target)
        self._head, self._kind = load_drafter(head)
        validate_drafter_compatibility(self._model, self._head, self._kind)

    def one(self, prompt: Tokens, max_tokens: int, depth: int | None) -> Tokens:
        return self.batch([prompt], max_tokens, depth)[0]

    def batch(self, prompts: list[Tokens], max_tokens: int, depth: int | None) -> list[Tokens]:
        import mlx.core as mx
        from mlx_vlm.generate.ar import BatchGenerator

        generator = BatchGenerator(
            self._model.language_model,
            self._processor,
            max_tokens=max_tokens,
            completion_batch_size=len(prompts),
            prefill_batch_size=len(prompts),
            draft_model=self._head,
            draft_kind=self._kind,
            draft_block_size=None if depth is None else depth + 1,
        )
        features = [self._model.get_input_embeddings(mx.array([prompt])).to_dict() for prompt in prompts]
        embedded = [{name: x for name, x in inputs.items() if x is not None} for inputs in features]
        texts: dict[int, Tokens] = {uid: [] for uid in generator.insert(prompts, prompt_kwargs=embedded)}
        while generator.has_work:
            for step in generator.next()[1]:
                texts[step.uid].append(int(step.token))
        generator.close()
        return list(texts.values())


PEERS: dict[str, Callable[[str, str], Peer]] = {
    "eagle-mlx": Ours,
    "mlx-lm": MlxLm,
    "mlx-dspark": MlxDspark,
    "mlx-vlm": MlxVlm,
}


def turn(peer: Peer, prompts: list[Tokens], rows: int, max_tokens: int, depth: int | None) -> dict[str, Any]:
    """Decode the prompts, `rows` at a time. Return tokens, seconds, and CPU seconds of all threads."""
    cpu, begin = os.times(), time.perf_counter()
    texts: list[Tokens] = []
    for at in range(0, len(prompts), rows):
        some = prompts[at : at + rows]
        texts += [peer.one(some[0], max_tokens, depth)] if rows == 1 else peer.batch(some, max_tokens, depth)
    seconds, after = time.perf_counter() - begin, os.times()
    return {
        "tokens": texts,
        "seconds": seconds,
        "cpu_seconds": after.user + after.system - cpu.user - cpu.system,
    }


def main() -> None:
    out = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what the engines print goes to stderr

    def say(answer: dict[str, Any]) -> None:
        print(json.dumps(answer), file=out, flush=True)

    name, target, head = sys.argv[1:]
    version = ""
    try:
        version = importlib.metadata.version(name)
        peer = PEERS[name](target, head)
    except Exception as e:  # the table has the reason
        say({"version": version, "error": f"{type(e).__name__}: {e}"})
        return
    say({"version": version})
    for line in sys.stdin:
        try:
            say(turn(peer, **json.loads(line)))
        except Exception as e:
            say({"error": f"{type(e).__name__}: {e}"})


if __name__ == "__main__":
    main()
