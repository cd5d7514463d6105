"""eagle-publish: from a head on disk to a head that others load by id, with a stand-in of the hub."""

from __future__ import annotations

import json
import re
import shlex
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any, get_args

import mlx.core as mx
import pytest
from huggingface_hub import ModelCard
from mlx.utils import tree_flatten

import eagle_mlx as em
from eagle_mlx import hub
from eagle_mlx.errors import ConfigError
from eagle_mlx.heads.block.formats import save_deepspec, save_speculators_block
from eagle_mlx.heads.eagle import save_eagle
from eagle_mlx.heads.eagle3 import Eagle3Head, save_eagle3
from eagle_mlx.heads.eagle3.formats import save_speculators
from eagle_mlx.heads.mtp import save_mtp
from eagle_mlx.heads.mtp.formats import save_speculators_mtp
from eagle_mlx.heads.precision import quantize
from eagle_mlx.serve.bench.cli import main as bench
from eagle_mlx.serve.bench.options import ModeName
from eagle_mlx.serve.speculation import Speculation
from eagle_mlx.target import load_target
from eagle_mlx.train.cli import flags_parser as train_parser
from eagle_mlx.train.cli import main as train
from eagle_mlx.train.config import TrainConfig, load_config
from eagle_mlx.train.data import public_settings
from eagle_mlx.train.publish.bundle import read_source
from eagle_mlx.train.publish.card import bench_command, data_sets, of_bench, of_training, train_command
from eagle_mlx.train.publish.cli import main
from eagle_mlx.train.run import loop
from tests import hub_server
from tests.eagle_mlx.heads import dspark, eagle, eagle3, mtp, peagle
from tests.fakes import tiny_head, tiny_target, tiny_target_folder
from tests.train.empty_pictures import leave_empty_pictures

REPO = "user/tiny-eagle3"
GOES_UP = ("--repo", REPO, "--license", "mit", "--base-model", "owner/tiny")
PLOTS = {"loss.png", "accuracy.png", "acceptance_by_position.png", "acceptance_length.png"}


class Made:
    """A target, the output of a training run for it, and its head's figures."""

    def __init__(self, root: Path):
        self.root = root
        self.target = tiny_target_folder(root / "models" / "tiny")
        self.chats = root / "secret customers" / "chats.jsonl"
        self.chats.parent.mkdir()
        rows = [{"prompt": f"add {i}", "completion": f"def add(x):\n    return x + {i}"} for i in range(100)]
        self.chats.write_text("\n".join(map(json.dumps, rows)) + "\n")
        self.run = root / "runs" / "out"
        small = "--length 64 --max-length 64 --rows 2 --unroll 2 --draft-vocab 512 --eval-prompts 3 --eval-tokens 8"
        small += " --eval-depth 2 --log-steps 1 --lr 1e-3 --max-steps 2"
        what = ["--target", str(self.target), "--data", str(self.chats), "--output", str(self.run)]
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(loop, "write_plots", leave_empty_pictures)
            assert train([*what, *small.split()]) == 0
        self.figures = root / "runs" / "chats.json"
        quick = "--depth 1 2 --modes plain eagle --limit 2 --max-tokens 6 --repeats 1 --least-distinct 0 --quiet"
        given = ["--target", str(self.target), "--head", str(self.run / "best"), "--json", str(self.figures)]
        assert bench([*given, *quick.split(), "--prompts", str(self.chats)]) == 0


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Made:
    return Made(tmp_path_factory.mktemp("private"))


def head_folder(folder: Path, **settings: Any) -> Path:
    save_eagle3(tiny_head(tiny_target(), draft_vocab=48), folder, target_name="owner/tiny", **settings)
    return folder


def dry(folder: Path, capsys: pytest.CaptureFixture[str], *more: str) -> str:
    capsys.readouterr()
    assert main([str(folder), "--repo", REPO, "--license", "mit", "--dry-run", *more]) == 0
    shown = capsys.readouterr().out
    assert not re.search(r"^\| ---.*\n(?!\|)", shown, re.MULTILINE), "a table with nothing in it"
    return shown


def refused(capsys: pytest.CaptureFixture[str], *argv: str) -> str:
    capsys.readouterr()
    assert main(argv) == 2
    error = capsys.readouterr().err.strip().splitlines()[-1]
    assert error.startswith("error: ")
    return error


# There and back


@pytest.mark.filterwarnings("ignore::eagle_mlx.HeadWarning")
def test_a_published_run_loads_by_its_id(
    made: Made, online: hub_server.Hub, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([str(made.run), *GOES_UP, "--figures", str(made.figures), "--message", "First"]) == 0
    assert f"{online.base}/{REPO}" in capsys.readouterr().out
    repo = online.repos[REPO]
    assert repo.commits == ["First"]
    assert not repo.private
    plots = {f"plots/{name}" for name in PLOTS}
    assert set(repo.files) == {".gitattributes", "README.md", "config.json", "model.safetensors", "report.json", *plots}
    assert repo.files["model.safetensors"] == (made.run / "best" / "model.safetensors").read_bytes()
    assert all(repo.files[f"plots/{name}"] == (made.run / name).read_bytes() for name in PLOTS)
    before = json.loads((made.run / "best" / "config.json").read_text())
    after = json.loads(repo.files["config.json"])
    assert after == {**before, "eagle_mlx": {**before["eagle_mlx"], "target": "owner/tiny"}}

    target = load_target(str(made.target))
    here, there = (em.load_head(name, target) for name in (made.run / "best", REPO))
    ours, theirs = (dict(tree_flatten(head.parameters())) for head in (here, there))  # type: ignore[attr-defined]
    assert ours.keys() == theirs.keys()
    assert all(mx.array_equal(ours[name], theirs[name]) for name in ours)
    proposer, params = Speculation(head=REPO).proposer(target), em.SamplingParams(max_tokens=12)
    plain = em.Engine(target).generate(["def f(x):"], params)
    assert (
        em.Engine(target, proposer, policy=em.FixedPolicy(2)).generate(["def f(x):"], params)[0].tokens
        == plain[0].tokens
    )

    more = ["--init-from", REPO, "--max-steps", "1", "--eval-prompts", "1", "--eval-tokens", "4", "--rows", "1"]
    where = ["--target", str(made.target), "--data", str(made.chats), "--output", str(tmp_path / "on")]
    assert train([*where, "--length", "64", "--max-length", "64", "--unroll", "2", *more]) == 0


def test_local_paths_are_not_published(made: Made, online: hub_server.Hub) -> None:
    assert str(made.root) in (made.run / "run.json").read_text()
    assert main([str(made.run), *GOES_UP, "--figures", str(made.figures)]) == 0
    texts = {n: c.decode() for n, c in online.repos[REPO].files.items() if not n.endswith((".png", ".safetensors"))}
    for name, text in texts.items():
        for private in (str(made.root), str(Path.home()), "secret customers", "runs"):
            assert private not in text, f"{private} in {name}"
    report = json.loads(texts["report.json"])
    assert report["config"]["data"] == ["chats.jsonl"]
    assert report["config"]["output"] == "out"
    assert report["acceptance"] == json.loads((made.run / "report.json").read_text())["acceptance"]


def test_a_config_without_paths_is_published_unchanged(online: hub_server.Hub, tmp_path: Path) -> None:
    folder = head_folder(tmp_path / "head")
    assert main([str(folder), "--repo", REPO, "--license", "mit", "--private"]) == 0
    repo = online.repos[REPO]
    assert repo.private
    assert json.loads(repo.files["config.json"]) == json.loads((folder / "config.json").read_text())
    assert repo.commits == ["Publish an EAGLE-3 head for owner/tiny"]


def test_an_existing_head_is_replaced_only_with_overwrite(
    online: hub_server.Hub, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = str(head_folder(tmp_path / "head"))
    what = [folder, "--repo", REPO, "--license", "mit"]
    assert main(what) == 0
    assert "--overwrite" in refused(capsys, *what)
    assert main([*what, "--overwrite"]) == 0
    assert len(online.created()) == 1


# What stands in the way


@pytest.mark.parametrize(
    ("token", "repo", "reason"),
    [
        (None, REPO, "no token with write access"),
        ("hf_wrong", REPO, "does not know the token"),
        (hub_server.READ, REPO, "is not open to this token"),
        (hub_server.WRITE, "stranger/head", "is not open to this token"),
        (hub_server.WRITE, "head", "write it as user/head"),
        (hub_server.WRITE, "a/b/c", "not a valid repository name"),
    ],
)
def test_missing_tokens_and_rights_are_errors(
    online: hub_server.Hub,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    token: str | None,
    repo: str,
    reason: str,
) -> None:
    hub_server.use(monkeypatch, online.base, tmp_path / "huggingface", token)
    folder = str(head_folder(tmp_path / "head"))
    assert reason in refused(capsys, folder, "--repo", repo, "--license", "mit")
    assert online.repos == {}


def test_a_token_may_be_given(online: hub_server.Hub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    hub_server.use(monkeypatch, online.base, tmp_path / "huggingface", "hf_wrong")
    folder = str(head_folder(tmp_path / "head"))
    assert main([folder, "--repo", REPO, "--license", "mit", "--token", hub_server.WRITE]) == 0
    assert REPO in online.repos


def test_no_network(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    hub_server.use(monkeypatch, "http://127.0.0.1:9", tmp_path / "huggingface")
    folder = str(head_folder(tmp_path / "head"))
    assert "nothing was published" in refused(capsys, folder, "--repo", REPO, "--license", "mit")


def test_a_license_that_the_hub_does_not_know(
    online: hub_server.Hub, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    what = [str(head_folder(tmp_path / "head")), "--repo", REPO, "--license", "no-such-license"]
    assert "must be one of" in refused(capsys, *what)
    assert online.repos == {}


def without(name: str, folder: Path) -> None:
    weights = mx.load(str(folder / "model.safetensors"))
    assert isinstance(weights, dict)
    mx.save_safetensors(str(folder / "model.safetensors"), {k: v for k, v in weights.items() if k != name})


def spoil(folder: Path) -> None:
    weights = mx.load(str(folder / "model.safetensors"))
    assert isinstance(weights, dict)
    weights["fc.weight"] = weights["fc.weight"] * float("nan")
    mx.save_safetensors(str(folder / "model.safetensors"), weights)


def shorten(folder: Path) -> None:
    content = (folder / "model.safetensors").read_bytes()
    (folder / "model.safetensors").write_bytes(content[:-100])


def strip(folder: Path) -> None:
    config = json.loads((folder / "config.json").read_text())
    del config["num_attention_heads"]
    (folder / "config.json").write_text(json.dumps(config))


@pytest.mark.parametrize(
    ("damage", "reason"),
    [
        (lambda folder: without("midlayer.hidden_norm.weight", folder), "missing: midlayer.hidden_norm.weight"),
        (spoil, "have NaN or infinity: fc.weight"),
        (shorten, "model.safetensors is damaged or cut short"),
        (strip, "num_attention_heads"),
        (lambda folder: (folder / "model.safetensors").rename(folder / "pytorch_model.bin"), "no .safetensors files"),
        (lambda folder: (folder / "config.json").unlink(), "has neither a head"),
    ],
)
def test_a_damaged_head_is_refused_before_any_request(
    online: hub_server.Hub, tmp_path: Path, capsys: pytest.CaptureFixture[str], damage: Any, reason: str
) -> None:
    damage(head_folder(tmp_path / "head"))
    assert reason in refused(capsys, str(tmp_path / "head"), "--repo", REPO, "--license", "mit")
    assert online.requests == []


@pytest.mark.parametrize(
    ("argv", "reason"),
    [
        (["--license", "mit", "--base-model", "tiny"], "--base-model: 'tiny' is not a repository name"),
        ([], "no license: give one with --license"),
        (["--license", "Apache-2.0"], "--license must be an id of the hub, such as apache-2.0, not Apache-2.0"),
        (["--license", "other"], "--license-name and --license-link"),
        (["--license", "mit", "--license-link", "https://x"], "go with --license other"),
        (["--license", "mit", "--figures", "none.json"], "none.json cannot be read"),
    ],
)
def test_missing_or_wrong_flags_are_errors(
    online: hub_server.Hub, tmp_path: Path, capsys: pytest.CaptureFixture[str], argv: list[str], reason: str
) -> None:
    assert reason in refused(capsys, str(head_folder(tmp_path / "head")), "--repo", REPO, *argv)
    assert reason not in refused(capsys, str(tmp_path / "nowhere"), "--repo", REPO, "--license", "mit")
    assert online.requests == []


def test_a_local_target_needs_a_base_model(
    made: Made, online: hub_server.Hub, capsys: pytest.CaptureFixture[str]
) -> None:
    message = refused(capsys, str(made.run), "--repo", REPO, "--license", "mit")
    assert "names its target 'tiny', which is not a hub id" in message
    assert "--base-model" in message
    assert online.requests == []


def test_a_base_model_of_another_width_is_refused(
    made: Made, online: hub_server.Hub, capsys: pytest.CaptureFixture[str]
) -> None:
    online.put("owner/wide", {"config.json": json.dumps({"hidden_size": 4096}).encode()})
    message = refused(capsys, str(made.run), "--repo", REPO, "--license", "mit", "--base-model", "owner/wide")
    assert "--base-model owner/wide has hidden states of 4096 numbers" in message
    assert REPO not in online.repos


# The card


def test_a_dry_run_makes_no_request_and_shows_everything(
    made: Made, online: hub_server.Hub, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.delenv("HF_TOKEN")
    shown = dry(made.run, capsys, "--base-model", "owner/tiny", "--figures", str(made.figures))
    assert online.requests == []
    size = (made.run / "best" / "model.safetensors").stat().st_size
    assert f"{size:,} bytes" in shown
    assert not (made.run / "README.md").exists()
    for name in ("model.safetensors", "config.json", "report.json", "README.md", "plots/loss.png", "# tiny-eagle3"):
        assert name in shown


def test_the_card_has_metadata_figures_and_commands(made: Made, online: hub_server.Hub, tmp_path: Path) -> None:
    assert main([str(made.run), *GOES_UP, "--figures", str(made.figures)]) == 0
    (tmp_path / "README.md").write_bytes(online.repos[REPO].files["README.md"])
    card = ModelCard.load(tmp_path / "README.md")
    assert card.data.to_dict() == {
        "base_model": "owner/tiny",
        "library_name": "mlx",
        "license": "mit",
        "pipeline_tag": "text-generation",
        "tags": ["eagle3", "speculative-decoding", "mlx", "sglang", "vllm"],
    }
    report = json.loads((made.run / "report.json").read_text())
    best = report["acceptance"]["best"]
    by_position = " ".join(f"{share:.2f}" for share in best["acceptance_by_position"])
    held_out = f"| chats.jsonl, held out | {best['prompts']} | {best['left_out']} | 0 | 2 |"
    assert f"{held_out} {best['acceptance_length']:.2f} | {by_position} |" in card.text
    runs = {(run["mode"], run["depth"]): run for run in json.loads(made.figures.read_text())["runs"]}
    for depth in (1, 2):
        run = runs["eagle", depth]
        shares = " ".join(f"{share:.2f}" for share in run["acceptance_by_position"])
        assert f"| chats.jsonl | 2 | 0 | 0 | {depth} | {run['acceptance_length']:.2f} | {shares} |" in card.text
        assert f"| eagle | 1 | {depth} | 0 | {run['tokens_per_second']:.1f} |" in card.text
    assert f"eagle-bench --target owner/tiny --head {REPO} --depth 1 2 --modes plain eagle --limit 2" in card.text
    assert "--json" not in card.text
    assert json.loads(made.figures.read_text())["machine"]["cpu"] in card.text
    assert "`plain` is EAGLE-MLX without drafts, `eagle` is EAGLE-MLX with this head.\n" in card.text
    assert "medians of" not in card.text, "there was one repeat"
    for line in (
        f"eagle-serve --target owner/tiny --head {REPO}",
        f'head = em.load_head("{REPO}", target)',
        f"--speculative-algorithm EAGLE3 --speculative-draft-model-path {REPO}",
        f'\'{{"method": "eagle3", "model": "{REPO}", "num_speculative_tokens": ',
        f"| tokens trained on | {report['tokens']:,} |",
        # Two steps of two rows use a part of the data, and only that part counts.
        f"| data | chats.jsonl: {report['data']['learned_conversations']:,} conversations, "
        f"{report['data']['learned_tokens']:,} tokens |",
        "| draft steps | 2",
        "| draft vocabulary | 512 tokens",
        "| reads the target's layers | 0, 2, 3 ",
        "![Training loss](plots/loss.png)",
    ):
        assert line in card.text, line
    assert 0 < report["data"]["learned_tokens"] < report["data"]["tokens"]


def test_a_head_without_figures_says_how_to_get_them(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    shown = dry(head_folder(tmp_path / "head"), capsys)
    assert f"eagle-bench --target owner/tiny --head {REPO} --depth 1 2 4 6" in shown
    assert "| prompts |" not in shown
    assert "How fast" not in shown
    assert "How it was trained" not in shown


def test_an_existing_card_is_not_used(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (head_folder(tmp_path / "head") / "README.md").write_text("of someone else")
    capsys.readouterr()
    assert main([str(tmp_path / "head"), "--repo", REPO, "--license", "mit", "--dry-run"]) == 0
    shown = capsys.readouterr()
    assert "README.md is not uploaded; a new card is written" in shown.err
    assert "of someone else" not in shown.out
    assert (tmp_path / "head" / "README.md").read_text() == "of someone else"


def test_without_a_report_the_card_shows_the_configs_steps_and_tokens(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = head_folder(tmp_path / "head", extra={"step": 1234, "tokens": 56789})
    shown = dry(folder, capsys)
    assert "| steps | 1,234 |" in shown
    assert "| tokens | 56,789 |" in shown


def test_the_card_shows_acceptance_by_length_of_context(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = head_folder(tmp_path / "run" / "best")
    measured = {**FOUND, "by_context": {"up to 512": 2.31, "up to 2,048": 1.9}}
    (folder.parent / "report.json").write_text(json.dumps({"steps": 12, "acceptance": {"best": measured}}))
    assert "τ by tokens of the prompt: up to 512: 2.31, up to 2,048: 1.90." in dry(folder, capsys)


@pytest.mark.parametrize(
    ("step", "remark"),
    [(0, ", but no later head was better than this one, the start"), (8, ", this checkpoint after 8")],
)
def test_the_card_says_which_head_of_a_run_it_is(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], step: int, remark: str
) -> None:
    folder = head_folder(tmp_path / "run" / "best")
    (folder.parent / "report.json").write_text(json.dumps({"steps": 12, "best_step": step}))
    assert f"| steps | 12{remark} |" in dry(folder, capsys)


def test_the_last_head_of_a_run_has_its_own_figures(made: Made) -> None:
    source = read_source(made.run / "last")
    assert source.which == "last"
    assert source.report is not None
    told = replace(source, report={**source.report, "acceptance": {"last": {**FOUND, "acceptance_length": 1.5}}})
    figures = of_training(told, "owner/tiny")
    assert figures is not None
    [run] = figures.taus
    assert (figures.data, run["prompts"], run["acceptance_length"]) == ("chats.jsonl, held out", 7, 1.5)
    assert of_training(replace(told, which="best"), "owner/tiny") is None
    further = of_training(replace(told, report={**told.report, "started_from": "some/head"}), "owner/tiny")
    assert further is not None
    assert further.data == "chats.jsonl, held out from this run"
    config = {**told.report["config"], "data": ["chats.jsonl", "b.jsonl"]}  # prompts come from both in turn
    several = of_training(replace(told, report={**told.report, "config": config}), "owner/tiny")
    assert several is not None
    assert several.data == "chats.jsonl, b.jsonl, held out"


FOUND = {"acceptance_length": 2.0, "acceptance_by_position": [0.5, 0.5], "depth": 2, "prompts": 7, "left_out": 3}


def test_every_kind_has_its_tags_and_servers(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    target = tiny_target()
    heads = {kind: tmp_path / kind for kind in ("eagle", "mtp", "peagle", "speculators", "speculators-mtp", "layers")}
    eagle_head, other = eagle(target), tiny_head(target, draft_vocab=48)
    eagle_head.attach(target)
    other.attach(target)
    save_eagle(eagle_head, heads["eagle"], target_name="owner/tiny")
    save_mtp(mtp(target), heads["mtp"], target_name="owner/tiny")
    save_speculators(other, heads["speculators"], target_name="owner/tiny")
    save_speculators_mtp(mtp(target, norm_output=True), heads["speculators-mtp"], target_name="owner/tiny")
    several = Eagle3Head(replace(other.config, num_hidden_layers=2), other.token_ids)
    save_eagle3(several, heads["layers"], target_name="owner/tiny")
    save_eagle3(peagle(target), heads["peagle"], target_name="owner/tiny")
    tags = {
        "eagle": ["eagle", "sglang"],
        "layers": ["eagle3", "vllm"],
        "mtp": ["mtp"],
        "peagle": ["peagle", "vllm"],
        "speculators": ["eagle3", "vllm"],
        "speculators-mtp": ["mtp"],
    }
    for kind, (first, *engines) in tags.items():
        card = ModelCard(dry(heads[kind], capsys).split("README.md:\n\n")[1])
        assert card.data.tags == [first, "speculative-decoding", "mlx", *engines]
        assert ("With SGLang" in card.text) == ("sglang" in engines)
        assert ("With vLLM" in card.text) == ("vllm" in engines)
        assert f"eagle-serve --target owner/tiny --head {REPO}" in card.text
    assert "--speculative-algorithm EAGLE --spec" in dry(heads["eagle"], capsys)
    assert "last hidden state" in dry(heads["mtp"], capsys)
    assert re.search(
        '"method": "eagle3", .*, "parallel_drafting": true}\'$', dry(heads["peagle"], capsys), re.MULTILINE
    )


@pytest.mark.parametrize(("kind", "is_loaded"), [("vanilla", True), ("gated", False), ("rnn", False)])
def test_vllm_is_named_only_for_dspark_heads_with_a_vanilla_markov_head(
    kind: str, is_loaded: bool, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for save in (save_deepspec, save_speculators_block):
        folder = tmp_path / save.__name__
        head = dspark(tiny_target(), markov_head=kind)
        head.attach(tiny_target())
        save(head, folder, target_name="owner/tiny")
        assert ("vllm" in dry(folder, capsys)) == is_loaded


def test_the_card_of_an_eagle_31_head_warns_of_old_servers(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for name, flags in {"3": {}, "3.1": {"fc_norm": True, "norm_output": True}}.items():
        head = eagle3(tiny_target(), **flags)
        save_eagle3(head, tmp_path / name, target_name="owner/tiny")
        assert ("EAGLE-3.1" in dry(tmp_path / name, capsys)) == bool(flags)


def test_a_head_for_a_conversion_points_other_servers_to_the_original(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "head"
    save_eagle3(tiny_head(tiny_target()), folder, target_name="mlx-community/Tiny-4bit")
    assert "do not read MLX's conversions: in place of `mlx-community/Tiny-4bit`" in dry(folder, capsys)
    shown = dry(folder, capsys, "--base-model", "owner/Tiny")
    assert "conversions" not in shown
    assert "vllm serve owner/Tiny" in shown
    assert "eagle-serve --target mlx-community/Tiny-4bit" in shown


@pytest.mark.parametrize(
    ("exported", "given", "published"),
    [
        ("owner/Tiny", None, "owner/Tiny"),
        (None, "owner/Tiny", "owner/Tiny"),
        ("owner/Tiny", "owner/Other", "owner/Other"),
        ("/home/me/tiny", "owner/Tiny", "owner/Tiny"),
        (None, None, None),
        ("mlx-community/Tiny-4bit", None, None),
    ],
)
def test_a_speculators_config_names_the_original_model(
    exported: str | None, given: str | None, published: str | None, online: hub_server.Hub, tmp_path: Path
) -> None:
    head, conversion = tiny_head(tiny_target()), "mlx-community/Tiny-4bit"
    head.attach(tiny_target())
    save_speculators(head, tmp_path / "head", target_name=conversion, base_model=exported)
    more = ["--base-model", given] if given else []
    assert main([str(tmp_path / "head"), "--repo", REPO, "--license", "mit", *more]) == 0
    files = online.repos[REPO].files
    config = json.loads(files["config.json"])
    assert config["speculators_config"]["verifier"]["name_or_path"] == published
    assert config["eagle_mlx"]["target"] == conversion
    assert ModelCard(files["README.md"].decode()).data.base_model == (published or conversion)
    assert f"eagle-serve --target {conversion}" in files["README.md"].decode()


def test_another_license_is_named_and_linked(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    head_folder(tmp_path / "head")
    capsys.readouterr()
    other = ["--license", "other", "--license-name", "house-rules", "--license-link", "https://example.org/rules"]
    assert main([str(tmp_path / "head"), "--repo", REPO, "--dry-run", *other]) == 0
    shown = capsys.readouterr()
    assert "note: the hub checks the card and its license id" in shown.err
    data = ModelCard(shown.out.split("README.md:\n\n")[1]).data
    assert (data.license, data.license_name, data.license_link) == ("other", "house-rules", "https://example.org/rules")


# Figures


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"head_sha256": "0" * 64}, "has results of another head"),
        ({"head": "random", "head_sha256": None}, "has results of another head, random"),
        ({"runs": []}, "has no results of a head"),
        ({"runs": "many"}, "was not written by this version of eagle-bench --json"),
        ({"runs": [{"mode": "eagle"}]}, "was not written by this version of eagle-bench --json"),
    ],
)
def test_figures_of_another_head_are_refused(
    made: Made, tmp_path: Path, capsys: pytest.CaptureFixture[str], change: dict[str, Any], reason: str
) -> None:
    file = tmp_path / "figures.json"
    file.write_text(json.dumps({**json.loads(made.figures.read_text()), **change}))
    error = refused(capsys, str(made.run), *GOES_UP, "--dry-run", "--figures", str(file))
    assert reason in error
    assert "figures.json" in error


def test_several_sets_of_prompts_are_shown(made: Made, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    written = json.loads(made.figures.read_text())
    runs = written["runs"]
    again = [{**run, "batch": 4} for run in runs] + runs + [{**run, "temperature": 0.7} for run in runs]
    (tmp_path / "code.json").write_text(json.dumps({**written, "prompts": "/home/me/code.jsonl", "runs": again}))
    files = ("--figures", str(made.figures), "--figures", str(tmp_path / "code.json"))
    shown = dry(made.run, capsys, "--base-model", "owner/tiny", *files)
    tau_rows = [line for line in shown.splitlines() if line.startswith(("| chats.jsonl |", "| code.jsonl |"))]
    assert [row.split(" | ")[0].strip("| ") for row in tau_rows] == ["chats.jsonl"] * 2 + ["code.jsonl"] * 4
    assert sum(line.startswith("| eagle | 4 |") for line in shown.splitlines()) == 2, "speed is told for every batch"


def test_an_adaptive_draft_length_is_a_maximum(made: Made, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    written = json.loads(made.figures.read_text())
    runs = [{**run, "policy": "throughput"} for run in written["runs"]]
    (tmp_path / "f.json").write_text(json.dumps({**written, "runs": runs}))
    shown = dry(made.run, capsys, "--base-model", "owner/tiny", "--figures", str(tmp_path / "f.json"))
    assert "| up to 2 |" in shown


def test_the_interval_of_a_measurement_is_published(made: Made, tmp_path: Path, capsys: Any) -> None:
    shutil.copytree(made.run, tmp_path / "out")
    report = json.loads((made.run / "report.json").read_text())
    report["acceptance"]["best"] |= {"acceptance_length": 1.83, "interval": 0.124}
    (tmp_path / "out" / "report.json").write_text(json.dumps(report))
    assert "| 2 | 1.83 ± 0.12 |" in dry(tmp_path / "out", capsys, "--base-model", "owner/tiny")


def test_only_the_best_head_of_a_rejected_adaptation_is_called_unchanged(
    made: Made, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    shutil.copytree(made.run, tmp_path / "out")
    report = json.loads((made.run / "report.json").read_text())
    for taken, best, last in (
        (False, "a, which it is, unchanged", "a, and not better by the judge: τ"),
        (True, "a: τ", "a: τ"),
    ):
        report["adapted"] = {"from": "a", "taken": taken, "summary": "τ 1 to 2"}
        (tmp_path / "out" / "report.json").write_text(json.dumps(report))
        for name, text in (("best", best), ("last", last)):
            shown = dry(tmp_path / "out" / name, capsys, "--base-model", "owner/tiny")
            assert f"| adapted from | {text}" in shown


def test_every_mode_of_the_benchmark_is_explained(made: Made, tmp_path: Path, capsys: Any) -> None:
    written = json.loads(made.figures.read_text())
    runs = written["runs"] + [{**written["runs"][0], "mode": mode} for mode in get_args(ModeName)]
    (tmp_path / "f.json").write_text(json.dumps({**written, "runs": runs}))
    shown = dry(made.run, capsys, "--base-model", "owner/tiny", "--figures", str(tmp_path / "f.json"))
    assert all(f"`{mode}` is " in shown for mode in get_args(ModeName))


# Recipes and texts for others


def test_the_command_of_a_run_makes_the_same_settings(made: Made) -> None:
    config = json.loads((made.run / "report.json").read_text())["config"]
    words = shlex.split(train_command(config, "owner/tiny"))
    again = load_config(None, vars(train_parser().parse_args(words[1:])))
    shown = {**config, "target": "owner/tiny", "data": ["chats.jsonl"], "output": TrainConfig().run.output}
    written = json.loads(json.dumps(again.flat()))
    assert {name for name in config if written[name] != shown[name]} <= {"states"}, (
        "where states were kept is no setting"
    )


def test_the_command_of_a_run_from_shards_names_no_other_data() -> None:
    config = json.loads(json.dumps(public_settings(TrainConfig.of(shards=["/home/me/a", "b"]))))
    assert train_command(config, "owner/tiny") == "eagle-train --target owner/tiny --shards a --shards b"
    again = load_config(None, vars(train_parser().parse_args(["--shards", "a", "--shards", "b"])))
    assert again.data.shards == ("a", "b")


def test_data_sets_of_the_hub_are_named(made: Made) -> None:
    source = read_source(made.run)
    data = ["builtin:python", "HuggingFaceH4/ultrachat_200k:train_sft", "/home/me/chats.jsonl"]
    told = replace(source, report={"config": {"data": data}})
    assert data_sets(told) == ["HuggingFaceH4/ultrachat_200k"]
    assert data_sets(replace(source, report={"config": {"data": data, "shards": "x"}})) == []
    mix = ["preset:gsm8k=0.5", "openai/gsm8k:main:train=0.2", "user/name:train[:10%]+test=0.2", "folder=0.1"]
    assert data_sets(replace(source, report={"config": {"data": mix}})) == ["openai/gsm8k", "user/name"]


def test_a_report_names_no_folder_of_this_machine() -> None:
    models = {"target": "/home/me/tiny", "init_from": "you/head", "adapter_path": "/home/me/adapters"}
    data = ["/home/me/a.jsonl=0.5", "user/name:train=0.5"]
    more = {"map": ["/home/me/a.jsonl:prompt=q"], "eval_data": "~/b.parquet"}
    public = public_settings(TrainConfig.of(**models, **more, data=data, output="/home/me/out", cache_dir="x/y"))
    assert (public["target"], public["init_from"], public["adapter_path"]) == ("tiny", "you/head", "adapters")
    assert public["data"] == ("a.jsonl=0.5", "user/name:train=0.5")
    assert public["map"] == ("a.jsonl:prompt=q",)
    assert (public["eval_data"], public["output"], public["cache_dir"]) == ("b.parquet", "out", "y")
    assert public_settings(TrainConfig()) == TrainConfig().flat() | {"output": "head"}


def test_commands_are_shown_with_public_names() -> None:
    command = "/usr/bin/eagle-bench --head out/x --depth 1 2 --json f.json --quiet --target=/m/t --batch 4"
    more = " --prompts '/my chats/a.jsonl' --adapter-path=/m/b --draft-model you/small"
    shown = bench_command(command + more, "o/t", "u/h")
    assert shown == (
        "eagle-bench --target o/t --head u/h --depth 1 2 --batch 4 --prompts a.jsonl --adapter-path=b "
        "--draft-model you/small"
    )


def test_a_folder_without_a_head_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="there is no folder"):
        read_source(tmp_path / "none")
    with pytest.raises(ConfigError, match="has neither a head"):
        read_source(tmp_path)
    save_eagle3(tiny_head(tiny_target()), tmp_path / "last", target_name="owner/tiny")
    with pytest.raises(ConfigError, match=rf"of a run without {tmp_path}/best, name {tmp_path}/last"):
        read_source(tmp_path)
    assert read_source(tmp_path / "last")


def test_the_card_of_a_quantized_head_names_no_other_server(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    head = tiny_head(tiny_target())
    quantize(head, 4, 32)
    save_eagle3(head, tmp_path / "head", target_name="owner/tiny")
    card = ModelCard(dry(tmp_path / "head", capsys).split("README.md:\n\n")[1])
    assert card.data.tags == ["eagle3", "speculative-decoding", "mlx", "4-bit"]
    assert "With SGLang" not in card.text
    assert "With vLLM" not in card.text
    assert "| type | 4-bit weights in groups of 32 |" in card.text


def test_figures_of_a_quantized_head_say_so(made: Made, tmp_path: Path) -> None:
    written = json.loads(made.figures.read_text()) | {"head_quantization": {"group_size": 64, "bits": 4}}
    (tmp_path / "figures.json").write_text(json.dumps(written))
    source = read_source(made.run)
    assert "the head quantized to 4 bits" in of_bench(tmp_path / "figures.json", source, REPO, "owner/tiny").method
    assert "quantized" not in of_bench(made.figures, source, REPO, "owner/tiny").method


def test_a_certificate_is_published_with_the_head_that_it_is_of(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = head_folder(tmp_path / "head")
    flags = ("--base-model", "owner/tiny")
    assert "certificate.json" not in dry(folder, capsys, *flags)
    file = folder / "certificate.json"
    file.write_text(json.dumps({"head_sha256": hub.weights_digest(folder)}))
    assert "  certificate.json" in dry(folder, capsys, *flags)
    file.write_text(json.dumps({"head_sha256": "another"}))
    assert main([str(folder), *GOES_UP, "--dry-run"]) == 0
    shown = capsys.readouterr()
    assert "  certificate.json" not in shown.out
    assert f"{file} is of other weights and is not uploaded" in shown.err
