"""Compare this engine with other engines that draft with DSpark heads: same target, same head, same prompts, greedy.

    python benchmarks/peers.py --head out/peers-head/best --python out/peers/bin/python --own-head checkpoints/head

Each engine runs in a process of its own (peers_worker.py), and they take turns. All load the target and the head in
float32 and use the same BLAS; bfloat16 is slow on a CPU. An engine that cannot run is in the table with its reason.
Every engine decodes with its defaults, and with `--depth` draft tokens per round and without n-grams. `--own-head` adds
this engine with a head of any other kind.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from typing import Any

from eagle_mlx import blas
from eagle_mlx.catalog import embedded
from eagle_mlx.errors import ConfigError, EagleError
from eagle_mlx.formats.tensors import read_safetensors
from eagle_mlx.heads import kind_of, load_head
from eagle_mlx.machine import describe
from eagle_mlx.progress import progress_bar
from eagle_mlx.serve.prompts import read_questions
from eagle_mlx.target import Target, load_target
from eagle_mlx.text import LEAST_DISTINCT, is_loop

# isort: split
import mlx.core as mx

Prompt = tuple[int, ...]
Way = tuple[str, int, int | None]
"""An engine, rows, and draft tokens per round."""
WORKER = Path(__file__).resolve().parent / "peers_worker.py"
OURS, OWN, REFERENCE = "eagle-mlx", "eagle-mlx with --own-head", "mlx-lm"
LAYOUTS = {OURS: "dspark", REFERENCE: "dspark", "mlx-dspark": "dspark", "mlx-vlm": "specforge"}
"""Engines, and the head's layout that each reads; mlx-vlm does not read DeepSpec's (`dspark`)."""
QUIET = {"HF_HUB_OFFLINE": "1", "HF_HUB_DISABLE_TELEMETRY": "1", "DO_NOT_TRACK": "1", "TOKENIZERS_PARALLELISM": "false"}


def blas_of_children() -> dict[str, str]:
    """Return an environment for processes without this package: its BLAS, no network, no telemetry."""
    library = blas.activate()
    same = {"OPENBLAS_CORETYPE": library.kernels} if library.kernels else {}
    return {**os.environ, **QUIET, **({"LD_PRELOAD": library.path} if library.path else {}), **same}


class Engine:
    """An engine's process. `error` says why it cannot run."""

    def __init__(self, package: str, python: Path, target: Path, head: Path, log: Path):
        self._log = log
        with log.open("w") as file:
            self._process = subprocess.Popen(
                [python, WORKER, package, target, head],
                stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=file, text=True, env=blas_of_children(),
            )  # fmt: skip
        started = self._answer()
        self.error: str = started.get("error", "")
        self.version: str = started.get("version", "")

    def turn(self, **request: Any) -> dict[str, Any]:
        """Decode some prompts; arguments and result are those of `turn` in the worker, or the result is an `error`."""
        assert self._process.stdin is not None
        with suppress(BrokenPipeError):
            self._process.stdin.write(json.dumps(request) + "\n")
            self._process.stdin.flush()
        return self._answer()

    def stop(self) -> None:
        self._process.kill()
        self._process.wait()

    def _answer(self) -> dict[str, Any]:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            end = self._log.read_text(encoding="utf-8", errors="replace").strip().splitlines()[-1:]
            return {"error": " ".join(end) or f"ended with status {self._process.wait()}"}
        answer: dict[str, Any] = json.loads(line)
        return answer


@dataclass
class Figures:
    """What an engine did in its turns."""

    rates: list[float] = field(default_factory=list)
    """Tokens per second of each turn, prompts included."""
    cpu_seconds: float = 0.0
    tokens: int = 0
    texts: int = 0
    same: int = 0
    """Texts that are the reference's."""
    error: str = ""
    """Why the engine cannot do it."""
    warm: bool = False
    """Whether the first turn is over, which does not count."""

    def add(self, texts: Sequence[Prompt], same: int, turn: Mapping[str, Any]) -> None:
        count = sum(map(len, texts))
        self.rates.append(count / turn["seconds"])
        self.tokens, self.texts, self.same = self.tokens + count, self.texts + len(texts), self.same + same
        self.cpu_seconds += turn["cpu_seconds"]


def copy_in_float32(target: Path, folder: Path) -> None:
    """Copy a model. Others compute in the stored type, and bfloat16 is slow on a CPU."""
    shutil.copytree(target, folder)
    for file in folder.glob("*.safetensors"):
        stored = read_safetensors(file)
        weights = {k: x.astype(mx.float32) if mx.issubdtype(x.dtype, mx.floating) else x for k, x in stored.items()}
        mx.eval(weights)
        file.unlink()
        mx.save_safetensors(str(file), weights, {"format": "mlx"})


def prepare(target: Path, head: str, folder: Path) -> Target:
    """Write the target and the head's layouts in float32. Raises ConfigError if the head is not DSpark."""
    copy_in_float32(target, folder / "target")
    loaded = load_target(folder / "target")
    network = load_head(head, loaded)
    formats = {form.name: form for form in kind_of(network).formats}
    if "dspark" not in formats:
        raise ConfigError(f"{head} is {kind_of(network).name}, but the engines share only DSpark; name a DSpark head")
    for name in {*LAYOUTS.values()}:
        formats[name].save(network, folder / name, target_name=str(target), extra={}, dtype=mx.float32, overwrite=True)
    file = folder / "specforge" / "config.json"
    written = json.loads(file.read_text(encoding="utf-8"))
    written["dflash_config"]["num_target_layers"] = loaded.num_layers  # mlx-vlm guesses it from the layers read
    file.write_text(json.dumps(written), encoding="utf-8")
    return loaded


def compare(args: argparse.Namespace, folder: Path) -> dict[str, Any]:
    target = prepare(args.target, args.head, folder)
    prompts = [question.encode(target, max_tokens=args.max_tokens) for question in read_questions(args.prompts)]
    with ExitStack() as stack:
        engines: dict[str, Engine] = {}
        heads = {name: (name, folder / layout) for name, layout in LAYOUTS.items()}
        if args.own_head:
            heads[OWN] = OURS, args.own_head
        for name, (package, head) in heads.items():
            python = Path(sys.executable) if package in (OURS, REFERENCE) else args.python
            engines[name] = Engine(package, python, folder / "target", head, folder / f"{name}.log")
            stack.callback(engines[name].stop)
        plain = engines[REFERENCE].turn(prompts=prompts[: args.limit], rows=1, max_tokens=args.max_tokens, depth=None)
        if "error" in plain:
            raise EagleError(f"{REFERENCE} does not run: {plain['error']}")
        texts = {
            tuple(prompt): text
            for prompt, tokens in zip(prompts, plain["tokens"], strict=False)
            if not is_loop(text := text_of(tokens, target, args.max_tokens), LEAST_DISTINCT)
        }
        if not texts:
            raise ConfigError(f"all {args.limit} answers loop; give other --prompts or a larger --limit")
        figures: dict[Way, Figures] = {}
        for way, some in progress_bar(list(turns(list(engines), list(texts), args)), desc="turns"):
            name, rows, depth = way
            taken = figures.setdefault(way, Figures(error=engines[name].error))
            if taken.error:
                continue
            answer = engines[name].turn(prompts=some, rows=rows, max_tokens=args.max_tokens, depth=depth)
            taken.error = answer.get("error", "")
            if taken.warm and not taken.error:
                kept = [text_of(tokens, target, args.max_tokens) for tokens in answer["tokens"]]
                taken.add(kept, sum(texts[prompt] == text for prompt, text in zip(some, kept, strict=True)), answer)
            taken.warm = True
    return {"engines": engines, "figures": figures, "prompts": len(texts)}


def text_of(tokens: Sequence[int], target: Target, max_tokens: int) -> Prompt:
    """Return an answer without its end; engines differ in whether they return it, and in whether they stop in time."""
    kept = tuple(tokens[:max_tokens])
    return kept[: next((at for at, token in enumerate(kept) if token in target.eos_token_ids), len(kept))]


def turns(
    engines: Sequence[str], prompts: Sequence[Prompt], args: argparse.Namespace
) -> Iterator[tuple[Way, list[Prompt]]]:
    """Yield who decodes what next: all engines decode the same prompts in turn, and another one begins each time."""
    for rows in args.rows:
        ways = [
            (name, rows, depth) for name in engines for depth in (None, args.depth) if name != REFERENCE or not depth
        ]
        parts = [list(prompts[at : at + args.turn]) for at in range(0, len(prompts), args.turn)]
        for index, some in enumerate([*parts[:1], *parts * args.repeats]):
            first = index % len(ways)
            yield from ((way, some) for way in ways[first:] + ways[:first])


def table(comparison: dict[str, Any]) -> str:
    """Return a Markdown table."""
    lines = [
        "| engine | rows | drafts | tokens/s | of mlx-lm | CPU s per 1,000 tokens | texts as mlx-lm's |",
        "|---" * 7 + "|",
    ]
    for (name, rows, depth), taken in comparison["figures"].items():
        drafts = "none" if name == REFERENCE else "default" if depth is None else f"{depth}"
        lines.append(f"| {name} {comparison['engines'][name].version} | {rows} | {drafts} | ")
        if taken.error:
            lines[-1] += f"{taken.error.splitlines()[0]} | | | |"
            continue
        ratio = median(
            a / b for a, b in zip(taken.rates, comparison["figures"][REFERENCE, rows, None].rates, strict=True)
        )
        lines[-1] += (
            f"{median(taken.rates):.0f} | {ratio:.2f} | {1e3 * taken.cpu_seconds / taken.tokens:.1f} "
            f"| {taken.same} of {taken.texts} |"
        )
    return "\n".join(lines)


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--head", required=True, help="folder of a DSpark head that drafts the whole vocabulary")
    parser.add_argument("--own-head", type=Path, help="another head, which only this engine decodes with (none)")
    parser.add_argument("--python", type=Path, required=True, help="Python with mlx-dspark and mlx-vlm")
    parser.add_argument("--target", type=Path, default=embedded("target"))
    parser.add_argument("--prompts", type=Path, default=embedded("prompts.jsonl"))
    parser.add_argument("--limit", type=int, default=32, help="prompts, less those with a looping answer (32)")
    parser.add_argument("--max-tokens", type=int, default=128, help="new tokens per prompt (128)")
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 4], help="prompts that decode together (1 4)")
    parser.add_argument("--depth", type=int, default=2, help="draft tokens per round in the second setting (2)")
    parser.add_argument("--turn", type=int, default=4, help="prompts per turn (4)")
    parser.add_argument("--repeats", type=int, default=3, help="passes over the prompts (3)")
    args = parser.parse_args(argv)
    args.python = args.python.absolute()
    print(f"blas: {blas.activate()}; {describe()}")
    try:
        with tempfile.TemporaryDirectory() as folder:
            print(table(compare(args, Path(folder))))
    except EagleError as e:
        print(f"error: {e}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
