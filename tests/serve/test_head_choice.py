"""Which head drafts if none is named, for local folders and with a stand-in of the hub."""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path

import mlx.core as mx
import pytest
from huggingface_hub import constants

import eagle_mlx as em
from eagle_mlx import hub
from eagle_mlx.catalog import embedded, head_search
from eagle_mlx.catalog.head_search import KnownHead, records, register
from eagle_mlx.catalog.models import described_target
from eagle_mlx.errors import ConfigError, EagleError
from eagle_mlx.heads.eagle3 import save_eagle3
from eagle_mlx.serve.generate import main as generate
from eagle_mlx.serve.heads import main as heads
from eagle_mlx.serve.speculation import AUTO, Speculation, load_proposer
from eagle_mlx.target import Target
from tests import hub_server
from tests.fakes import embedded_tokenizer, tiny_config, tiny_head, tiny_target, tiny_target_folder
from tests.full import in_full

HEAD, TARGET = "someone/tiny-eagle3", "makers/tiny"
ABOUT = f"{HEAD}, EAGLE-3 for {TARGET}, license mit, size unknown, revision unknown"


@pytest.fixture(autouse=True)
def table(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Provide a separate registry, and one published head for the tiny target."""
    monkeypatch.setenv("EAGLE_MLX_CACHE", str(tmp_path / "registry"))
    published = (KnownHead(TARGET, HEAD, "eagle3", "mit", "https://example.org/table"),)
    monkeypatch.setattr(head_search, "known_heads", lambda: published)
    monkeypatch.setattr(hub, "recorded_heads", lambda: {HEAD: {"license": "mit"}})


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Make `target`, a `head` for it, and `other`, a head for a model of another size."""
    root = tmp_path_factory.mktemp("models")
    tiny_target_folder(root / "target")
    target = tiny_target(tokenizer=True)
    save_eagle3(tiny_head(target, draft_vocab=64), root / "head", target_name="tiny")
    save_eagle3(tiny_head(tiny_target(hidden=64, tokenizer=True)), root / "other", target_name="tiny")
    return root


@pytest.fixture(scope="module")
def target(models: Path) -> Target:
    return em.load_target(models / "target", mx.float32)


def files_of(folder: Path) -> dict[str, bytes]:
    return {file.name: file.read_bytes() for file in folder.iterdir()}


def card(license: str) -> dict[str, bytes]:
    return {"README.md": f"---\nlicense: {license}\n---\n".encode()}


def chosen(
    target: Target, name: Path | str, **settings: object
) -> tuple[Speculation, em.HeadProposer | None, list[str]]:
    lines: list[str] = []
    speculation = Speculation(**{"head": AUTO, **settings})  # type: ignore[arg-type]
    resolved, proposer = load_proposer(speculation, target, name, lines.append)
    return resolved, getattr(proposer, "model", proposer), lines


def test_a_head_trained_here_drafts(models: Path, target: Target) -> None:
    register(models / "head", models / "target", "trained", acceptance_length=2.5)
    speculation, proposer, lines = chosen(target, models / "target")
    assert isinstance(proposer, em.HeadProposer)
    assert speculation.head == str(models / "head")
    assert lines == [f"head: {models}/head, trained here for target (τ 2.50)"]


def test_a_head_without_gain_is_used_only_by_name(
    models: Path, target: Target, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    save_eagle3(tiny_head(tiny_target(tokenizer=True), draft_vocab=64), tmp_path / "test", target_name="tiny")
    register(tmp_path / "test", models / "target", "trained", acceptance_length=1.0, prompts=3)
    _, proposer, lines = chosen(target, models / "target")
    assert isinstance(proposer, em.NgramProposer)
    assert f"head: {tmp_path}/test, trained here for target (τ 1.00 on 3 prompts) is not offered" in lines[0]
    assert heads(["find", str(models / "target")]) == 1
    assert "is not offered" in capsys.readouterr().err
    _, proposer, _ = chosen(target, models / "target", head=str(tmp_path / "test"))
    assert isinstance(proposer, em.HeadProposer)
    register(models / "head", models / "target", "trained", acceptance_length=1.4, prompts=90)
    speculation, _, lines = chosen(target, models / "target")
    assert speculation.head == str(models / "head")
    assert lines[1] == f"head: {models}/head, trained here for target (τ 1.40 on 90 prompts)"


def test_a_head_that_does_not_fit_is_skipped_with_the_reason(models: Path, target: Target) -> None:
    register(models / "head", models / "target", "trained")
    register(models / "other", models / "target", "trained")
    speculation, proposer, lines = chosen(target, models / "target")
    assert speculation.head == str(models / "head")
    assert isinstance(proposer, em.HeadProposer)
    assert len(lines) == 2
    assert f"other is skipped: head {models}/other expects a target of hidden size 64 but the target has 32" in lines[0]


def test_without_a_head_ngrams_draft(models: Path, target: Target) -> None:
    speculation, proposer, lines = chosen(target, models / "target")
    assert isinstance(proposer, em.NgramProposer)
    assert (speculation.resolved_mode(), speculation.head) == ("ngram", None)
    assert len(lines) == 1
    assert "none found for" in lines[0]


@pytest.mark.parametrize("mode", ["eagle", "mtp"])
def test_a_requested_mode_without_a_head_is_an_error(models: Path, target: Target, mode: str) -> None:
    if mode == "mtp":
        register(models / "head", models / "target", "trained")  # the other kind
    with pytest.raises(ConfigError, match=f"--spec-decode {mode}: no head is known"):
        chosen(target, models / "target", mode=mode)


def test_without_speculation_no_head_is_searched_for(models: Path, target: Target) -> None:
    register(models / "head", models / "target", "trained")
    for settings in ({"mode": "none"}, {"num_tokens": 0}):
        assert chosen(target, models / "target", **settings)[1:] == (None, [])


def test_for_a_folder_a_published_head_is_named_and_not_fetched(
    models: Path, target: Target, online: hub_server.Hub, tmp_path: Path
) -> None:
    online.put(HEAD, files_of(models / "head"))
    folder = tiny_target_folder(tmp_path / "tiny-4bit")
    _, proposer, lines = chosen(target, folder)
    assert isinstance(proposer, em.NgramProposer)
    assert f"to fetch it: eagle-heads pull {HEAD}" in lines[0]
    assert online.requests == []
    assert heads(["pull", HEAD]) == 0
    assert [(record.head, record.names, record.origin) for record in records()] == [(HEAD, (TARGET,), "fetched")]
    speculation, proposer, lines = chosen(target, folder)
    assert isinstance(proposer, em.HeadProposer)
    assert speculation.head == HEAD
    assert lines == [f"head: {HEAD}, fetched here for {TARGET}"]


def test_for_a_hub_id_a_published_head_is_fetched_with_it(
    models: Path, target: Target, online: hub_server.Hub, capsys: pytest.CaptureFixture[str]
) -> None:
    online.put(HEAD, {**files_of(models / "head"), **card("mit")})
    online.put("mlx-community/tiny-4bit", files_of(models / "target"))
    hub.resolve("tiny-4bit")
    speculation, proposer, lines = chosen(target, "tiny-4bit")
    assert isinstance(proposer, em.HeadProposer)
    assert (speculation.head, speculation.resolved_mode()) == (HEAD, "eagle")
    assert f"fetching {HEAD}: license mit, size 0.00 GB, revision {online.repos[HEAD].sha}" in capsys.readouterr().err
    assert lines == [f"head: {ABOUT}"]


def test_a_head_whose_license_has_changed_on_the_hub_is_not_fetched_unasked(
    models: Path, target: Target, online: hub_server.Hub
) -> None:
    online.put(HEAD, {**files_of(models / "head"), **card("cc-by-nc-4.0")})
    _, proposer, lines = chosen(target, TARGET)
    assert isinstance(proposer, em.NgramProposer)
    assert "its license is cc-by-nc-4.0, so it is fetched only if you name it" in lines[0]
    assert not [request for request in online.requests if "/resolve/" in request]
    assert isinstance(chosen(target, TARGET, head=HEAD)[1], em.HeadProposer)


@pytest.mark.parametrize("answers", [True, False])
def test_a_recorded_license_counts_only_for_a_recorded_commit(
    models: Path, target: Target, online: hub_server.Hub, monkeypatch: pytest.MonkeyPatch, answers: bool
) -> None:
    recorded = {"license": "mit", "size": "unknown", "revision": "unknown"}
    monkeypatch.setattr(hub, "recorded_heads", lambda: {HEAD.lower(): recorded})
    online.put(HEAD, files_of(models / "head"))
    if not answers:
        monkeypatch.setattr("huggingface_hub.HfApi.model_info", unreachable)
    _, proposer, lines = chosen(target, TARGET)
    assert isinstance(proposer, em.NgramProposer)
    reason = "its license is unknown, so it is fetched only if you name it" if answers else "the hub does not answer"
    assert reason in lines[0]
    recorded["revision"] = online.repos[HEAD].sha
    assert isinstance(chosen(target, TARGET)[1], em.HeadProposer if answers else em.NgramProposer)


def unreachable(*_: object, **__: object) -> None:
    raise OSError("the hub does not answer")


@pytest.mark.parametrize("place", ["hub id", "folder", "in the cache"])
def test_a_head_without_a_known_license_is_used_only_by_name(
    models: Path,
    target: Target,
    online: hub_server.Hub,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    place: str,
) -> None:
    published = (KnownHead(TARGET, HEAD, "eagle3", "unknown", "https://example.org/table"),)
    monkeypatch.setattr(head_search, "known_heads", lambda: published)
    online.put(HEAD, files_of(models / "head"))
    if place == "in the cache":  # of another program
        hub.resolve(HEAD)
    requests = len(online.requests)
    name = tiny_target_folder(models / "tiny-4bit") if place == "folder" else TARGET
    _, proposer, lines = chosen(target, name)
    assert isinstance(proposer, em.NgramProposer)
    about = f"{HEAD}, EAGLE-3 for {TARGET}, license unknown, size unknown, revision unknown"
    assert lines[0] == f"head: {about}: it is used only if you name it; type --head {HEAD}"
    assert len(online.requests) == requests
    assert isinstance(chosen(target, name, head=HEAD)[1], em.HeadProposer)
    assert heads(["pull", TARGET]) == 2
    assert f"name one: eagle-heads pull {HEAD} (license unknown)" in capsys.readouterr().err
    assert heads(["pull", HEAD]) == 0
    assert chosen(target, name)[0].head == HEAD, "a user who fetched it has named it"


def test_a_head_with_a_known_license_is_taken_before_one_without(
    models: Path, target: Target, online: hub_server.Hub, monkeypatch: pytest.MonkeyPatch
) -> None:
    table = [(f"someone/tiny-{license}", license) for license in ("nvidia-open-model-license", "unknown", "apache-2.0")]
    published = tuple(KnownHead(TARGET, head, "eagle3", license, "https://example.org") for head, license in table)
    monkeypatch.setattr(head_search, "known_heads", lambda: published)
    for head, license in table:
        online.put(head, {**files_of(models / "head"), **card(license)})
    speculation, _, lines = chosen(target, TARGET)
    assert speculation.head == "someone/tiny-apache-2.0"
    assert [line.split(",")[0] for line in lines] == [
        "head: someone/tiny-nvidia-open-model-license",
        "head: someone/tiny-apache-2.0",
    ]


@pytest.mark.parametrize("command", ["--head", "auto", "pull", "show", "library"])
def test_license_size_and_revision_are_printed_before_the_first_byte_of_a_head(
    models: Path, target: Target, online: hub_server.Hub, capsys: pytest.CaptureFixture[str], command: str
) -> None:
    online.put(HEAD, {**files_of(models / "head"), **card("mit"), "model.safetensors": b"x" * 20_000_000})
    with suppress(EagleError):  # of weights that are none
        if command in ("pull", "show"):
            heads([command, HEAD])
        elif command == "library":
            em.load_head(HEAD, target)
        else:
            chosen(target, TARGET, head=HEAD if command == "--head" else AUTO)
    notice = f"fetching {HEAD}: license mit, size 0.02 GB, revision {online.repos[HEAD].sha}"
    assert capsys.readouterr().err.splitlines().count(notice) == 1
    names = [request.rpartition("/")[2] for request in online.requests]
    assert names[0] == "tiny-eagle3"
    assert "model.safetensors" in names


def test_a_recorded_revision_is_fetched_and_no_other(
    models: Path, online: hub_server.Hub, monkeypatch: pytest.MonkeyPatch
) -> None:
    online.put(HEAD, files_of(models / "head"))
    commit = online.repos[HEAD].sha
    monkeypatch.setattr(hub, "recorded_heads", lambda: {HEAD: {"revision": commit}})
    assert hub.resolve(HEAD).name == commit
    assert hub.cached(HEAD) == hub.resolve(HEAD)
    paths = [request for request in online.requests if "/resolve/" in request]
    assert paths
    assert all(f"/resolve/{commit}/" in path for path in paths)


def test_a_head_without_a_recorded_revision_stays_as_it_was_fetched_first(
    models: Path, online: hub_server.Hub, monkeypatch: pytest.MonkeyPatch
) -> None:
    online.put(HEAD, files_of(models / "head"))
    monkeypatch.setattr(hub, "recorded_heads", lambda: {HEAD: {"revision": hub.UNKNOWN}})
    first = hub.resolve(HEAD)
    assert first.name == online.repos[HEAD].sha
    online.repos[HEAD].commits.append("another head under the same name")
    online.requests.clear()
    assert hub.resolve(HEAD) == hub.cached(HEAD) == first
    assert not [request for request in online.requests if "/resolve/main/" in request]


def test_without_a_network_ngrams_draft_and_the_reason_is_printed(
    models: Path, target: Target, online: hub_server.Hub, monkeypatch: pytest.MonkeyPatch
) -> None:
    online.put("mlx-community/tiny-4bit", files_of(models / "target"))
    hub.resolve("tiny-4bit")
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    _, proposer, lines = chosen(target, "tiny-4bit")
    assert isinstance(proposer, em.NgramProposer)
    assert lines[0].startswith(f"head: {ABOUT}, but it cannot be fetched now:")
    assert "hub cannot be reached" in lines[0]
    assert len(lines) == 2


def test_generate_reports_the_head_that_it_found(models: Path, capsys: pytest.CaptureFixture[str]) -> None:
    flags = ["def f(x):", "--target", str(models / "target"), "--max-tokens", "12"]
    assert generate([*flags, "--head", "none"]) == 0
    text = capsys.readouterr().out
    register(models / "head", models / "target", "trained")
    assert generate(flags) == 0
    out, err = capsys.readouterr()
    assert out == text
    assert f"head: {models}/head, trained here for target" in err
    assert f"speculation: eagle head {models}/head" in err


def test_the_included_head_for_a_real_model_is_used(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The model has SmolLM2's widths that the head depends on, with random weights."""
    shape = {**tiny_config(layers=30, hidden=576, vocab=49_152), "intermediate_size": 64}
    target = Target(described_target("smollm2-135m-instruct", shape).model, embedded_tokenizer())
    target.model.model.embed_tokens.weight = mx.tile(mx.random.normal((48, 576)), (1024, 1))
    monkeypatch.setattr("eagle_mlx.head_check.TOKENS", in_full(64, 2))
    speculation, proposer, lines = chosen(target, tiny_target_folder(tmp_path / "smollm2-135m-instruct"))
    assert speculation.head == str(embedded("smollm2-135m-instruct"))
    assert isinstance(proposer, em.HeadProposer)
    assert lines == ["head: the included head for HuggingFaceTB/SmolLM2-135M-Instruct (τ 2.08 on 48 prompts)"]


# eagle-heads


def test_list_shows_local_and_published_heads(models: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert heads(["list"]) == 0
    assert "  the included head for HuggingFaceTB/SmolLM2-135M-Instruct" in capsys.readouterr().out
    register(models / "head", models / "target", "trained")
    assert heads(["list"]) == 0
    out = capsys.readouterr().out
    assert f"  {models}/head, trained here for target" in out
    assert f"  {ABOUT}" in out


def test_find_prints_the_command_and_fails_if_there_is_no_head(capsys: pytest.CaptureFixture[str]) -> None:
    assert heads(["find", "mlx-community/tiny-8bit"]) == 0
    assert capsys.readouterr().out == f"{ABOUT}; to use it: eagle-heads pull {HEAD}\n"
    assert heads(["find", "someone/else"]) == 1
    assert "no head is known for someone/else" in capsys.readouterr().err
    assert heads(["find", "./else"]) == 2
    assert capsys.readouterr().err == "error: there is no folder ./else\n"


def test_pull_accepts_the_target_name_too(
    models: Path, online: hub_server.Hub, capsys: pytest.CaptureFixture[str]
) -> None:
    online.put(HEAD, files_of(models / "head"))
    assert heads(["pull", "tiny-4bit"]) == 0
    out, err = capsys.readouterr()
    assert Path(out.strip()) == hub.cached(HEAD)
    assert "license mit, size unknown, revision unknown, by https://example.org/table" in err
    assert [record.names for record in records()] == [(TARGET,)]


def test_a_folder_cannot_be_pulled(
    models: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(models.parent)
    assert heads(["pull", name := f"{models.name}/target"]) == 2  # it looks like a hub id
    assert f"error: {name} is not a hub id" in capsys.readouterr().err


def test_pull_of_an_unknown_head(models: Path, online: hub_server.Hub, capsys: pytest.CaptureFixture[str]) -> None:
    online.put("user/mine", files_of(models / "head"))
    assert heads(["pull", "user/mine", "--target", "makers/other"]) == 0
    assert [(record.head, record.names[0]) for record in records()] == [("user/mine", "makers/other")]
    online.put("user/model", {"config.json": b'{"num_hidden_layers": 36}', "model.safetensors": b"x"})
    assert heads(["pull", "user/model"]) == 2
    err = capsys.readouterr().err
    assert "is a model with 36 layers, not a head" in err
    assert "fetching user/model: license unknown, size 0.00 GB, revision " in err
    assert "/api/" in next(request for request in online.requests if "user/model" in request)
    assert hub.cached("user/model") is None


def test_pull_without_a_network(capsys: pytest.CaptureFixture[str]) -> None:
    assert heads(["pull", HEAD]) == 2
    err = capsys.readouterr().err
    assert f"{HEAD} is not in the hub's cache, and the hub cannot be reached" in err
    assert "Traceback" not in err
    assert heads(["pull", "./folder"]) == 2
    assert "give it to eagle-serve with --head" in capsys.readouterr().err
