"""Inputs in which one value has another type: they are taken, or refused in one line, but never end in a traceback."""

from __future__ import annotations

import copy
import io
import json
import math
from collections.abc import Callable, Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest

import eagle_mlx as em
from eagle_mlx.catalog.head_search import HeadRecord, find_heads
from eagle_mlx.data_pipelines.sources.rows import parse_row
from eagle_mlx.errors import EagleError
from eagle_mlx.formats.tensors import read_index
from eagle_mlx.heads.eagle3 import save_eagle3
from eagle_mlx.serve import launch
from eagle_mlx.serve.prompts import read_questions, remember
from eagle_mlx.serve.speculation import Speculation
from eagle_mlx.target import load_target
from eagle_mlx.train.config import TrainConfig, load_config
from eagle_mlx.train.hours.portions import FILE, Journal
from eagle_mlx.train.publish import CardOptions, PublishOptions, UploadOptions
from eagle_mlx.train.publish.upload import run
from eagle_mlx.train.run.folder import RUN_FILE, read_identity
from tests.fakes import tiny_config, tiny_head, tiny_target, tiny_target_folder
from tests.full import FULL

WRONG = ([], {}, 5, -1, 10**30, "x", "", "a\ud800", None, True, 1.5, math.nan, ["x"], {"a": 1}, [[]], [{}])


def with_wrong_values(value: Any) -> Iterator[Any]:
    """Yield copies of a value in which it or one of its parts is another; without EAGLE_FULL, two for each part."""
    for number, path in enumerate(parts(value)):
        for wrong in WRONG if FULL else WRONG[number % 8 :: 8]:
            changed = copy.deepcopy(value)
            node = changed
            for key in path[:-1]:
                node = node[key]
            if path:
                node[path[-1]] = wrong
            yield changed if path else wrong


def parts(value: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    yield path
    pairs = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, part in list(pairs):
        yield from parts(part, (*path, key))


def written(file: Path, value: Any) -> Path:
    file.write_text(json.dumps(value) + "\n", encoding="utf-8")
    return file


def read_row(folder: Path, value: Any) -> None:
    if isinstance(value, dict):  # as files are checked for
        parse_row(value, "x:1")


def ask(folder: Path, value: Any) -> None:
    for question in read_questions(written(folder / "q.jsonl", value)):
        question.check(tiny_target(tokenizer=True), 4)


def memorize(folder: Path, value: Any) -> None:
    engine = em.Engine(tiny_target(tokenizer=True), em.NgramProposer(memory=em.Memory()))
    remember([str(written(folder / "m.jsonl", value))], engine, lambda line: None)


def start(folder: Path, value: Any) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(launch, "urlopen", lambda *given, **more: io.StringIO(json.dumps(value)))
        server = launch.find("http://x", "", None)
        for program in (launch.claude, launch.codex, launch.opencode):
            program(server)


def find(folder: Path, value: Any) -> None:
    (folder / "heads").mkdir(exist_ok=True)
    written(folder / "heads" / "x.json", value)
    find_heads("someone/model")


def load_head(folder: Path, value: Any) -> None:
    written(folder / "head" / "config.json", value)
    em.load_head(folder / "head", tiny_target())


def head_files(folder: Path) -> list[Any]:
    """Write a head, and return its config."""
    save_eagle3(tiny_head(tiny_target()), folder / "head", target_name="tiny")
    return [json.loads((folder / "head" / "config.json").read_text())]


def publish(folder: Path, value: Any) -> None:
    written(folder / "report.json", value)
    run(PublishOptions(folder, "you/head", CardOptions("mit", base_model="you/model"), UploadOptions(dry_run=True)))


def reports(folder: Path) -> list[Any]:
    """Write a head as a run's best, and return a report of this run."""
    save_eagle3(tiny_head(tiny_target()), folder / "best", target_name="tiny")
    best = {"prompts": 9, "acceptance_length": 2.0, "acceptance_by_position": [0.5, 0.4], "depth": 2, "left_out": 1}
    data = {"conversations": 9, "tokens": 90, "learned_tokens": 80, "learned_conversations": 8, "prompts_held_out": 1}
    config = {"data": ["a.jsonl"], "eval_tokens": 64, "lr": 0.001, "step_weights": [0.5, 0.5], "overwrite": True}
    machine = {"cpu": "M4", "cores": 10, "device": "gpu", "mlx": "1"}
    shown = {"steps": 5, "tokens": 80, "seconds": 9.0, "best_step": 5, "acceptance": {"best": best}}
    return [{**shown, "config": config, "data": data, "machine": machine}]


def load_model(folder: Path, value: Any) -> None:
    if not (folder / "model.safetensors").exists():
        tiny_target_folder(folder)
    written(folder / "config.json", value)
    em.Engine(load_target(folder)).generate([[1, 2]], em.SamplingParams(max_tokens=1))


CALL = {"id": "1", "type": "function", "function": {"name": "f", "arguments": {"a": 1}}}
PICTURE = {"type": "image_url", "image_url": {"url": "data:image/png;base64,AA"}}
TOOL = {"type": "function", "function": {"name": "f", "parameters": {"type": "object", "properties": {}}}}
CHAT = [
    {"role": "system", "content": "s"},
    {"role": "user", "content": [{"type": "text", "text": "x"}, PICTURE]},
    {"role": "assistant", "content": "y", "tool_calls": [CALL]},
    {"role": "tool", "tool_call_id": "1", "content": "7"},
]
SHORT = [{"role": "user", "content": "x"}, {"role": "assistant", "content": "y"}]
RUN = {"config": TrainConfig.of(target="t").flat(), "target": "a", "data": "b", "processes": 1}
PORTION = {"begun": 1.0, "tokens": 5, "schedule": None, "until": [0, 0]}

INPUTS: dict[str, tuple[Callable[[Path, Any], object], list[Any] | Callable[[Path], list[Any]]]] = {
    "rows of data": (
        read_row,
        [
            {"messages": CHAT, "tools": [TOOL]},
            {"conversations": [{"from": "human", "value": "x"}, {"from": "gpt", "value": "y"}]},
            *(
                {"turns": ["a", "b"]},
                {"prompt": "a", "completion": "b"},
                {"instruction": "i", "input": "j", "output": "o"},
                {"text": "t"},
            ),
        ],
    ),
    "prompts": (ask, [{"messages": SHORT}, {"prompt": "x"}, {"turns": ["a", "b"], "category": "c"}]),
    "texts for the memory": (memorize, [{"messages": SHORT}, {"text": "x"}]),
    "a list of models": (start, [{"data": [{"id": "m", "max_model_len": 4096}]}]),
    "--speculative-config": (
        lambda folder, value: Speculation.of(speculative_config=json.dumps(value)),
        [{"method": "eagle3", "model": "x", "num_speculative_tokens": 3}, {"method": "ngram", "prompt_lookup_max": 3}],
    ),
    "a record of a head": (find, [asdict(HeadRecord(".", ("someone/model",), "trained", "f", 2.0, 5))]),
    "an index": (lambda folder, value: read_index(written(folder / "i.json", value)), [{"weight_map": {"a": "b"}}]),
    "a run": (lambda folder, value: (written(folder / RUN_FILE, value), read_identity(folder)), [RUN]),
    "a journal": (
        lambda folder, value: (written(folder / FILE, value), Journal.read(folder)),
        [{"elapsed": 3.0, "portions": [PORTION]}],
    ),
    "settings of a run": (lambda folder, value: load_config(written(folder / "c.yaml", value)), [RUN["config"]]),
    "a head": (load_head, head_files),
    "a report": (publish, reports),
    "a model": (load_model, [tiny_config(vocab=4096)]),
}


def generate(**changed: Any) -> None:
    """Decode with an engine, or a request, of which one argument is another."""
    target = tiny_target(tokenizer=True)
    request = {name: changed.pop(name) for name in ("prompts", "params") if name in changed}
    em.Engine(**{"target": target, "proposer": tiny_head(target), **changed}).generate(
        **{"prompts": [[1, 2, 1, 2]], "params": em.SamplingParams(max_tokens=4), **request}
    )


def submit(**changed: Any) -> None:
    engine = em.Engine(tiny_target(), prefix_cache_bytes=1 << 20)
    engine.submit(engine.prepare(**{"prompt": [1, 2], "params": em.SamplingParams(max_tokens=2), **changed}))
    while not engine.idle:
        engine.step()


def change(**changed: Any) -> None:
    """Change an engine between steps."""
    engine = em.Engine(tiny_target())
    for name, value in changed.items():
        setattr(engine, name, value)
    engine.generate([1, 2], em.SamplingParams(max_tokens=2))


def head_of(**changed: Any) -> em.HeadProposer:
    return em.HeadProposer(**{"head": tiny_head(tiny_target()), **changed})


def hybrid_of(**changed: Any) -> em.HybridProposer:
    return em.HybridProposer(**{"model": tiny_head(tiny_target()), **changed})


def policy_of(kind: Callable[..., Any], **others: Any) -> Callable[..., None]:
    return lambda **changed: generate(policy=kind(**{**others, **changed}))


CALLS: dict[str, tuple[Callable[..., object], str]] = {
    "Engine": (generate, "target proposer policy max_batch prefill_chunk kv_bytes prefill_ms observer clock"),
    "generate": (generate, "prompts params"),
    "prepare": (submit, "prompt params client namespace conversation boundaries"),
    "an engine between steps": (change, "max_batch observer"),
    "SamplingParams": (
        lambda **changed: generate(params=em.SamplingParams(**{"max_tokens": 4, **changed})),
        "temperature top_k seed max_tokens stop stop_token_ids drafter logprobs top_logprobs memory learn ignore_eos",
    ),
    "FixedPolicy": (policy_of(em.FixedPolicy, k=2), "k nodes"),
    "AcceptancePolicy": (policy_of(em.AcceptancePolicy), "k alpha threshold disable_at_rows"),
    "ThroughputPolicy": (policy_of(em.ThroughputPolicy), "max_depth explore max_nodes curve"),
    "NgramProposer": (lambda **changed: generate(proposer=em.NgramProposer(**changed)), "max_ngram min_ngram memory"),
    "HeadProposer": (lambda **changed: generate(proposer=head_of(**changed)), "head draft_window draft_sink"),
    "HybridProposer": (lambda **changed: generate(proposer=hybrid_of(**changed)), "model ngrams"),
    "DraftModelProposer": (em.DraftModelProposer, "draft"),
    "Memory": (em.Memory, "nbytes"),
    "learn_costs": (lambda **changed: em.learn_costs(**{"target": tiny_target(), **changed}), "target kv_bits"),
    "load_target": (lambda **changed: em.load_target(**{"name": "missing", **changed}), "name chat_template"),
    "load_head": (lambda **changed: em.load_head(**{"name": "missing", **changed}), "name target bits"),
}


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", CALLS)
def test_arguments_of_other_types_are_taken_or_refused_by_name(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("EAGLE_MLX_CACHE", str(tmp_path))
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    call, arguments = CALLS[name]
    for argument in arguments.split():
        errors = list[str]()
        for wrong in (*WRONG, object(), 0, b"x"):
            if argument == "curve" and wrong in (["x"], [[]], [{}]):
                continue
            try:
                call(**{argument: wrong})
            except EagleError as e:
                errors.append(str(e))
        assert errors, f"{argument} is not read"
        assert all(0 < len(error.splitlines()[0]) == len(error) for error in errors)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", INPUTS)
def test_values_of_other_types_are_taken_or_refused(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("EAGLE_MLX_CACHE", str(tmp_path))
    read, values = INPUTS[name]
    errors = list[str]()
    for value in values(tmp_path) if callable(values) else values:
        for changed in with_wrong_values(value):
            try:
                read(tmp_path, changed)
            except EagleError as e:
                errors.append(str(e))
    assert all(errors)
    assert errors or name == "a record of a head", "such values are not read"
