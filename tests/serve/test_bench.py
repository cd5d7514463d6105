"""eagle-bench: its prompts, its rules and its figures, on tiny random models."""

from __future__ import annotations

import json
import shlex
import shutil
import sys
from collections.abc import Sequence
from dataclasses import replace
from importlib.metadata import version
from pathlib import Path
from typing import get_args

import mlx.core as mx
import mlx_lm
import pytest
from matplotlib.figure import Figure

import eagle_mlx as em
from eagle_mlx import hooks, hub
from eagle_mlx.catalog.head_search import register
from eagle_mlx.errors import ConfigError
from eagle_mlx.formats.tensors import read_tensors
from eagle_mlx.heads.eagle3 import save_eagle3
from eagle_mlx.machine import describe
from eagle_mlx.request import Output
from eagle_mlx.sampling_params import SamplingParams
from eagle_mlx.serve.bench import report
from eagle_mlx.serve.bench.cli import main
from eagle_mlx.serve.bench.measure import (
    acceptance_by_position,
    acceptance_length,
    compare,
    first_difference,
    measure,
)
from eagle_mlx.serve.bench.modes import BenchModels, Decoding, EngineMode, MlxLmMode, Mode, build_modes, take_turns
from eagle_mlx.serve.bench.options import BenchConfig, ModeName
from eagle_mlx.serve.bench.report import BenchRun, TextComparison
from eagle_mlx.target import nbytes_of
from eagle_mlx.text import distinct_ratio
from tests.fakes import tiny_head, tiny_target, tiny_target_folder
from tests.full import in_full
from tests.serve.questions import write
from tests.shortcuts import without_shortcuts

PROMPTS = [[5, 6, 7], [9, 8, 7, 6, 5], [100], [11, 12, 11, 12, 11, 12]]


# Identity


def test_first_difference() -> None:
    assert first_difference([1, 2], [1, 2]) is None
    assert first_difference([1, 2], [1, 3]) == 1
    assert first_difference([1, 2], [1, 2, 3]) == 2
    assert first_difference([], [1]) == 0


def test_only_a_near_tie_excuses() -> None:
    target = tiny_target()
    best = int(mx.argmax(target.forward(mx.array([[3, 4]])).logits[0, -1]).item())
    twin, other = [token for token in range(10, 20) if token != best][:2]
    weight = target.model.model.embed_tokens.weight
    weight[twin] = weight[best] * (1 - 1e-6)
    greedy = SamplingParams()

    def verdict(tokens: list[int]) -> TextComparison:
        return compare(target, [[3, 4]], [[best, 1]], [tokens], [greedy])

    assert verdict([best, 1]) == TextComparison(identical=1)
    assert verdict([twin, 7]) == TextComparison(excused=1)
    assert verdict([other, 7]) == TextComparison(different=1)
    assert verdict([best]) == TextComparison(different=1)
    assert verdict([other, 7]).different == 1
    weight[other] = weight[best] * (1 - 2e-6)
    assert verdict([other, 7]) == TextComparison(excused=1), "three tokens can tie as well as two"
    weight[twin] = weight[best] * 0.9
    assert verdict([twin, 7]) == TextComparison(different=1)


# Acceptance


def test_acceptance_over_several_continuations() -> None:
    first = Output(
        "", [1, 2, 3, 4, 5, 6], "length", 1, 2, 4, 3, drafted_by_position=[2, 2], accepted_by_position=[2, 1]
    )
    second = Output("", [1, 2], "length", 1, 2, 2, 0, drafted_by_position=[2], accepted_by_position=[0])
    assert acceptance_length([first, second]) == 2.0
    assert acceptance_by_position([first, second]) == [0.5, 0.5]
    assert acceptance_by_position([]) == []


# Measuring


def tiny_runs(temperature: float = 0.0, batches: Sequence[int] = (1,), repeats: int = 1) -> list[BenchRun]:
    target = tiny_target(tokenizer=True)
    models = BenchModels(target, tiny_head(target, draft_vocab=64), tiny_target(seed=1, layers=2, tokenizer=True))
    modes = build_modes(models, get_args(ModeName), batches, in_full([2, 3], [3]))
    plan = BenchConfig(in_full(12, 6), temperature=temperature, repeats=repeats, least_distinct=0.0)
    return measure(target, modes, PROMPTS, plan, progress=False)


def test_all_modes_produce_the_same_greedy_text() -> None:
    batches = in_full((1, 3), (3,))
    runs = tiny_runs(batches=batches, repeats=in_full(2, 1))
    assert [(run.mode, run.batch, run.depth) for run in runs] == [
        ("mlx-lm", 1, 0),
        *[("mlx-lm-draft", 1, depth) for depth in in_full([2, 3], [3])],
        *[
            (mode, batch, depth)
            for batch in batches
            for mode, depth in [
                *([("mlx-lm-batch", 0)] if batch > 1 else []),
                ("plain", 0),
                *[(mode, depth) for depth in in_full([2, 3], [3]) for mode in ("ngram", "draft", "eagle", "hybrid")],
            ]
        ],
    ]
    for run in runs:
        assert run.identical is (None if run.mode == "mlx-lm-batch" else True), run
        assert (run.ratio_to_mlx_lm_batch is None) == (run.batch == 1)
        assert run.prompts == len(PROMPTS)
        assert run.left_out_looping == 0
        assert run.tokens_per_second > 0
        assert run.acceptance_length >= 1
        assert len(run.acceptance_by_position) <= run.depth
        assert run.prompt_tokens_per_second > 0
        assert run.peak_bytes > 0
        assert (run.acceptance_rate is not None) == (run.mode in ("ngram", "draft", "eagle", "hybrid"))
    assert runs[0].ratio_to_mlx_lm == 1.0
    assert all(run.acceptance_length == 1.0 for run in runs if run.mode in ("mlx-lm", "mlx-lm-batch", "plain"))


def test_the_baselines_are_mlx_lms_own_functions_with_the_targets_weights() -> None:
    target, draft = (tiny_target(tokenizer=True, hidden=64) for _ in range(2))
    mx.eval(target.model.parameters(), draft.model.parameters())
    models, before = BenchModels(target, draft=draft), mx.get_active_memory()
    baselines = build_modes(models, ["mlx-lm", "mlx-lm-batch", "mlx-lm-draft"], [2], [2])
    assert len(baselines) == 3
    assert mx.get_active_memory() - before < nbytes_of(draft.model) / 100

    def library_files(mode: Mode) -> set[str]:
        """Return the files of the library whose functions a mode calls while it decodes."""
        files, params = set[str](), [SamplingParams(max_tokens=4, ignore_eos=True)] * 2
        sys.setprofile(lambda frame, event, argument: files.add(frame.f_code.co_filename))
        try:
            list(mode.decode([[5, 6, 7] * 30] * 2, params))
        finally:
            sys.setprofile(None)
        return {Path(file).name for file in files if Path(file).is_relative_to(Path(hooks.__file__).parent)}

    assert {"hooks.py", "attention.py"} <= library_files(EngineMode("plain", models, 2))
    for mode in baselines:
        assert not library_files(mode), mode.name


def test_the_last_round_of_mlx_lms_draft_mode_counts_although_it_is_cut() -> None:
    """A target that drafts for itself is right: eight tokens take three rounds of up to three."""
    target, draft = (tiny_target(tokenizer=True) for _ in range(2))
    modes = build_modes(BenchModels(target, draft=draft), ["mlx-lm-draft", "draft"], [1], [2])
    runs = measure(target, modes, PROMPTS, BenchConfig(8, repeats=1, least_distinct=0.0), progress=False)
    assert [run.acceptance_length for run in runs] == [8 / 3, 8 / 3]


def test_policies_change_only_the_speed() -> None:
    target = tiny_target(tokenizer=True)
    modes = build_modes(BenchModels(target), ["mlx-lm", "ngram"], [2], [3], ["fixed", "throughput", "acceptance-ema"])
    runs = measure(target, modes, PROMPTS, BenchConfig(max_tokens=12, repeats=1, least_distinct=0.0), progress=False)
    assert [run.policy for run in runs[1:]] == ["fixed", "throughput", "acceptance-ema"]
    assert all(run.identical for run in runs)
    assert "throughput" in report.table(runs)


def test_answers_of_one_token_have_no_decoding_speed() -> None:
    target = tiny_target(tokenizer=True)
    config = BenchConfig(max_tokens=1, repeats=1, least_distinct=0.0)
    [run] = measure(target, build_modes(BenchModels(target), ["plain"], [1], []), PROMPTS, config, progress=False)
    assert run.decode_tokens_per_second is None
    assert run.tokens_per_second > 0
    table = report.table([run, replace(run, mode="eagle", decode_tokens_per_second=5.0)]).splitlines()
    names, cells = next((a.split(), b.split()) for a, b in zip(table, table[2:], strict=False) if "decode" in a.split())
    assert cells[names.index("decode")] == "-"


def test_seeded_sampling_is_compared_with_the_plain_engine() -> None:
    for run in tiny_runs(temperature=1.0, batches=(2,)):
        assert run.identical is (None if run.mode.startswith("mlx-lm") else True), run


def test_modes_that_take_turns_produce_the_same_text() -> None:
    target = tiny_target(tokenizer=True)
    names: list[ModeName] = ["mlx-lm", "mlx-lm-batch", "plain", "ngram"]
    plan = BenchConfig(max_tokens=in_full(12, 8), repeats=in_full(2, 1), least_distinct=0.0)
    for batch in in_full([1, 2], [2]):
        modes = build_modes(BenchModels(target), names, [batch], [3])
        whole = measure(target, modes, PROMPTS, plan, progress=False)
        turns = measure(target, modes, PROMPTS, replace(plan, turn=5), progress=False)
        for run, other in zip(whole, turns, strict=True):
            assert (run.mode, run.tokens, run.acceptance_length) == (other.mode, other.tokens, other.acceptance_length)
            assert other.identical is not False
            assert other.seconds > 0


def test_rounds_are_not_charged_for_other_modes_turns(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [0.0]

    def clock() -> float:
        now[0] += 0.001
        return now[0]

    monkeypatch.setattr("eagle_mlx.serve.bench.modes.perf_counter", clock)

    class Slow(EngineMode):
        def decode(self, prompts: Sequence[list[int]], params: Sequence[SamplingParams]) -> Decoding:
            decoding = super().decode(prompts, params)
            while True:
                now[0] += 7
                try:
                    yield next(decoding)
                except StopIteration as end:
                    return list(end.value)

    target = tiny_target(tokenizer=True)
    slow, quick = Slow("plain", BenchModels(target), 2), EngineMode("ngram", BenchModels(target), 2, 3)
    seconds: list[float] = []
    quick.engine.observer = lambda report: seconds.append(report.seconds)
    params = BenchConfig().params(4, 12)
    watched: list[tuple[ModeName, int]] = []
    jobs = [(slow, PROMPTS), (quick, PROMPTS)]
    first, second = take_turns(jobs, params, 3, lambda mode, tokens: watched.append((mode.name, tokens)))
    for mode in ("plain", "ngram"):
        counts = [tokens for name, tokens in watched if name == mode]
        assert (counts[0], counts[-1]) == (0, 4 * 12)
        assert counts == sorted(counts)
    assert now[0] >= 7 * 12
    assert len(seconds) > 6
    assert max(seconds) < 1
    assert [output.tokens for output in first.outputs] == [output.tokens for output in second.outputs]


def test_a_modes_time_includes_waiting_for_its_own_rounds(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [0.0]
    mode = EngineMode("plain", BenchModels(tiny_target(tokenizer=True)), 1)
    monkeypatch.setattr("eagle_mlx.serve.bench.modes.perf_counter", lambda: now[0])
    monkeypatch.setattr("eagle_mlx.serve.bench.modes.mx.synchronize", lambda: now.append(now.pop() + 5))
    decoding = mode.decode(PROMPTS[:1], BenchConfig().params(1, 4))
    next(decoding)
    before = mode.engine.runner.clock()
    mode.sync()
    now[0] += 20  # other modes' turns
    next(decoding)
    assert mode.engine.runner.clock() - before == 5
    decoding.close()


def test_the_peak_of_a_mode_has_only_its_own_models() -> None:
    target, draft = tiny_target(tokenizer=True), tiny_target(seed=1, layers=2, tokenizer=True)
    models, plan = BenchModels(target, tiny_head(target), draft), BenchConfig(4, repeats=1, least_distinct=0.0)
    others = mx.zeros((1 << 26,), mx.int8)
    mx.eval(others)
    modes = build_modes(models, ["mlx-lm", "mlx-lm-draft", "plain", "draft", "eagle"], [1], [2])
    peaks = {run.mode: run.peak_bytes for run in measure(target, modes, PROMPTS, plan, progress=False)}
    own, drafting = nbytes_of(target.model), nbytes_of(draft.model)
    assert all(own < peak < own + drafting + others.nbytes for peak in peaks.values())
    assert peaks["mlx-lm"] + drafting <= peaks["mlx-lm-draft"]
    assert peaks["plain"] + drafting <= peaks["draft"]
    assert peaks["plain"] + nbytes_of(models.head) <= peaks["eagle"]


def test_the_peak_of_a_mode_has_what_it_keeps_between_turns() -> None:
    class Growing(EngineMode):
        size = 0

        def decode(self, prompts: Sequence[list[int]], params: Sequence[SamplingParams]) -> Decoding:
            kept = []
            for _ in range(3):
                kept.append(mx.zeros((self.size,), mx.int8))
                mx.eval(kept)
                yield 1
            return []

    small, large = (Growing("plain", BenchModels(tiny_target()), 1) for _ in range(2))
    small.size, large.size = 1 << 20, 1 << 24
    timed = take_turns([(small, PROMPTS), (large, PROMPTS)], BenchConfig().params(1, 3), 1)
    assert [round((job.peak - job.mode.weights) / (1 << 20)) for job in timed] == [3, 48]


def test_a_mode_with_another_text_is_reported() -> None:
    target = tiny_target(tokenizer=True)
    plan = BenchConfig(max_tokens=6, repeats=1, least_distinct=0.0)
    (run,) = measure(target, [Liar("plain", BenchModels(target), 1)], PROMPTS, plan, progress=False)
    assert run.identical is False
    assert run.identical_count == 0
    assert run.ratio_to_mlx_lm is None


class Liar(EngineMode):
    def decode(self, prompts: Sequence[list[int]], params: Sequence[SamplingParams]) -> Decoding:
        honest = yield from super().decode(prompts, params)
        return [replace(output, tokens=((output.tokens[0] + 1) % 4096, *output.tokens[1:])) for output in honest]


def test_mlx_lm_decodes_for_the_comparison_only_if_it_is_not_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    decoded, decode = list[int](), MlxLmMode.decode

    def counted(mode: MlxLmMode, prompts: Sequence[list[int]], params: Sequence[SamplingParams]) -> Decoding:
        decoded.extend(len(prompt) for prompt in prompts if params[0].max_tokens > 1)
        return decode(mode, prompts, params)

    monkeypatch.setattr(MlxLmMode, "decode", counted)
    target = tiny_target(tokenizer=True)
    lengths, warm_up = [len(prompt) for prompt in PROMPTS], len(PROMPTS[0])
    for modes, repeats, expected in (
        ([MlxLmMode("mlx-lm", target)], 2, [warm_up, *lengths, *lengths]),
        ([MlxLmMode("mlx-lm", target)], 1, [warm_up, *lengths]),
        ([], 1, lengths),
    ):
        decoded.clear()
        config = BenchConfig(max_tokens=6, repeats=repeats, least_distinct=0.0)
        runs = measure(target, [*modes, Liar("plain", BenchModels(target), 1)], PROMPTS, config, progress=False)
        assert decoded == expected
        assert [run.identical for run in runs] == [True] * len(modes) + [False]


def test_loops_are_left_out_and_counted() -> None:
    target = tiny_target(tokenizer=True)
    modes = [EngineMode("plain", BenchModels(target), 1)]
    # With this weight all states are equal, and the target repeats one token endlessly.
    target.model.model.norm.weight *= 0
    target.model.model.norm.weight[0] = 1.0
    with pytest.raises(ConfigError, match="continuations loop"):
        measure(target, modes, PROMPTS, BenchConfig(max_tokens=16, repeats=1), progress=False)
    (run,) = measure(target, modes, PROMPTS, BenchConfig(max_tokens=16, repeats=1, least_distinct=0.0), progress=False)
    assert run.prompts + run.left_out_looping == len(PROMPTS)


@pytest.mark.parametrize("measured", [(), ("mlx-lm",)])
def test_only_looping_prompts_are_left_out(measured: tuple[ModeName, ...]) -> None:
    target, most = tiny_target(seed=3, tokenizer=True), in_full(40, 20)
    modes = [*(MlxLmMode(name, target) for name in measured), EngineMode("plain", BenchModels(target), 1)]
    outputs = take_turns([(modes[-1], PROMPTS)], BenchConfig().params(4, most))[0].outputs
    ratios = sorted(distinct_ratio(output.tokens) for output in outputs)
    middle = (ratios[1] + ratios[2]) / 2
    looping = sum(ratio < middle for ratio in ratios)
    assert 0 < looping < len(PROMPTS), "choose another seed"
    config = BenchConfig(max_tokens=most, repeats=1, least_distinct=middle)
    *_, run = measure(target, modes, PROMPTS, config, progress=False)
    assert run.left_out_looping == looping
    assert run.prompts == len(PROMPTS) - looping
    assert run.identical_count == len(PROMPTS)
    assert run.tokens == sum(len(output.tokens) for output in outputs if distinct_ratio(output.tokens) >= middle)


def test_eagle_needs_a_head() -> None:
    with pytest.raises(ConfigError, match="--head"):
        build_modes(BenchModels(tiny_target(tokenizer=True)), ["eagle"], [1], [4])


# Reports


RUN = BenchRun(
    "eagle", 2, 4, 0, "fixed", 0.7, 151.26, 170.0, 1.624, 1.2, 1.5, 2.75, [0.8, 0.5], True, 9, 1, 8, 2, 800, 5.3
)
RUN = replace(RUN, prompt_tokens_per_second=1234.5, acceptance_rate=0.38, peak_bytes=15_234_000_000)


def test_table_shows_every_figure() -> None:
    plain = replace(RUN, mode="mlx-lm", depth=0, identical=None, acceptance_by_position=[], acceptance_rate=None)
    shared, speeds, drafts = (part.splitlines() for part in report.table([RUN, plain]).split("\n\n"))
    assert shared == ["batch 2, depth 4, policy fixed, temp 0.7"]
    assert [" ".join(line.split()) for line in speeds if "---" not in line] == [
        "mode tokens/s decode prompt x mlx-lm x batched x plain tau identical",
        "eagle 151.3 170.0 1234.5 1.62 1.20 1.50 2.75 yes 9/10 ~1",
        "mlx-lm 151.3 170.0 1234.5 1.62 1.20 1.50 2.75 -",
    ]
    assert [" ".join(line.split()) for line in drafts if "---" not in line] == [
        "mode accepted by position peak MB",
        "eagle 0.38 0.80 0.50 15,234",
        "mlx-lm - - 15,234",
    ]
    assert "NO 9/10" in report.table([replace(RUN, identical=False)])
    assert "2 more left out" in report.footnote([RUN], 128, 1e-3)


def test_a_column_of_the_table_varies_and_fits_a_terminal() -> None:
    alone = {"ratio_to_mlx_lm_batch": None, "acceptance_by_position": [0.9, 0.8, 0.7, 0.6]}
    runs = [replace(RUN, mode="mlx-lm", depth=0, **alone), *(replace(RUN, depth=depth, **alone) for depth in (1, 4))]
    text = report.table(runs)
    assert "mode    depth  tokens/s" in text
    assert "x batched" not in text, "nothing was measured"
    assert max(map(len, text.splitlines())) <= 80
    parts = [replace(run, by_category=(report.Category("qa", 3, 0, 12.0, 1.2, 2.5),)) for run in runs]
    assert report.by_category(parts).splitlines()[0].split()[:4] == ["category", "mode", "depth", "turns"]


def test_machine_is_described() -> None:
    machine = describe()
    assert machine.cores >= 1
    assert machine.mlx.startswith("0.")
    assert machine.blas
    assert machine.cpu in str(machine)


@pytest.mark.skipif(not Path("/usr/sbin/sysctl").exists(), reason="this machine has no sysctl where macOS has it")
def test_a_mac_is_described_in_a_job_of_cron(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its PATH has only /usr/bin and /bin."""
    monkeypatch.setattr("sys.platform", "darwin")
    monkeypatch.setenv("PATH", "/usr/bin:/bin")
    assert describe().cpu


def test_output_replaces_a_file_whole_and_leaves_others(tmp_path: Path) -> None:
    file, other = tmp_path / "figures.json", tmp_path / "figures.json.part"
    for path in (file, other):
        path.write_text("old")
    report.write_json({"a": 1}, file)
    assert (json.loads(file.read_text()), other.read_text()) == ({"a": 1}, "old")
    assert sorted(tmp_path.iterdir()) == [file, other]


def test_the_plot_names_what_varies_under_its_bars_and_the_rest_in_its_title(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    drawn, save = [], Figure.savefig
    monkeypatch.setattr(Figure, "savefig", lambda self, *args, **more: (drawn.append(self), save(self, *args, **more)))
    runs = [replace(RUN, mode="mlx-lm", depth=0), RUN, replace(RUN, depth=6)]
    report.plot(runs, "models/tiny", tmp_path / "new" / "bars.png")
    assert (tmp_path / "new" / "bars.png").read_bytes().startswith(b"\x89PNG")
    [axes] = drawn[0].axes
    assert axes.get_title() == "Decoding with tiny, 8 prompts\nbatch 2, policy fixed, temp 0.7"
    assert [label.get_text() for label in axes.get_xticklabels()] == ["mlx-lm", "eagle\ndepth 4", "eagle\ndepth 6"]


# The command


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, str]:
    root = tmp_path_factory.mktemp("bench")
    tiny_target_folder(root / "target")
    save_eagle3(tiny_head(tiny_target(tokenizer=True), draft_vocab=64), root / "head", target_name="tiny")
    return str(root / "target"), str(root / "head")


QUICK = ("--limit", "2", "--max-tokens", "6", "--repeats", "1", "--least-distinct", "0", "--quiet")


def test_command_measures_and_writes(
    folders: tuple[str, str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    target, head = folders
    prompts = write(tmp_path / "p.jsonl", {"prompt": "def f():"}, {"prompt": "class A"}, {"prompt": "unread"})
    figures, bars = tmp_path / "figures.json", tmp_path / "bars.png"
    files = ("--prompts", str(prompts), "--json", str(figures), "--plot", str(bars))
    given = ["--target", target, "--head", head, "--depth", "2", *files, *QUICK]
    assert main(given) == 0
    shown = capsys.readouterr().out
    assert "blas: " in shown
    assert "eagle" in shown
    assert bars.exists()
    written = json.loads(figures.read_text())
    assert {"target", "head", "machine", "runs"} <= set(written)
    assert shlex.split(written["command"]) == ["eagle-bench", *given]
    assert written["prompts"] == str(prompts)
    assert written["head_sha256"] == hub.weights_digest(Path(head))
    assert written["eagle_mlx"] == version("eagle-mlx")
    assert [run["mode"] for run in written["runs"]] == ["mlx-lm", "plain", "ngram", "eagle", "hybrid"]
    schema = {
        "mode",
        "batch",
        "depth",
        "temperature",
        "tokens_per_second",
        "ratio_to_mlx_lm",
        "ratio_to_plain",
        "prompt_tokens_per_second",
        "peak_bytes",
        "acceptance_rate",
        "acceptance_length",
        "acceptance_by_position",
        "identical",
    }
    for run in written["runs"]:
        assert schema <= set(run)
        assert run["identical"] is True
        assert run["prompts"] == 2


def test_no_phase_is_silent(folders: tuple[str, str], capsys: pytest.CaptureFixture[str]) -> None:
    loud = [flag for flag in QUICK if flag != "--quiet"]
    assert main(["--target", folders[0], "--modes", "plain", "ngram", "--batch", "2", *loud]) == 0
    shown = capsys.readouterr().err
    phases = (f"loading {folders[0]}", "preparing the modes", "warm-up:", "reference:", "repeat 1/1:", "comparison:")
    places = [shown.find(phase) for phase in phases]
    assert -1 not in places
    assert places == sorted(places)
    assert main(["--target", folders[0], "--modes", "plain", *QUICK]) == 0
    assert capsys.readouterr().err == ""


def test_quantized_heads_are_named_and_trees_measured_with_chains(
    folders: tuple[str, str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    target, head = folders
    what = ("--modes", "plain", "ngram", "eagle", "--depth", "3", "--nodes", "0", "8", "--head-bits", "4")
    what += ("--draft-window", "8", "--draft-sink", "1")
    assert main(["--target", target, "--head", head, *what, *QUICK, "--json", str(tmp_path / "figures.json")]) == 0
    shown = capsys.readouterr().out
    assert f"head: {head}, 4-bit weights in groups of 32" in shown
    assert "accepted: the share of draft tokens, or of the levels of trees" in shown
    written = json.loads((tmp_path / "figures.json").read_text())
    assert written["head_quantization"] == {"group_size": 32, "bits": 4}
    assert (written["draft_window"], written["draft_sink"]) == (8, 1)
    runs = written["runs"]
    assert [(run["mode"], run["nodes"]) for run in runs] == [
        ("plain", 0), ("ngram", 0), ("eagle", 0), ("ngram", 8), ("eagle", 8)
    ]  # fmt: skip
    assert all(run["identical"] for run in runs)
    assert main(["--target", target, "--modes", "plain", *QUICK, "--head-bits", "4"]) == 2
    assert "--head-bits needs a --head" in capsys.readouterr().err


def test_the_worst_case_is_measured_against_plain_decoding(tmp_path: Path) -> None:
    figures = tmp_path / "worst.json"
    tiny_target_folder(tmp_path / "target")
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text('{"prompt": "import os"}\n{"prompt": "def f(x):"}\n')
    tokens, batches = in_full((10, ("1", "2")), (8, ("2",)))
    flags = ("--head", "random", "--modes", "plain", "ngram", "eagle", "--ignore-eos", "--max-tokens", str(tokens))
    where = ("--target", str(tmp_path / "target"), "--prompts", str(prompts), "--json", str(figures))
    assert main([*flags, *where, "--temperature", "1", "--batch", *batches, "--repeats", "1", "--quiet"]) == 0
    runs = json.loads(figures.read_text())["runs"]
    assert [run["tokens"] for run in runs] == [2 * tokens] * 3 * len(batches)
    assert [run["ratio_to_plain"] for run in runs if run["mode"] == "plain"] == [1.0] * len(batches)
    assert all(run["ratio_to_plain"] > 0 and run["identical"] for run in runs)
    assert all(run["acceptance_length"] < 2 for run in runs if run["mode"] == "eagle")
    assert main([*flags, *where, "--modes", "mlx-lm", "plain"]) == 2
    assert main([*flags, *where, "--temperature", "1", "--acceptance", "rejection", "--repeats", "1", "--quiet"]) == 0
    runs = json.loads(figures.read_text())["runs"]
    assert [run["identical"] for run in runs] == [True, None, None]
    assert json.loads(figures.read_text())["head_sha256"] is None


def test_command_measures_a_draft_model_and_mlx_lms(
    folders: tuple[str, str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    figures = tmp_path / "figures.json"
    assert main(["--target", folders[0], "--draft-model", folders[0], "--json", str(figures), *QUICK]) == 0
    runs = {run["mode"]: run for run in json.loads(figures.read_text())["runs"]}
    assert set(runs) == {"mlx-lm", "mlx-lm-draft", "plain", "ngram", "draft", "hybrid"}
    assert runs["draft"]["acceptance_length"] > runs["plain"]["acceptance_length"] == 1.0
    shown = capsys.readouterr().out
    assert "draft model: " in shown
    assert "leaving out mode eagle" in shown
    assert main(["--modes", "nonsense"]) == 2
    assert main(["--target", folders[0], "--modes", "draft", *QUICK]) == 2
    assert "mode draft needs --draft-model" in capsys.readouterr().err


def test_the_figures_name_the_best_head_of_a_run(folders: tuple[str, str], tmp_path: Path) -> None:
    target, head = folders
    figures, best = tmp_path / "figures.json", tmp_path / "run" / "best"
    shutil.copytree(head, best)
    where = ("--target", target, "--head", str(best.parent), "--json", str(figures))
    assert main([*where, "--modes", "eagle", *QUICK]) == 0
    assert json.loads(figures.read_text())["head_sha256"] == hub.weights_digest(best)


def test_command_measures_a_head_that_it_finds(
    folders: tuple[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("EAGLE_MLX_CACHE", str(tmp_path))
    register(folders[1], folders[0], "trained")
    assert main(["--target", folders[0], "--modes", "plain", "eagle", *QUICK]) == 0
    assert f"head: {folders[1]}, trained here for" in capsys.readouterr().out
    assert main(["--target", folders[0], "--modes", "eagle", "--head", "none", *QUICK]) == 2
    assert "mode eagle needs --head" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("flags", "problem"),
    [
        (["--modes", "eagle"], "--head"),
        (["--prompts", "missing.jsonl", "--target", "./missing"], "cannot be read"),  # before models are loaded
        (["--max-tokens", "600"], "do not fit the target's context"),
        (["--temperature", "-1"], "temperature"),
        (["--least-distinct", "1.5"], "must be between 0 and 1"),
        (["--nodes", "0", "4"], "--nodes must be above --depth 4, or 0"),  # else no tree would be measured
        (["--plot", "bars.html"], "--plot must end in .png, .pdf or .svg, not bars.html"),
    ],
)
def test_command_errors_name_the_problem(
    folders: tuple[str, str], flags: list[str], problem: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["--target", folders[0], *QUICK, *flags]) == 2
    error = capsys.readouterr().err
    assert error.startswith("error: ")
    assert problem in error


def test_head_of_another_target_is_refused(
    folders: tuple[str, str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    other = tiny_head(tiny_target(hidden=64, tokenizer=True), draft_vocab=64)
    save_eagle3(other, tmp_path / "head", target_name="other")
    assert main(["--target", folders[0], "--head", str(tmp_path / "head"), *QUICK]) == 2
    assert "was it trained for another model?" in capsys.readouterr().err


def bf16_folder(folder: Path) -> Path:
    """Return a folder with a bfloat16 model whose logits are eight times as large as a random model's.

    mlx-lm takes the argmax of log probabilities in the model's type. For a trained model's best tokens they are small
    enough to be exact. For a random model they are larger, and rounding creates ties.
    """
    tiny_target_folder(folder)
    weights = read_tensors(folder)
    weights["model.norm.weight"] = 8 * weights["model.norm.weight"]
    weights = {name: x.astype(mx.bfloat16) for name, x in weights.items()}
    mx.save_safetensors(str(folder / "model.safetensors"), weights, metadata={"format": "mlx"})
    return folder


def test_text_equals_that_of_stock_mlx_lm(tmp_path: Path) -> None:
    """Without CPU shortcuts, both decode in bfloat16."""
    folder, most = bf16_folder(tmp_path / "target"), in_full(10, 6)
    model, tokenizer = mlx_lm.load(str(folder))[:2]
    prompts = [tokenizer.encode(f"def f{n}(x):") for n in range(in_full(20, 2))]
    with without_shortcuts():
        steps = [list(mlx_lm.stream_generate(model, tokenizer, prompt, max_tokens=most)) for prompt in prompts]
        target = em.load_target(str(folder))
        assert target.dtype == mx.bfloat16
        for proposer in (None, em.NgramProposer()):
            outputs = em.Engine(target, proposer, policy=em.FixedPolicy(4)).generate(
                prompts, em.SamplingParams(max_tokens=most)
            )
            assert [output.tokens for output in outputs] == [[int(step.token) for step in answer] for answer in steps]
