"""Statements of docs/serving.md and docs/deploy are true: examples run, names exist, times agree."""

from __future__ import annotations

import plistlib
import re
import shutil
import subprocess
from collections.abc import Iterator
from configparser import RawConfigParser
from pathlib import Path

import pytest

import eagle_mlx as em
from eagle_mlx.catalog import embedded
from eagle_mlx.command import read
from eagle_mlx.extras import module_of, packages_of
from eagle_mlx.serve.api.loader import load
from eagle_mlx.serve.api.model import Loaded
from eagle_mlx.serve.api.options import LoadConfig, ServeOptions
from eagle_mlx.serve.speculation import Speculation
from tests.serve.api.live import DEPTH, Live, live, one_model
from tests.serve.chat.formats import target_of
from tests.test_documentation import known_flags

DOCS = Path(__file__).resolve().parents[2] / "docs"
GUIDE = (DOCS / "serving.md").read_text(encoding="utf-8")
ADDRESS = "http://127.0.0.1:8000"


def blocks(language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```", GUIDE, re.DOTALL | re.MULTILINE)


def section(title: str) -> str:
    return GUIDE.split(f"\n## {title}\n")[1].split("\n## ")[0]


EXAMPLES = blocks("python")
FOR_AGENTS = re.findall(
    r"^```python\n(.*?)^```", (DOCS / "agents.md").read_text(encoding="utf-8"), re.DOTALL | re.MULTILINE
)


@pytest.fixture(scope="module")
def serving(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Live]:
    """An `eagle-serve` with everything that has metrics."""
    files = tmp_path_factory.mktemp("prefixes")
    plan = LoadConfig(embedded("target"), Speculation(head=str(embedded("head"))), prefix_cache_dir=files)
    with live(models=one_model(lambda: load(plan, lambda _: None), name="embedded")) as running:
        yield running


@pytest.fixture(scope="module")
def calling() -> Iterator[Live]:
    """A model with a format for tools."""

    def made() -> Loaded:
        engine = em.Engine(target_of("qwen", special=True), em.NgramProposer(), policy=em.FixedPolicy(DEPTH))
        return Loaded(engine, "ngram", DEPTH)

    with live(models=one_model(made, name="tools")) as running:
        yield running


SIMPLE = [text for text in EXAMPLES if "tools=" not in text and "cached_tokens" not in text]
"""Those with tools and with prefixes have tests of their own."""


@pytest.mark.parametrize("example", [*SIMPLE, *FOR_AGENTS])
def test_an_example_in_python(serving: Live, example: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert ADDRESS in example
    exec(example.replace(ADDRESS, serving.base), {})
    assert capsys.readouterr().out.strip()


def test_the_example_with_tools(calling: Live, capsys: pytest.CaptureFixture[str]) -> None:
    (example,) = [text for text in EXAMPLES if "tools=" in text]
    exec(example.replace(ADDRESS, calling.base), {})
    assert capsys.readouterr().out.startswith("get_weather {'city': ")


@pytest.mark.skipif(shutil.which("curl") is None, reason="no curl")
def test_the_examples_with_curl(serving: Live) -> None:
    (example,) = [block for block in blocks("sh") if ADDRESS in block]
    shell = example.replace(ADDRESS, serving.base).replace("curl ", "curl -sS --fail-with-body ")
    done = subprocess.run(["bash", "-ec", shell], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stdout + done.stderr
    assert '"chat.completion"' in done.stdout
    assert '"count":5' in done.stdout


def test_the_prefix_cache_is_used_as_the_guide_says(serving: Live, capsys: pytest.CaptureFixture[str]) -> None:
    (example,) = [text for text in EXAMPLES if "cached_tokens" in text]
    exec(example.replace(ADDRESS, serving.base), {})
    prompt, cached = map(int, capsys.readouterr().out.split()[-2:])
    assert 100 < cached < prompt


def test_the_guide_lists_the_existing_metrics(serving: Live) -> None:
    serving.openai.completions.create(model="embedded", prompt="x", max_tokens=40)
    text = serving.http.get("/metrics").text
    there = {re.sub(r"_(bucket|count|sum)$", "", name) for name in re.findall(r"^([\w:]+)", text, re.MULTILINE)}
    named = set(re.findall(r"`((?:vllm|eagle):\w+)", section("Metrics").split("\nτ is")[0]))
    assert {name for name in named if not name.startswith("eagle:learn_")} == there, "this server does not learn"


def test_the_guide_lists_the_existing_limits(serving: Live) -> None:
    answers = {
        status: serving.http.post("/v1/completions", json={"prompt": "x", "max_tokens": 1} | body)
        for status, body in {"n": {"n": 17}, "stop": {"stop": ["x"] * 17}, "prompt": {"prompt": ["x"] * 65}}.items()
    }
    assert {name: (answer.status_code, answer.json()["error"]["param"]) for name, answer in answers.items()} == {
        name: (400, name) for name in answers
    }
    fits = {"n": 16, "stop": ["\x00" * 256] * 16}
    assert serving.http.post("/v1/completions", json={"prompt": "x", "max_tokens": 1} | fits).status_code == 200
    (example,) = [line for line in section("Limits and errors").splitlines() if line.startswith('{"error"')]
    assert serving.http.post("/v1/completions", json={"prompt": "x", "n": 99}).text == example


def test_the_guide_names_only_existing_flags() -> None:
    others = {"--stop-timeout", "--rm", "--restart"}  # flags of docker, and one of benchmarks/prefix_reuse.py
    named = set(re.findall(r"(?<![\w-])--[a-z][a-z-]+", GUIDE)) - others
    flags = known_flags()
    assert named <= flags["eagle-serve"] | flags["eagle-generate"]


def test_the_unit_waits_for_the_drain() -> None:
    unit = RawConfigParser(strict=False)
    unit.optionxform = str  # type: ignore[assignment, method-assign]  # names keep their capitals
    unit.read(DOCS / "deploy" / "eagle-serve.service", encoding="utf-8")
    command = unit["Service"]["ExecStart"].split()
    assert command[0].endswith("/bin/eagle-serve")
    settings = read(ServeOptions, command[1:], "eagle-serve", "").server
    assert int(unit["Service"]["TimeoutStopSec"]) > settings.drain_seconds + 5
    assert unit["Service"]["Restart"] == "on-failure"


def test_the_agent_waits_for_the_drain() -> None:
    with (DOCS / "deploy" / "com.eagle-mlx.serve.plist").open("rb") as file:
        agent = plistlib.load(file)
    assert agent["Label"] == "com.eagle-mlx.serve"
    settings = read(ServeOptions, agent["ProgramArguments"][1:], "eagle-serve", "").server
    assert agent["ExitTimeOut"] > settings.drain_seconds + 5
    assert agent["KeepAlive"] == {"SuccessfulExit": False}
    assert all(Path(agent[key]).is_absolute() for key in ("WorkingDirectory", "StandardErrorPath"))


def test_the_image_has_the_packages_for_serving() -> None:
    """Its build includes the extra for serving, and no module that serves imports a package of another extra."""
    text = (DOCS.parent / "Dockerfile").read_text(encoding="utf-8")
    assert "pip install '.[serve]'" in text
    others = {*packages_of("train"), *packages_of("datasets"), *packages_of("wandb"), *packages_of("plots")} - {
        *packages_of("serve")
    }
    imports = re.compile(rf"^(?:from|import) (?:{'|'.join(map(re.escape, map(module_of, others)))})\b", re.MULTILINE)
    files = [file for folder in ("serve", "eagle_mlx") for file in (DOCS.parent / folder).rglob("*.py")]
    assert len(files) > 100
    assert [file for file in files if imports.search(file.read_text(encoding="utf-8"))] == []
