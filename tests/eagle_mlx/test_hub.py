"""Names of models, what is downloaded for them, and what is published."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import mlx.core as mx
import numpy as np
import pytest
from huggingface_hub import constants
from mlx_lm.utils import DEFAULT_ALLOW_PATTERNS

import eagle_mlx as em
from eagle_mlx import hub
from eagle_mlx.errors import EagleError, OutputError
from eagle_mlx.formats.tensors import read_tensors
from eagle_mlx.heads.eagle3 import save_eagle3
from eagle_mlx.hub import UnreachableError
from tests import hub_server
from tests.eagle_mlx.test_formats_torch import Storage, tensor, torch_file
from tests.fakes import tiny_head, tiny_target


def test_a_local_folder_is_used_as_it_is(tmp_path: Path) -> None:
    assert hub.resolve(tmp_path) == tmp_path
    assert hub.resolve(str(tmp_path)) == tmp_path


@pytest.mark.parametrize(
    ("name", "repo"),
    [
        ("Qwen3-32B-4bit", "mlx-community/Qwen3-32B-4bit"),
        ("someone/model", "someone/model"),
        ("/no/such/folder", None),
        ("./model", None),
        ("a/b/c", None),
        ("", None),
        *(
            (name, None)
            for name in ("~/model", "model/", "my model", "models (2)/x", r"C:\models", "x" * 100, "a\ud800")
        ),
    ],
)
def test_hub_ids(name: str, repo: str | None) -> None:
    assert hub.hub_id(name) == repo


def test_a_bare_name_is_fetched_from_the_community(online: hub_server.Hub) -> None:
    online.put("mlx-community/Qwen3-32B-4bit", {"model.safetensors": b"weights"})
    assert files_of(hub.resolve("Qwen3-32B-4bit")) == {"model.safetensors"}


def test_without_a_network_the_error_says_what_was_tried() -> None:
    with pytest.raises(EagleError, match=r"no-such-model-here is not a local folder.*hub cannot be reached"):
        hub.resolve("someone/no-such-model-here")


def test_a_missing_path_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(EagleError, match="there is no folder"):
        hub.resolve(tmp_path / "none")
    (tmp_path / "file").write_text("")
    with pytest.raises(EagleError, match="is a file"):
        hub.resolve(tmp_path / "file")


def test_public_names_have_no_paths(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "models" / "mine").mkdir(parents=True)
    monkeypatch.chdir(tmp_path)
    assert hub.public_name(tmp_path / "models" / "mine") == "mine"
    assert hub.public_name("models/mine") == "mine"
    assert hub.public_name("models/../models/mine/") == "mine"
    assert hub.public_name("Qwen/Qwen3-4B") == "Qwen/Qwen3-4B"
    assert hub.public_name("Qwen3-4B-4bit") == "mlx-community/Qwen3-4B-4bit"


# From a hub


def folder_of(path: Path, **files: str) -> Path:
    path.mkdir(parents=True)
    for name, text in {"README.md": "---\nlicense: mit\n---\n# A head\n", "config.json": "{}", **files}.items():
        (path / name).write_text(text)
    return path


def files_of(folder: Path) -> set[str]:
    return {file.name for file in folder.iterdir()}


def test_torch_files_are_fetched_only_without_safetensors(online: hub_server.Hub) -> None:
    torch = {"pytorch_model.bin": b"weights", "training_args.bin": b"code", "config.json": b"{}"}
    online.put("user/torch", dict(torch))
    online.put("user/both", {**torch, "model.safetensors": b"weights"})
    assert files_of(hub.resolve("user/torch")) == {"pytorch_model.bin", "config.json"}
    assert files_of(hub.resolve("user/both")) == {"model.safetensors", "config.json"}


def test_weights_are_fetched_once(online: hub_server.Hub) -> None:
    """Publishers put the same weights into a repository in several layouts; mlx-lm reads one of them."""
    wanted = {"model-00001-of-00001.safetensors", "mtp.safetensors", "config.json", "tokenizer.model", "merges.txt"}
    others = {"consolidated.safetensors", "consolidated.00.pth", "params.Q4.gguf", "modeling.py"}
    below = {"original/model.safetensors", "original/consolidated.00.pth", "onnx/model.onnx", "metal/model.bin"}
    online.put("user/model", dict.fromkeys(wanted | others | below, b"x"))
    assert files_of(hub.resolve("user/model")) == wanted


def test_code_is_fetched_only_if_it_is_trusted(online: hub_server.Hub) -> None:
    online.put("user/model", {"model.safetensors": b"x", "modeling.py": b"x", "config.json": b"{}"})
    assert "modeling.py" not in files_of(hub.resolve("user/model"))
    assert "modeling.py" in files_of(hub.resolve("user/model", code=True))


def test_everything_that_mlx_lm_fetches_is_fetched(online: hub_server.Hub) -> None:
    files = {pattern.replace("*", "x") for pattern in DEFAULT_ALLOW_PATTERNS}
    online.put("user/model", dict.fromkeys(files | {"additional_chat_templates/tool_use.jinja"}, b"x"))
    assert files == {*files_of(hub.resolve("user/model")), "x.py"} - {"additional_chat_templates"}
    assert (hub.resolve("user/model") / "additional_chat_templates" / "tool_use.jinja").exists()


def test_cached_models_need_no_network(online: hub_server.Hub, monkeypatch: pytest.MonkeyPatch) -> None:
    online.put("user/torch", {"pytorch_model.bin": b"weights", "config.json": b"{}"})
    there = hub.resolve("user/torch")
    requests = len(online.requests)
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    assert hub.resolve("user/torch") == there
    assert len(online.requests) == requests


def test_the_rest_of_a_model_is_announced_like_a_whole_one(
    online: hub_server.Hub, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """After Ctrl-C in a download, or if a command needed only some files of it."""
    parts = [f"model-0000{number}-of-00002.safetensors" for number in (1, 2)]
    online.put("user/model", {**dict.fromkeys(parts, b"x" * 1000), "config.json": b"{}"})
    for file in ("config.json", parts[0]):
        hub.fetch_file("user/model", file)
    assert hub.cached("user/model") is not None
    assert hub.cached("user/model", whole=True) is None
    hub.resolve("user/model")
    notice = f"fetching user/model: license unknown, size 0.00 GB, revision {online.repos['user/model'].sha}\n"
    assert capsys.readouterr().err == notice
    assert hub.cached("user/model", whole=True) is not None
    hub.resolve("user/model")
    assert capsys.readouterr().err == ""
    online.put("user/odd", {parts[0]: b"x", "config.json": b"{}"})
    folder = hub.resolve("user/odd")
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    assert hub.resolve("user/odd") == folder


@pytest.mark.parametrize(
    ("access", "token", "reason"),
    [
        ({"gated": True}, hub_server.READ, "user/head is gated: request access at .*/user/head"),
        ({"private": True}, None, "if it is private, log in with `hf auth login`, or set HF_TOKEN"),
        ({}, "hf_wrong", "the hub does not know the token used for user/head"),
    ],
)
def test_no_access_to_a_repository_is_an_error(
    online: hub_server.Hub,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    access: dict[str, bool],
    token: str | None,
    reason: str,
) -> None:
    online.put("user/head", {"config.json": b"{}"}, **access)
    hub_server.use(monkeypatch, online.base, tmp_path / "huggingface", token)
    with pytest.raises(EagleError, match=reason) as told:
        hub.resolve("user/head")
    assert "\n" not in str(told.value)


def test_a_hub_that_cannot_be_reached_is_asked_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """huggingface_hub would ask six times, in 23 seconds and with eleven lines."""
    hub_server.use(monkeypatch, "http://127.0.0.1:9", tmp_path / "huggingface")
    monkeypatch.setattr(hub, "recorded_heads", lambda: {"user/recorded": {"revision": "0" * 40}})
    monkeypatch.setattr(time, "sleep", lambda _: pytest.fail("it waits to ask again"))
    for name in ("user/head", "user/recorded"):
        with pytest.raises(UnreachableError, match=f"{name} is not in the hub's cache, and the hub cannot be reached"):
            hub.resolve(name)
    with pytest.raises(UnreachableError, match=r"config.json of user/head is not in the hub's cache"):
        hub.fetch_file("user/head", "config.json")
    assert capfd.readouterr().err == ""


@pytest.fixture
def ctrl_c() -> Iterator[None]:
    """Let SIGINT raise KeyboardInterrupt, which a shell's background jobs ignore."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.mark.usefixtures("ctrl_c")
def test_ctrl_c_ends_a_download_before_its_files_are_whole(online: hub_server.Hub) -> None:
    weights = b"weights" * 100
    online.put("user/head", {"model.safetensors": weights, "config.json": b"{}"})
    online.is_slow = True

    def interrupt() -> None:
        while not any("GET" in request and request.endswith(".safetensors") for request in online.requests):
            time.sleep(0.01)
        os.kill(os.getpid(), signal.SIGINT)

    sender = threading.Thread(target=interrupt, daemon=True)
    sender.start()
    began = time.monotonic()
    with pytest.raises(KeyboardInterrupt):
        hub.resolve("user/head")
    sender.join()
    assert time.monotonic() - began < len(weights) / 20 / 2
    online.is_slow = False
    assert (hub.resolve("user/head") / "model.safetensors").read_bytes() == weights


# Publishing


@pytest.mark.parametrize("xet", [False, True])
def test_a_folder_is_published_in_one_commit(
    online: hub_server.Hub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, xet: bool
) -> None:
    """With hf_xet, huggingface_hub uses another path, which may commit several times."""
    monkeypatch.setattr(constants, "HF_HUB_DISABLE_XET", not xet)
    online.keep_apart = not xet  # the stand-in has no store for xet's chunks
    folder = folder_of(tmp_path / "head", **{"model.safetensors": "weights"})
    done = hub.publish_head(folder, "user/head", message="First")
    repo = online.repos["user/head"]
    assert repo.commits == ["First"]
    assert not repo.private
    assert {name: content.decode() for name, content in repo.files.items() if name != ".gitattributes"} == {
        file.name: file.read_text() for file in folder.iterdir()
    }
    assert (done.repo_url, done.oid) == (f"{online.base}/user/head", repo.sha)


def test_a_newer_head_replaces_an_older_one(online: hub_server.Hub, tmp_path: Path) -> None:
    older = {"model-00001-of-00002.safetensors": b"a", "pytorch_model.bin": b"b", "plots/loss.png": b"c"}
    online.put("user/head", {**older, "notes.md": b"kept", "onnx/model.safetensors": b"kept", "config.json": b"old"})
    folder = folder_of(tmp_path / "head", **{"model.safetensors": "weights"})
    with pytest.raises(OutputError, match=r"user/head already exists and has config.json, .*--overwrite"):
        hub.publish_head(folder, "user/head")
    assert online.repos["user/head"].commits == ["first"]
    hub.publish_head(folder, "user/head", overwrite=True)
    repo = online.repos["user/head"]
    assert len(repo.commits) == 2
    assert set(repo.files) == {"README.md", "config.json", "model.safetensors", "notes.md", "onnx/model.safetensors"}
    assert repo.files["config.json"] == b"{}"


def test_a_repository_that_is_empty_is_filled(online: hub_server.Hub, tmp_path: Path) -> None:
    online.put("user/head", {".gitattributes": b""})
    hub.publish_head(folder_of(tmp_path / "head"), "user/head")
    assert "config.json" in online.repos["user/head"].files
    assert online.created() == []


def test_private_is_kept_private(online: hub_server.Hub, tmp_path: Path) -> None:
    folder = folder_of(tmp_path / "head")
    hub.publish_head(folder, "user/secret", private=True)
    assert online.repos["user/secret"].private
    online.put("user/open", {})
    with pytest.raises(OutputError, match="user/open already exists and is public; .* leave out --private"):
        hub.publish_head(folder, "user/open", private=True)
    assert online.repos["user/open"].files == {}


@pytest.mark.parametrize(
    ("repo", "token", "reason"),
    [
        ("user/head", None, "no token with write access .*HF_TOKEN.*--token"),
        ("user/head", "hf_wrong", "the hub does not know the token used for user/head .*; nothing was published"),
        ("user/head", hub_server.READ, "user/head is not open to this token .*log in with"),
        ("other/head", hub_server.WRITE, "other/head is not open to this token .*you may not write to other"),
        ("head", hub_server.WRITE, "write it as user/head"),
        ("a/b/c", hub_server.WRITE, "'a/b/c' is not a valid repository name"),
        ("user/--head", hub_server.WRITE, "is not a valid repository name"),
    ],
)
def test_reasons_against_publishing_are_one_line(
    online: hub_server.Hub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, repo: str, token: str | None, reason: str
) -> None:
    hub_server.use(monkeypatch, online.base, tmp_path / "huggingface", token)
    with pytest.raises(OutputError, match=reason) as told:
        hub.publish_head(folder_of(tmp_path / "head"), repo)
    assert "\n" not in str(told.value)
    assert online.repos == {}


def test_the_token_of_the_login_is_found(
    online: hub_server.Hub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    hub_server.use(monkeypatch, online.base, tmp_path / "huggingface", None)
    login = Path(constants.HF_TOKEN_PATH)
    login.parent.mkdir(parents=True)
    login.write_text(hub_server.WRITE)
    hub.publish_head(folder_of(tmp_path / "head"), "user/head")
    assert "user/head" in online.repos


def test_a_card_that_the_hub_refuses_makes_no_repository(online: hub_server.Hub, tmp_path: Path) -> None:
    folder = folder_of(tmp_path / "head", **{"README.md": "---\nlicense: no-such-license\n---\n"})
    with pytest.raises(OutputError, match=r"user/head at .*must be one of apache-2.0, mit"):
        hub.publish_head(folder, "user/head")
    assert online.repos == {}


@pytest.mark.parametrize("what", ["refuse_commits", "refuse_large"])
def test_a_failed_upload_leaves_nothing_incomplete(online: hub_server.Hub, tmp_path: Path, what: str) -> None:
    setattr(online, what, True)
    folder = folder_of(tmp_path / "head", **{"model.safetensors": "weights"})
    with pytest.raises(
        OutputError, match="over its quota.*user/head was created but is empty: run the same command again"
    ):
        hub.publish_head(folder, "user/head")
    assert set(online.repos["user/head"].files) == {".gitattributes"}
    setattr(online, what, False)
    hub.publish_head(folder, "user/head")
    assert "model.safetensors" in online.repos["user/head"].files


def test_a_name_taken_by_a_hidden_repository(online: hub_server.Hub, tmp_path: Path) -> None:
    class Hidden(dict[str, hub_server.Repo]):
        def get(self, name: str, default: object = None) -> None:  # type: ignore[override]
            return None

    online.repos = Hidden({"user/head": hub_server.Repo()})
    try:
        with pytest.raises(OutputError, match="user/head is not open to this token"):
            hub.publish_head(folder_of(tmp_path / "head"), "user/head")
    finally:
        online.repos = {}


def test_no_network(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = folder_of(tmp_path / "head")
    hub_server.use(monkeypatch, "http://127.0.0.1:9", tmp_path / "huggingface")
    with pytest.raises(OutputError, match="user/head at http://127.0.0.1:9: .*; nothing was published"):
        hub.publish_head(folder, "user/head")
    with pytest.raises(EagleError, match="the hub cannot be reached"):
        hub.resolve("user/head")
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    with pytest.raises(OutputError, match="offline mode is enabled.*HF_HUB_OFFLINE.*; nothing was published"):
        hub.publish_head(folder, "user/head")


def test_a_digest_tells_heads_apart(tmp_path: Path) -> None:
    first, same, other = (folder_of(tmp_path / name) for name in ("one", "same", "other"))
    for folder, weights in ((first, "a"), (same, "a"), (other, "b")):
        (folder / "model.safetensors").write_text(weights)
    (same / "README.md").write_text("another card")
    assert hub.weights_digest(first) == hub.weights_digest(same) != hub.weights_digest(other)


@pytest.mark.parametrize(
    ("name", "full"), [("Qwen/Qwen3-4B", True), ("Qwen3-4B", False), ("/a/b", False), ("a/b/c", False), ("", False)]
)
def test_full_ids(name: str, full: bool) -> None:
    assert hub.full_id(name) is full


def test_an_existing_folder_is_not_a_hub_id(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "out" / "head").mkdir(parents=True)
    monkeypatch.chdir(tmp_path)
    assert not hub.full_id("out/head")


@pytest.mark.filterwarnings("ignore::eagle_mlx.HeadWarning")
def test_a_head_in_a_torch_file_loads_by_its_id(
    online: hub_server.Hub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    target = tiny_target()
    save_eagle3(tiny_head(target), tmp_path / "h", dtype=mx.float32)
    wanted = em.load_head(tmp_path / "h", target)
    what, storages = {}, {}
    for key, (name, value) in enumerate(read_tensors(tmp_path / "h").items()):
        strides = tuple(n // value.itemsize for n in np.array(value).strides)
        what[name] = tensor(Storage("FloatStorage", str(key), value.size), 0, tuple(value.shape), strides)
        storages[f"s{key}"] = np.array(value).tobytes()
    torch = torch_file(tmp_path / "pytorch_model.bin", what, monkeypatch, **storages)
    online.put("user/torch", {file.name: file.read_bytes() for file in (torch, tmp_path / "h" / "config.json")})
    got = em.load_head("user/torch", target)
    assert mx.array_equal(got.fc.weight, wanted.fc.weight)  # type: ignore[attr-defined]
