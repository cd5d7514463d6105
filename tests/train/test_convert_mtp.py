"""eagle-convert mtp: from a publisher's shards, local or on the hub, to a head that drafts as published."""

from __future__ import annotations

import http.server
import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest

from eagle_mlx.catalog.head_search import records
from eagle_mlx.formats.tensors import read_tensors, weights_of
from eagle_mlx.heads import load_head
from eagle_mlx.heads.mtp import MTPHead
from eagle_mlx.train.convert.cli import main
from tests import hub_server
from tests.eagle_mlx import test_heads_golden as golden
from tests.train.test_convert import refused

MODELS = [name for name in golden.NAMES if golden.published(name)]


def sharded(folder: Path, name: str) -> Path:
    """Write a golden model as two shards and an index that also names a missing shard."""
    folder.parent.mkdir(parents=True, exist_ok=True)
    golden.written(folder, name)
    tensors = read_tensors(folder)
    (folder / "model.safetensors").unlink()
    shards: dict[str, dict[str, mx.array]] = {"model-2-of-3.safetensors": {}, "model-3-of-3.safetensors": {}}
    where = {"model.embed_tokens.weight": "model-1-of-3.safetensors", "model.layers.0.x": "model-1-of-3.safetensors"}
    for at, (key, value) in enumerate(sorted(tensors.items())):
        shard = sorted(shards)[at % 2]
        shards[shard][key], where[key] = value, shard
    for shard, held in shards.items():
        mx.save_safetensors(str(folder / shard), held)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": where}))
    return folder


@pytest.mark.parametrize("name", MODELS)
def test_the_head_of_a_published_model(name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """From the publisher's shards to the reference's logits."""
    source = sharded(tmp_path / "model", name)
    out = tmp_path / "out"
    assert main(["mtp", "--source", str(source), "--output", str(out), "--dtype", "float32"]) == 0
    printed = capsys.readouterr()
    assert ("norms have a mean" in printed.err) == ("qwen3" in name)
    assert "EAGLE-MLX loads it" in printed.out
    head = load_head(out, golden.TARGET)
    assert golden.difference(name, head) < golden.CLOSE
    assert main(["mtp", "--source", str(source), "--output", str(tmp_path / "o"), "--hidden", "before"]) == 0
    other = load_head(tmp_path / "o", golden.TARGET)
    assert isinstance(head, MTPHead)
    assert isinstance(other, MTPHead)
    assert (head.config.target_norm, other.config.target_norm) == (True, False)


def test_the_head_is_found_by_its_model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("EAGLE_MLX_CACHE", str(tmp_path / "cache"))
    source = sharded(tmp_path / "model", MODELS[0])
    assert main(["mtp", "--source", str(source), "--output", str(tmp_path / "out")]) == 0
    wanted = [(str(tmp_path / "out"), "extracted", ("model",))]
    assert [(head.head, head.origin, head.names) for head in records()] == wanted


def test_the_head_is_quantized_with_bits(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    source = golden.written(tmp_path / "Some-Model", "mtp-qwen3-next")
    out = tmp_path / "q"
    args = ["mtp", "--source", str(source), "--output", str(out), "--bits", "8"]
    assert main([*args, "--group-size", "128"]) == 2
    assert "64 is not a multiple of the group size 128" in capsys.readouterr().err
    assert not out.exists()
    assert main(args) == 0
    head = load_head(out, golden.TARGET)
    assert isinstance(head, MTPHead)
    assert head.config.quantization == {"group_size": 64, "bits": 8}
    assert "block.self_attn.q_proj.scales" in weights_of(head)
    assert golden.difference("mtp-qwen3-next", head) < 0.1
    assert json.loads((out / "config.json").read_text())["eagle_mlx"]["target"] == "Some-Model"


def test_the_default_name_of_the_output_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    golden.written(tmp_path / "Some-Model", "mtp-mimo")
    monkeypatch.chdir(tmp_path)
    assert main(["mtp", "--source", "Some-Model"]) == 0
    assert load_head(tmp_path / "Some-Model-mtp") is not None


@pytest.mark.parametrize(
    ("change", "args", "message"),
    [
        (lambda f: (f / "model-3-of-3.safetensors").unlink(), [], "lacks model-3-of-3.safetensors, which by its index"),
        (lambda f: (f / "model.safetensors.index.json").write_text("{}"), [], "is not an index of a model's weights"),
        (
            lambda f: (f / "model.safetensors.index.json").write_text('{"weight_map": {"mtp.x": "../../etc/passwd"}}'),
            [],
            "names ../../etc/passwd, which is not a file name",
        ),
        (
            lambda f: (f / "model.safetensors.index.json").write_text('{"weight_map": {"model.x": "a"}}'),
            [],
            "has no tensors named mtp.*, so no MTP layer",
        ),
        (lambda f: None, ["--index", "1"], "there is no MTP layer 1: by its config, the model has 1"),
        (lambda f: None, ["--index", "-1"], "--index counts MTP layers from 0"),
        (lambda f: (f / "config.json").write_text('{"model_type": "llama"}'), [], "model_type llama are not supported"),
        (lambda f: (f / "config.json").unlink(), [], "has no config.json"),
    ],
)
def test_models_without_the_layer_are_refused(
    change: Any, args: list[str], message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    source = sharded(tmp_path / "model", "mtp-qwen3.5")
    change(source)
    assert main(["mtp", "--source", str(source), "--output", str(tmp_path / "out"), *args]) == 2
    refused(message, tmp_path, capsys)


def test_an_unknown_model_is_an_error(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["mtp", "--source", "no-one/no-model", "--output", str(tmp_path / "out")]) == 2
    refused("config.json of no-one/no-model is not in the hub's cache, and the hub cannot be reached", tmp_path, capsys)
    assert main(["mtp", "--source", str(tmp_path / "none"), "--output", str(tmp_path / "out")]) == 2
    refused("there is no folder", tmp_path, capsys)


@contextmanager
def hub_of(folder: Path, requested: list[str]) -> Iterator[str]:
    """Serve what downloads need of the hub's web server, from a folder of `user/name` folders."""

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_HEAD(self) -> None:
            self.answer(body=False)

        def do_GET(self) -> None:
            self.answer(body=True)

        def answer(self, body: bool) -> None:
            repo, _, rest = self.path.lstrip("/").partition("/resolve/")
            file = folder / repo / rest.partition("/")[2]
            there = bool(rest) and file.is_file()
            raw = file.read_bytes() if there else b""
            if body and there:
                requested.append(file.name)
            self.send_response(200 if there else 404)
            self.send_header("X-Repo-Commit", "0" * 40)
            if there:
                self.send_header("ETag", f'"{file.name}"')
            else:
                self.send_header("X-Error-Code", "EntryNotFound" if (folder / repo).is_dir() else "RepoNotFound")
            self.send_header("Content-Length", str(len(raw)))
            self.end_headers()
            if body:
                self.wfile.write(raw)

        def log_message(self, format: str, *args: object) -> None: ...

    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    try:
        yield f"http://127.0.0.1:{server.server_port}"
    finally:
        server.shutdown()
        server.server_close()


def test_from_the_hub_only_the_files_with_the_layer_are_fetched(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    source = sharded(tmp_path / "hub" / "org" / "model", "mtp-mimo")
    (source / "model-1-of-3.safetensors").write_bytes(b"never read")
    golden.written(tmp_path / "hub" / "org" / "whole", "mtp-mimo")
    requested: list[str] = []
    with hub_of(tmp_path / "hub", requested) as endpoint:
        hub_server.use(monkeypatch, endpoint, tmp_path / "home")

        def run(name: str, out: str) -> int:
            return main(["mtp", "--source", name, "--output", str(tmp_path / out)])

        assert run("org/model", "a") == 0, capsys.readouterr().err
        index = "model.safetensors.index.json"
        assert sorted(requested) == ["config.json", "model-2-of-3.safetensors", "model-3-of-3.safetensors", index]
        assert run("org/whole", "b") == 0, capsys.readouterr().err
        assert run("org/other", "c") == 2
        assert "error: org/other is neither a local folder nor a model on the hub" in capsys.readouterr().err
        assert not (tmp_path / "c").exists()
    for name in "ab":
        head = load_head(tmp_path / name, golden.TARGET)
        assert isinstance(head, MTPHead)
        assert golden.difference("mtp-mimo", head) < 0.05, "but for bfloat16 as the reference"


def test_from_the_hub_a_separate_file_of_mtp_layers_is_enough(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "hub" / "org").mkdir(parents=True)
    source = golden.written(tmp_path / "hub" / "org" / "model", "mtp-qwen3.5")
    layer = {name: value for name, value in read_tensors(source).items() if name.startswith("mtp.")}
    mx.save_safetensors(str(source / "mtp.safetensors"), layer)
    requested: list[str] = []
    with hub_of(tmp_path / "hub", requested) as endpoint:
        hub_server.use(monkeypatch, endpoint, tmp_path / "home")
        args = ["mtp", "--source", "org/model", "--output", str(tmp_path / "out"), "--dtype", "float32"]
        assert main(args) == 0, capsys.readouterr().err
    assert sorted(requested) == ["config.json", "mtp.safetensors"]
    assert golden.difference("mtp-qwen3.5", load_head(tmp_path / "out", golden.TARGET)) < golden.CLOSE
