"""eagle-serve: what it refuses before serving, and its check."""

from __future__ import annotations

import socket
from dataclasses import replace
from pathlib import Path

import mlx.core as mx
import pytest

from eagle_mlx.cache.full import RaggedQuantized
from eagle_mlx.catalog.head_search import register
from eagle_mlx.errors import ConfigError
from eagle_mlx.heads.eagle3 import save_eagle3
from eagle_mlx.memory import free_memory
from eagle_mlx.sampling_params import SamplingParams
from eagle_mlx.serve.api.cli import main
from eagle_mlx.serve.api.loader import check, load
from eagle_mlx.serve.api.model import sampling_defaults
from eagle_mlx.serve.api.options import LoadConfig
from eagle_mlx.serve.api.server import listen
from eagle_mlx.serve.api.start import served_name
from eagle_mlx.serve.speculation import AUTO, MemoryOptions, Speculation
from tests.fakes import tiny_head, tiny_target, tiny_target_folder

HEAD = "the head"
"""Stands for the folder of the head, which a fixture makes."""


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, str]:
    root = tmp_path_factory.mktemp("serve")
    tiny_target_folder(root / "target")
    save_eagle3(tiny_head(tiny_target(tokenizer=True), draft_vocab=64), root / "head", target_name="tiny")
    return str(root / "target"), str(root / "head")


def test_a_target_is_served_with_the_head_found_for_it(
    models: tuple[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("EAGLE_MLX_CACHE", str(tmp_path))
    for mode, line in (("ngram", "head: none found for "), ("eagle", f"head: {models[1]}, trained here for target")):
        lines: list[str] = []
        loaded = load(LoadConfig(models[0], Speculation(head=AUTO)), lines.append)
        assert loaded.mode == mode
        assert loaded.most_drafts > 0
        assert sum(text.startswith("head: ") for text in lines) == 1
        assert any(text.startswith(line) for text in lines)
        assert any(text.startswith(f"speculation: {mode}") for text in lines)
        register(models[1], models[0], "trained")


@pytest.mark.parametrize(
    ("args", "reason"),
    [
        (["--kv-bits", "4"], "omit kv_bits"),
        (["--max-batch", "0"], "--max-batch"),
        (["--max-queue", "-1"], "--max-queue"),
        (["--max-context", "1"], "--max-context"),
        (["--max-context", "513"], "more than the 512 tokens"),
        (["--prefix-cache-gb", "-1"], "--prefix-cache-gb"),
        (["--prefix-cache-gb", "nan"], "--prefix-cache-gb"),
        (["--kv-gb", "0"], "--kv-gb"),
        (["--kv-gb", "inf"], "--kv-gb"),
        (["--prefill-chunk", "0"], "--prefill-chunk must be at least 1, not 0"),
        (["--prefill-ms", "0"], "--prefill-ms must be above 0, not 0.0"),
        (["--drain-seconds", "-1"], "--drain-seconds"),
        (["--request-seconds", "0"], "--request-seconds"),
        (["--max-body-mb", "0"], "--max-body-mb"),
        (["--max-body-mb", "inf"], "--max-body-mb"),
        (["--max-image-megapixels", "179"], "at most 178"),  # Pillow refuses larger ones
        (["--port", "65536"], "--port"),
        (["--host", "256.0.0.1"], "cannot listen"),
        (["--api-key", ""], "--api-key"),
        (["--api-key", "  "], "--api-key"),
        (["--api-key", "a\tb"], "--api-key"),
        (["--head", "nowhere"], "nowhere"),
        (["--spec-decode", "eagle"], "give --head"),
        (["--spec-decode", "draft"], "--draft-model"),
        (["--speculative-config", '{"method": "magic"}'], "method"),
    ],
)
def test_invalid_settings_are_refused_at_startup(
    models: tuple[str, str], args: list[str], reason: str, capsys: pytest.CaptureFixture[str]
) -> None:
    port = [] if "--port" in args else ["--port", "0"]
    assert main(["--target", models[0], *port, *args]) == 2
    error = capsys.readouterr().err.splitlines()[-1]
    assert error.startswith("error: ")
    assert reason in error


def test_a_model_that_is_not_there(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--target", str(tmp_path), "--port", "0"]) == 2
    assert str(tmp_path) in capsys.readouterr().err


def test_an_address_that_is_taken(models: tuple[str, str], capsys: pytest.CaptureFixture[str]) -> None:
    with socket.create_server(("127.0.0.1", 0)) as other:
        assert main(["--target", models[0], "--port", str(other.getsockname()[1])]) == 2
    assert "choose others" in capsys.readouterr().err


@pytest.mark.parametrize("flags", [["--spec-decode", "none"], ["--spec-decode", "ngram"], ["--head"]])
def test_the_check_passes(models: tuple[str, str], flags: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    flags = ["--head", models[1]] if flags == ["--head"] else flags
    assert main(["--target", models[0], "--check", *flags]) == 0
    printed = capsys.readouterr().err
    assert "check: ok: 16 tokens" in printed
    assert "tau " in printed


def test_the_check_decodes_with_the_cache_that_the_server_has(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The text of a drafting round is made wrong, in quantized caches only."""
    written = RaggedQuantized.update_and_fetch

    def spoiled(self: RaggedQuantized, keys: mx.array, values: mx.array) -> object:
        return written(self, keys, values * (1 < keys.shape[2] < 8))

    monkeypatch.setattr(RaggedQuantized, "update_and_fetch", spoiled)
    assert main(["--check", "--no-prior"]) == 0
    assert main(["--check", "--no-prior", "--kv-bits", "8"]) == 1
    assert "check: FAILED" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("speculation", "modes"),
    [
        (Speculation(mode="none"), ("ngram", "none")),
        (Speculation(mode="none", policy="fixed"), ("ngram", "none")),
        (Speculation(mode="ngram", policy="fixed"), ("ngram", "none")),
        (Speculation(head=HEAD, policy="fixed"), ("eagle", "ngram", "none")),
        (Speculation(mode="none", ngrams=False), ("none",)),
        (Speculation(mode="none", num_tokens=0), ("none",)),
        (Speculation(head=HEAD, policy="fixed", ngrams=False), ("eagle", "none")),
    ],
)
def test_requests_may_ask_for_n_grams_on_every_server_that_allows_them(
    models: tuple[str, str], speculation: Speculation, modes: tuple[str, ...]
) -> None:
    given = replace(speculation, head=speculation.head and models[1], keep=False)
    loaded = load(LoadConfig(models[0], given), list[str]().append)
    assert loaded.modes == modes
    engine, prompt = loaded.engine, [5, 6, 7, 8] * 8
    texts = [
        engine.generate(prompt, SamplingParams(max_tokens=24, drafter=drafter)) for drafter in ("none", "ngrams", None)
    ]
    assert len({tuple(text.tokens) for text in texts}) == 1
    assert texts[0].drafted == 0 < texts[1].drafted or "ngram" not in modes
    assert (texts[2].drafted > 0) == bool(loaded.drafters)
    assert loaded.mode == (modes[0] if given.resolved_mode() != "none" else "none")


def test_the_check_fails_if_speculation_changes_the_text(models: tuple[str, str]) -> None:
    lines: list[str] = []
    loaded = load(LoadConfig(models[0], Speculation(mode="ngram")), lines.append)
    forward = loaded.target.forward
    base = type(loaded.target)

    class Liar(base):  # type: ignore[misc, valid-type]
        """Changes its logits when it reads more than one token at once."""

        def forward(self, tokens: mx.array, *args: object, **kwargs: object) -> object:
            out = forward(tokens, *args, **kwargs)
            if tokens.shape[1] > 1:
                object.__setattr__(out, "logits", mx.roll(out.logits, 1, axis=-1))
            return out

    loaded.target.__class__ = Liar
    assert not check(loaded, lines.append)
    assert "FAILED" in lines[-1]


def test_memory_is_shared_out_at_the_start(models: tuple[str, str]) -> None:
    lines: list[str] = []
    engine = load(LoadConfig(models[0], Speculation(mode="ngram")), lines.append).engine
    assert engine.prefixes is not None
    assert 0 < engine.prefixes.capacity < engine.kv_budget.nbytes < free_memory()
    assert lines[-2].endswith(" of it for the prefix cache")
    given = LoadConfig(models[0], Speculation(mode="ngram"), prefix_cache_gb=0.0, memory=MemoryOptions(kv_gb=0.003))
    engine = load(given, lines.append).engine
    assert (engine.prefixes, engine.kv_budget.nbytes) == (None, 3_000_000)
    memory = next(line for line in reversed(lines) if line.startswith("memory: "))
    assert f"keys and values up to 3.0 MB ({engine.kv_budget.longest} tokens for one request)" in memory
    assert memory.endswith("no prefix cache")


def test_plans_that_cannot_be() -> None:
    with pytest.raises(ConfigError, match="--max-batch"):
        LoadConfig("x", Speculation(), max_batch=0)


def test_sampling_defaults_come_from_the_model(tmp_path: Path) -> None:
    assert sampling_defaults(tmp_path) == {}
    advice = tmp_path / "generation_config.json"
    advice.write_text(
        '{"temperature": 0.6, "top_k": 20, "do_sample": true, "eos_token_id": [1], "top_p": null, "min_p": 7}'
    )
    assert sampling_defaults(tmp_path) == {"temperature": 0.6, "top_k": 20}
    advice.write_text('{"temperature": 0.6, "do_sample": false}')
    assert sampling_defaults(tmp_path) == {}
    advice.write_text("[")
    assert sampling_defaults(tmp_path) == {}


def test_the_help_teaches(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as end:
        main(["--help"])
    assert end.value.code == 0
    text = capsys.readouterr().out
    for flag in (
        "--target",
        "--head",
        "--spec-decode",
        "--max-queue",
        "--kv-gb",
        "--drain-seconds",
        "--request-seconds",
        "--allow-origin",
        "--check",
    ):
        assert flag in text
    assert "curl " in text


def test_a_streams_events_do_not_wait_for_acknowledgments() -> None:
    with (
        listen("127.0.0.1", 0) as sock,
        socket.create_connection(sock.getsockname()),
        sock.accept()[0] as connection,
    ):
        assert connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY)


def test_a_link_to_a_folder_is_served_under_its_own_name(tmp_path: Path) -> None:
    (tmp_path / "models").mkdir()
    (tmp_path / "mine").symlink_to(tmp_path / "models")
    assert served_name(str(tmp_path / "mine")) == "mine"
    assert served_name(str(tmp_path / "models" / ".." / "mine") + "/") == "mine"
    assert served_name("Qwen/Qwen3-4B") == "Qwen/Qwen3-4B"
