"""A file of models equals flags; errors are reported before anything is loaded."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from eagle_mlx.errors import ConfigError
from eagle_mlx.serve.api.cli import EPILOG, main
from eagle_mlx.serve.api.loader import several, weights_bytes
from eagle_mlx.serve.api.models import Models, read_models
from eagle_mlx.serve.speculation import AUTO, Speculation
from tests.fakes import tiny_target_folder
from tests.serve.api.live import live, wide

GUIDE = Path(__file__).parents[3] / "docs" / "serving.md"


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_target_folder(tmp_path_factory.mktemp("models") / "target", layers=2)


def written(folder: Path, text: str) -> Path:
    file = folder / "models.yaml"
    file.write_text(text)
    return file


def test_entries_equal_flags(tmp_path: Path, target: Path) -> None:
    text = f"""
default: {{max-batch: 2, spec-decode: ngram, target: {target}}}
plain:
"org/long":
  spec-decode: null
  target: org/long
  max-batch: 3
  kv-gb: 0.5
  no-prior: true
  trust-remote-code: false
  chat-template-args: {{enable_thinking: false}}
  extra-eos-token: ["-x", "y"]
"""
    plain, long = (models := read_models(written(tmp_path, text))).values()
    assert list(models) == ["plain", "org/long"]
    assert (plain.target, plain.max_batch, plain.speculation) == (str(target), 2, Speculation(mode="ngram"))
    assert (long.target, long.max_batch, long.memory.kv_bytes) == ("org/long", 3, 500_000_000)
    assert long.speculation == Speculation(head=AUTO, keep=False)
    assert long.loading.extra_eos_tokens == ("-x", "y")
    assert long.loading.chat_template_args == '{"enable_thinking": false}'


def test_the_example_of_the_guide_is_read(tmp_path: Path) -> None:
    (example,) = re.findall(r"^```yaml\n(.*?)^```", GUIDE.read_text(encoding="utf-8"), re.DOTALL | re.MULTILINE)
    models = read_models(written(tmp_path, example))
    assert [(name, config.target, config.max_batch) for name, config in models.items()] == [
        ("small", "Qwen3-0.6B-4bit", 4),
        ("large", "Qwen3-4B-4bit", 4),
        ("no-thinking", "Qwen3-4B-4bit", 4),
    ]
    shown = EPILOG.split("without their dashes:\n")[1].split("A request names")[0]
    assert list(read_models(written(tmp_path, shown))) == ["small", "large"]


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("a: {target: org/x}\na: {target: org/y}", "'a' appears twice; give each name once"),
        ("a: {target: org/x, target: org/y}", "'target' appears twice"),
        ("a: {target: org/x, heads: org/y}", "a: 'heads' is not a setting of a model; did you mean head?"),
        ("a: {target: org/x, kv_gb: 1}", "a: 'kv_gb' is not a setting of a model; did you mean kv-gb?"),
        ("default: {port: 3}\na: {target: org/x}", "default: 'port' is not a setting of a model"),
        ("a: {head: org/y}", "a: has no target; add `target: folder or hub id`"),
        ("a:", "a: has no target"),
        ("a: {target: ./nowhere}", "a: target ./nowhere is not a folder; correct the path, or give a hub id"),
        ("a: {target: org/x, head: /nowhere}", "a: head /nowhere is not a folder"),
        ("a: {target: org/x, draft-model: ./no}", "a: draft-model ./no is not a folder"),
        ("a: {target: org/x, max-batch: many}", "a: --max-batch must be a whole number, not 'many'"),
        ("a: {target: org/x, max-batch: 0}", "a: --max-batch must be at least 1"),
        ("a: {target: org/x, max-batch: [1]}", "a: --max-batch must be a whole number, not [1]"),
        ("a: {target: org/x, no-prior: 1}", "a: no-prior must be true or false, not 1"),
        (
            "a: {target: org/x, head: org/h, eagle-head-path: org/g}",
            "a: head and eagle-head-path are the same setting",
        ),
        ("a: {target: org/x, spec-decode: draft}", "a: --spec-decode draft needs a --draft-model"),
        ("a: org/x", "a: must hold settings such as"),
        ("7: {target: org/x}", "7 is not a model name; write it in quotes"),
        ("default: {target: org/x}", "has no models"),
        ("default: {target: org/x, learn: l}\na: {}\nb: {}", "b: learn l is the folder of a; name another"),
        ("- a", "must hold models as"),
        ("a: {", "cannot be read as YAML"),
    ],
)
def test_errors_name_the_entry(tmp_path: Path, text: str, reason: str, capsys: pytest.CaptureFixture[str]) -> None:
    file = written(tmp_path, text)
    assert main(["--models", str(file), "--port", "0"]) == 2
    (error,) = capsys.readouterr().err.splitlines()[:1]
    assert error.startswith(f"error: {file}")
    assert reason in capsys.readouterr().err + error


@pytest.mark.parametrize(
    ("args", "reason"),
    [
        (["--models", "nowhere.yaml"], "there is no file of models nowhere.yaml"),
        (["--memory-gb", "1"], "--memory-gb is for several models"),
        (["--models", "FILE", "--head", "org/h"], "--head is a setting of a model: write it in "),
        (["--models", "FILE", "--served-model-name", "x"], "--served-model-name is a setting of a model"),
        (["--models", "FILE", "--memory-gb", "0"], "--memory-gb must be above 0"),
        (["--models", "FILE", "--memory-gb", "0.0001"], "model 'a' needs "),
    ],
)
def test_conflicting_flags_are_refused(
    tmp_path: Path, target: Path, args: list[str], reason: str, capsys: pytest.CaptureFixture[str]
) -> None:
    file = str(written(tmp_path, f"a: {{target: {target}}}"))
    assert main([*(file if arg == "FILE" else arg for arg in args), "--port", "0"]) == 2
    assert reason in capsys.readouterr().err


def test_the_check_tries_all_models(tmp_path: Path, target: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = written(tmp_path, f"default: {{target: {target}}}\na: {{spec-decode: none}}\nb: {{spec-decode: ngram}}")
    assert main(["--models", str(file), "--check"]) == 0
    printed = capsys.readouterr().err
    assert printed.count("check: ok: 16 tokens") == 2
    assert printed.index("model: a") < printed.index("model: b")


def test_models_share_the_memory(tmp_path: Path, target: Path) -> None:
    """Two models that fit both stay loaded; if only one fits, they take turns."""
    text = f"default: {{target: {target}, spec-decode: none, prefix-cache-gb: 0}}\na:\nb: {{kv-gb: 0.002}}"
    configs = read_models(written(tmp_path, text))
    weights = weights_bytes(configs["a"])
    assert weights == (target / "model.safetensors").stat().st_size
    lines: list[str] = []
    for nbytes, states in (
        (2 * weights + 8_000_000, ["loaded", "loaded"]),
        (weights + 2_100_000, ["unloaded", "loaded"]),
    ):
        sources = several(configs, nbytes, lines.append)
        assert [source.nbytes() for source in sources] == [
            weights + min(nbytes // 4, nbytes - weights),
            weights + 2_000_000,
        ]
        with live(models=Models(wide(), sources, nbytes)) as server:
            for name in configs:
                answer = server.http.post("/v1/completions", json={"model": name, "prompt": "x", "max_tokens": 2})
                assert answer.status_code == 200
            services = server.models.services
            assert [service.state for service in services.values()] == states
            assert services["b"].loaded.engine.kv_budget.nbytes == 2_000_000
    assert any(line.startswith("b: target: ") for line in lines)


def test_a_model_that_never_fits_is_refused(tmp_path: Path, target: Path) -> None:
    configs = read_models(written(tmp_path, f"a: {{target: {target}, kv-gb: 1}}"))
    with pytest.raises(ConfigError, match="model 'a' needs 1.0. GB .* --memory-gb"):
        several(configs, 900_000_000, lambda _: None)
