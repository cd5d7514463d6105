"""A sharded target gives the same text as the whole one, for any proposer and history of requests."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import time
from contextlib import nullcontext
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import mlx.core as mx
import numpy as np
import pytest

import eagle_mlx as em
from eagle_mlx.cache import RaggedCache
from eagle_mlx.command import Stop
from eagle_mlx.decoding.draft import Tree
from eagle_mlx.errors import ConfigError, TargetError
from eagle_mlx.ranks.channel import decode, encode
from eagle_mlx.ranks.commands import LeadingTarget, follow, is_mirrored
from eagle_mlx.ranks.load import check_readable, shard_layers, shard_tensors
from eagle_mlx.target import Target, digest_of, fingerprint, load_target, nbytes_of
from eagle_mlx.target_options import TargetOptions
from eagle_mlx.train.config import TrainConfig
from tests.architectures import tiny_model
from tests.eagle_mlx.heads import WITH_HEADS
from tests.eagle_mlx.rank_worker import Fault
from tests.fakes import tiny_adapters, tiny_target, tiny_target_folder
from tests.full import in_full
from tests.processes import MPI, needs_mpi, needs_ring, printed, printed_over_mpi, start
from tests.serve.api.given import HEAD, TARGET
from tests.serve.api.over_ranks import RANKS

WORKER = "tests.eagle_mlx.rank_worker"
DIVIDED = (
    *("llama", "qwen3_5", "gpt_oss", "deepseek_v3", "qwen3_moe", "step3p5", "qwen2", "qwen3_5_moe", "minimax"),
    *("glm4_moe", "exaone_moe", "deepseek_v2", "mistral4", "ministral3", "glm4_moe_lite", "longcat_flash"),
    *("deepseek_v32", "kimi_k25", "qwen3"),
)
"""The mlx-lm files to compare: first full attention, recurrent states, windows, latents and experts."""
PIPELINES = (
    *("qwen2", "qwen3_5", "ministral3", "deepseek_v3", "qwen3_moe", "deepseek_v2", "deepseek_v32", "glm4_moe"),
    *("glm4_moe_lite", "mistral4", "qwen3_next", "bailing_hybrid"),
)
"""Architectures whose layers are compared on several ranks."""


EVERY_WAY = [
    (2, "every_way tensor qwen3"),
    (2, "every_way pipeline qwen2"),
    *in_full(
        [(3, "every_way tensor qwen3"), (3, "every_way pipeline qwen2"), (3, "every_way pipeline ministral3")], []
    ),
]
ARCHITECTURES = [
    (2, f"architectures tensor {' '.join(in_full(DIVIDED, DIVIDED[1:2]))}"),
    (2, f"architectures pipeline {' '.join(in_full(PIPELINES, PIPELINES[2:3]))}"),
    *in_full([(3, "architectures tensor llama")], [] if MPI else [(3, "architectures tensor llama")]),
]
"""Three ranks of a ring take turns on two cores without sleeping, so in `make test` MPI carries their messages."""
LIVES = [
    (2, "life tensor qwen3 8"),
    (2, "life pipeline qwen3_5"),
    *in_full(
        [
            (3, "life tensor llama"),
            (2, "life tensor qwen3_5"),
            (2, "life tensor gpt_oss"),
            (2, "life pipeline qwen3_moe 8"),
            (3, "life pipeline ministral3"),
        ],
        [],
    ),
]
IDLE = (2, "idle")


@cache
def ranks(count: int) -> list[dict[str, Any]]:
    """Return the results of each rank for all of the cases above. The ranks are started once."""
    cases = [case for number, case in [*EVERY_WAY, *ARCHITECTURES, *LIVES, IDLE] if number == count]
    with TemporaryDirectory() as folder:
        outputs = printed(count, Path(folder), WORKER, *cases, seconds=in_full(3600, 600))
    return [json.loads(out.splitlines()[-1]) for out in outputs]


def check(compared: list[int], drafted: bool = True) -> None:
    identical, _, different, accepted = compared
    assert different == 0
    assert identical > 2
    assert bool(accepted) == drafted


@needs_ring
@pytest.mark.parametrize(("count", "case"), EVERY_WAY)
def test_every_way_to_decode_gives_the_text_of_one_process(count: int, case: str) -> None:
    """Greedy and seeded, one row and four: plain, chains, a draft model, trees and early exits."""
    comparisons = ranks(count)[0][case]
    assert len(comparisons) == (in_full(20, 6) if "tensor" in case else in_full(16, 4))
    for name, compared in comparisons.items():
        check(compared, drafted="depth=0" not in name)


@needs_mpi
@pytest.mark.parametrize(
    ("count", "case"),
    in_full(
        [(2, "every_way pipeline qwen2"), (3, "every_way tensor qwen3"), (3, "architectures tensor llama")],
        [(3, "architectures tensor llama")],
    ),
)
def test_messages_over_mpi_give_the_same_text(count: int, case: str) -> None:
    """MLX carries the messages; this project does not depend on rings."""
    results = json.loads(printed_over_mpi(count, WORKER, case, seconds=900))[case]
    for name, compared in results.get("llama", results).items():
        check(compared, drafted="depth=0" not in name)


@needs_ring
@pytest.mark.parametrize(("count", "case"), ARCHITECTURES)
def test_architectures_give_the_text_of_one_process(count: int, case: str) -> None:
    comparisons = ranks(count)[0][case]
    for name in case.split(" ")[2:]:
        assert isinstance(comparisons[name], dict), comparisons[name]
        for compared in comparisons[name].values():
            check(compared)


@needs_ring
@pytest.mark.timeout(3600)
@pytest.mark.skipif(TARGET is None, reason="for a target that is named: tests/clients/README.md")
def test_a_target_that_is_named_gives_the_text_of_one_process(tmp_path: Path) -> None:
    """EAGLE_TEST_TARGET and EAGLE_TEST_HEAD over EAGLE_TEST_RANKS processes."""
    case = f"given {TARGET} {HEAD}"
    if MPI:
        line = printed_over_mpi(RANKS, WORKER, case, seconds=3600)
    else:
        line = printed(RANKS, tmp_path, WORKER, case, seconds=3600)[0].splitlines()[-1]
    results = json.loads(line)[case]
    print(json.dumps(results, indent=1))
    assert all(different == 0 for _, _, different, _ in results.values())
    assert all(identical >= 36 for identical, *_ in results.values())


@needs_ring
@pytest.mark.parametrize(("count", "case"), LIVES)
def test_requests_come_and_go_with_a_prefix_cache(count: int, case: str) -> None:
    result = ranks(count)[0][case]
    for identical, _, different in result["equal"]:
        assert different == 0
        assert identical > 2
    assert result["cached"] > 16
    assert result["messages"] > 2


@needs_ring
def test_ranks_rest_while_there_is_nothing_to_do() -> None:
    """MLX waits for messages by spinning, which took a core of each machine."""
    count, case = IDLE
    assert ranks(count)[1][case]["worked"] < 0.3


TIMEOUT = in_full(8.0, 4.0)
FAULTS = in_full([(seed, "tensor") for seed in range(200)], [(2, "tensor"), (24, "tensor")])
"""Seeds. In `make test`, one kills rank 0 of two, and one stops rank 1."""
PIPELINE_FAULTS = in_full([(seed, "pipeline") for seed in range(40)], [])


@needs_ring
@pytest.mark.parametrize(("seed", "shard"), [*FAULTS, *PIPELINE_FAULTS])
def test_all_ranks_end_where_one_is_gone(seed: int, shard: str, tmp_path: Path) -> None:
    """Killed, stopped, ended, or only late: no text is wrong, and no rank waits forever."""
    count = 2 + seed % 2
    fault = Fault.drawn(seed, count)
    processes = start(count, tmp_path, WORKER, f"faulty {seed} {TIMEOUT} {shard}")
    left = [process for rank, process in enumerate(processes) if rank != fault.rank or fault.kind != "stop"]
    try:
        outputs = [process.communicate(timeout=90) for process in left]
        last = time.time()
    finally:
        for process in processes:
            process.kill()
    printed_texts = [out for out, _ in outputs] + [
        processes[fault.rank].communicate()[0] for _ in range(fault.kind == "stop")
    ]
    [began] = [
        json.loads(line)["fault"] for out in printed_texts for line in out.splitlines() if line.startswith('{"fault"')
    ]
    texts = [json.loads(line) for out, _ in outputs for line in out.splitlines() if line.startswith('{"request"')]
    assert all(answer["right"] for answer in texts)
    survived = [process.returncode for rank, process in enumerate(processes) if rank != fault.rank]
    if fault.kind == "delay":
        assert len(texts) == 5
        assert survived == [0] * (count - 1)
        return
    assert len(texts) < 5
    assert last - began < TIMEOUT + 5
    assert 0 not in survived, (fault, survived, outputs)
    assert any(f"rank {fault.rank}" in errors for _, errors in outputs), (fault, outputs)


def test_a_rank_ends_where_nobody_reads_what_it_says() -> None:
    """As after mlx.launch, to whose pipes all ranks write, has been killed."""
    code = (
        "import threading, time; from eagle_mlx.ranks.channel import end_process; input();"
        "threading.Thread(target=end_process, args=['rank 0 is gone']).start(); time.sleep(20)"
    )
    process = subprocess.Popen([sys.executable, "-c", code], stdin=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    assert process.stdin is not None
    assert process.stderr is not None
    process.stderr.close()
    process.stdin.write("now\n")
    process.stdin.flush()
    assert process.wait(60) == 2


def test_arguments_of_calls_survive_their_way() -> None:
    tree = Tree(mx.array([[0, 0, 1, 3]], mx.int32), 3).branches()
    sent: Any = {0: "the object"}
    for value in (3, None, [1, [2, 3]], mx.array([1, 2], mx.int32), mx.array([[True, False, True]]), tree):
        back = decode(json.loads(json.dumps(encode(value))), sent.__getitem__)
        if isinstance(value, mx.array):
            assert np.array_equal(np.array(back), np.array(value))
            assert back.dtype == value.dtype
        elif value is tree:
            assert np.array_equal(np.array(back.seen), np.array(tree.seen))
            assert np.array_equal(np.array(back.depths), np.array(tree.depths))
        else:
            assert back == value
    assert decode({"number": 0}, sent.__getitem__) == "the object"


def test_every_method_that_changes_a_cache_is_recorded() -> None:
    """A method that is not broadcast must leave the cache unchanged."""
    read_only = {"of", "local", "shortest", "count", "index"}
    methods = {name for name in dir(RaggedCache) if not name.startswith("_") and callable(getattr(RaggedCache, name))}
    assert {name for name in methods if not is_mirrored(RaggedCache, name)} == read_only


class Silent:
    """A channel without other ranks that records messages."""

    lost: str | None = None
    closed = False

    def __init__(self) -> None:
        self.messages: list[Any] = []

    @property
    def lock(self) -> Any:
        return nullcontext()

    def send(self, message: Any) -> None:
        assert not self.closed, "nobody watches any more, and there may be nobody who hears it"
        self.messages.append(json.loads(json.dumps(message)))

    def close(self) -> None:
        self.closed = True

    def join(self) -> None:
        """There are no threads."""


def test_each_forward_sends_one_message() -> None:
    channel: Any = Silent()
    target = LeadingTarget.of(tiny_target(), channel)
    cache = RaggedCache.of(target.model, 2)
    assert channel.messages == []
    target.forward(mx.array([[1, 2], [3, 4]]), cache)
    cache.advance(mx.array([2, 1], mx.int32), at_most=2)
    fork = cache.fork(1, 1)
    cache.remove(0)
    assert len(channel.messages) == 1
    target.forward(mx.array([[5]]), cache)
    names = [[call[1] for call in message["calls"]] for message in channel.messages]
    assert names == [["new"], ["advance", "fork", "remove"]]
    assert [message["then"] for message in channel.messages] == [
        ["forward", 0, [[1, 2], [3, 4]]],
        ["forward", 0, [[5]]],
    ]
    assert channel.messages[1]["gone"] == []
    number = fork.number  # type: ignore[attr-defined]
    del fork
    target.forward(mx.array([[6]]), cache)
    assert channel.messages[2]["gone"] == [number]


def test_ranks_are_ended_once_unless_they_are_lost() -> None:
    channel: Any = Silent()
    target = LeadingTarget.of(tiny_target(), channel)
    target.close()
    target.close()
    assert [message["then"] for message in channel.messages] == [["end"]]
    assert channel.closed
    gone: Any = Silent()
    gone.lost = "rank 1 is gone"
    LeadingTarget.of(tiny_target(), gone).close()
    assert gone.messages == []


class Interrupted(Silent):
    """Receives a signal of the terminal, and then that rank 0 has ended."""

    def __init__(self, number: signal.Signals):
        super().__init__()
        self.number = number

    def receive(self) -> Any:
        signal.raise_signal(self.number)
        return {"calls": [], "gone": [], "then": ["end"]}


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGHUP])
def test_ranks_stay_until_rank_0_has_ended_whatever_their_terminal_says(number: signal.Signals) -> None:
    """Rank 0 gets the signal too, and needs the others to finish a step and save a training."""
    channel: Any = Interrupted(number)
    with Stop().listening():
        follow(tiny_target(), channel)
    assert channel.closed


def test_a_closed_target_leaves_a_model_that_makes_its_own_caches_again() -> None:
    model = tiny_target().model
    before = vars(model).keys() | model.keys()
    leading = LeadingTarget.of(Target(model), Silent())  # type: ignore[arg-type]
    assert type(RaggedCache.of(model, 1)) is not RaggedCache
    leading.close()
    assert vars(model).keys() | model.keys() == before
    assert type(RaggedCache.of(model, 1)) is RaggedCache


def test_caches_of_others_are_refused() -> None:
    target, foreign = tiny_target(), RaggedCache.of(tiny_target().model, 1)
    leading = LeadingTarget.of(target, Silent())  # type: ignore[arg-type]
    with pytest.raises(TargetError, match="needs its own caches"):
        leading.forward(mx.array([[1]]), foreign)


def test_a_part_of_a_target_has_the_fingerprint_of_the_whole(tmp_path: Path) -> None:
    folder = tiny_target_folder(tmp_path / "target")
    whole = load_target(folder)
    part = load_target(folder, shard=lambda model: model.layers.pop())
    assert nbytes_of(part.model) < nbytes_of(whole.model)
    assert fingerprint(part) == fingerprint(whole) == digest_of(whole.model, str(whole.tokenizer.chat_template))


def test_outputs_of_layers_must_be_readable() -> None:
    check_readable(Target(tiny_model("llama")))
    with pytest.raises(TargetError, match="models of type iquestloopcoder cannot be sharded"):
        check_readable(Target(tiny_model("iquestloopcoder")))


class Group:
    """Like MLX's, for processes that do not exist: sharding a model needs no messages."""

    def __init__(self, size: int):
        self._size = size

    def size(self) -> int:
        return self._size

    def rank(self) -> int:
        return 0


@pytest.mark.parametrize(
    ("name", "changes", "ranks", "reason"),
    [
        ("gemma2", {}, 2, "models of type gemma2 cannot be sharded: mlx-lm has no tensor parallelism for them"),
        ("llama", {}, 3, "3 ranks cannot share this target: its num_attention_heads is 4"),
        (
            "llama",
            {"num_key_value_heads": 1},
            2,
            "2 ranks cannot share this target: .*Cannot infer the shape",
        ),
        ("llama", {"intermediate_size": 66}, 4, "Cannot shard the output of size 66 across 4"),
        ("qwen3_5", {"linear_num_key_heads": 1}, 2, "its linear_num_key_heads is 1"),
    ],
)
def test_what_cannot_be_divided_is_refused(name: str, changes: dict[str, int], ranks: int, reason: str) -> None:
    with pytest.raises(TargetError, match=reason):
        shard_tensors(tiny_model(name, **changes), Group(ranks))  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("name", "ranks", "reason"),
    [
        ("llama", 2, "models of type llama cannot be sharded: mlx-lm has no pipeline for them"),
        ("qwen2", 5, "5 ranks cannot share the 4 layers of this target"),
    ],
)
def test_layers_that_cannot_be_divided_are_refused(name: str, ranks: int, reason: str) -> None:
    with pytest.raises(TargetError, match=reason):
        shard_layers(tiny_model(name), Group(ranks))  # type: ignore[arg-type]


@pytest.mark.parametrize("drafts", WITH_HEADS)
def test_heads_are_refused_if_layers_are_on_other_machines(drafts: str) -> None:
    whole = tiny_target()
    leading = LeadingTarget.of(tiny_target(), Silent(), layers=8)  # type: ignore[arg-type]
    assert leading.num_layers == 8
    em.Engine(leading, em.NgramProposer())
    with pytest.raises(TargetError, match="so a head cannot read them; draft with n-grams or a draft model"):
        em.Engine(leading, WITH_HEADS[drafts](whole))
    with pytest.raises(ConfigError, match="training needs them on one; use --shard tensor"):
        TrainConfig.of(target="a", shard="pipeline")


def test_one_process_alone_is_told_how_to_start_several(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("MLX_HOSTFILE", raising=False)
    folder = tiny_target_folder(tmp_path / "target")
    with pytest.raises(ConfigError, match="start them with mlx.launch"):
        TargetOptions(shard="tensor").load(folder)
    with pytest.raises(TargetError, match="mlx_lm.fuse"):
        TargetOptions(shard="tensor", adapter_path=str(tiny_adapters(tmp_path / "adapters"))).load(folder)
    with pytest.raises(ConfigError, match="--rank-seconds must be above 0"):
        TargetOptions(rank_seconds=0.0)
