"""The examples in the documentation work as written."""

from __future__ import annotations

import dataclasses
import re
import runpy
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

import eagle_mlx as em
from tests.fakes import tiny_target

ROOT = Path(__file__).parent.parent
FOLDERS = (
    ".",
    "benchmarks",
    "benchmarks/results",
    "checkpoints",
    "checkpoints/smollm2-135m-instruct",
    "docs",
    "tests/clients",
)
PAGES = [page for folder in FOLDERS for page in sorted((ROOT / folder).glob("*.md"))]


def python_blocks(name: str) -> list[str]:
    return re.findall(r"^```python\n(.*?)^```", (ROOT / name).read_text(encoding="utf-8"), re.MULTILINE | re.DOTALL)


@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_the_proposer_of_the_guide_drafts_and_changes_nothing(temperature: float) -> None:
    target = tiny_target(tokenizer=True)
    assert target.tokenizer is not None
    params = em.SamplingParams(max_tokens=24, temperature=temperature, seed=3)
    prompts = ["import os", "def f(x):", "class A:"]
    plain = em.Engine(target).generate(prompts, params)
    scope: dict[str, Any] = {"em": em, "target": target}
    definition, use = python_blocks("docs/write-a-proposer.md")
    exec(definition, scope)
    exec(use, scope)
    phrases = [plain[1].text, "Permission is hereby granted"]
    engine = em.Engine(target, scope["PhraseProposer"](phrases), policy=em.FixedPolicy(4), max_batch=2)
    outputs = engine.generate(prompts, params)
    assert [o.tokens for o in outputs] == [o.tokens for o in plain]
    if target.tokenizer.encode(plain[1].text) == plain[1].tokens:
        assert outputs[1].accepted > 0


def test_the_first_example_in_python_runs() -> None:
    [code] = [block for block in python_blocks("README.md") if "load_target" in block]
    scope: dict[str, Any] = {}
    exec(code.replace('"checkpoints/', f'"{ROOT}/checkpoints/'), scope)
    assert scope["outs"][0].acceptance_length > 1


def test_the_examples_of_the_library_run_in_order(capsys: pytest.CaptureFixture[str]) -> None:
    scope: dict[str, Any] = {}
    for code in python_blocks("docs/library.md"):
        exec(code.replace('"checkpoints/', f'"{ROOT}/checkpoints/'), scope)
    assert scope["outs"][0].acceptance_length > 1
    assert all(a != b for a, b in pairwise(scope["out"].tokens))
    assert all(request.finish_reason for request in scope["requests"])
    assert scope["chunk"].output.text in capsys.readouterr().out


def test_the_page_of_the_library_names_every_field_of_an_output() -> None:
    text = (ROOT / "docs" / "library.md").read_text(encoding="utf-8")
    rows = "".join(re.findall(r"^\| (`.*?) \|", text, re.MULTILINE))
    fields = {field.name for field in dataclasses.fields(em.Output)} | {"acceptance_length"}
    assert fields <= set(re.findall(r"`(\w+)`", rows))


def anchors(text: str) -> set[str]:
    """Return the anchors that a forge creates for a page's headings."""
    headings = re.findall(r"^#+ (.*)$", text, re.MULTILINE)
    return {re.sub(r"[^\w -]", "", heading.lower()).replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_lead_somewhere(page: Path) -> None:
    text = re.sub(r"^```.*?^```", "", page.read_text(encoding="utf-8"), flags=re.MULTILINE | re.DOTALL)
    for link, anchor in re.findall(r"\]\(([^)#:\s]*)(?:#([^)\s]+))?\)", text):
        there = page.parent / link if link else page
        assert there.exists(), link
        if anchor:
            assert anchor in anchors(there.read_text(encoding="utf-8")), f"{link}#{anchor}"


def test_the_page_of_flags_is_what_help_says() -> None:
    script = runpy.run_path(str(ROOT / "docs" / "flags.py"))
    page = (ROOT / "docs" / "flags.md").read_text(encoding="utf-8")
    assert page == script["page"](), "type: python docs/flags.py"


def known_flags() -> dict[str, set[str]]:
    """Return the flags of each command and subcommand from docs/flags.md."""
    found: dict[str, set[str]] = {}
    for section in (ROOT / "docs" / "flags.md").read_text(encoding="utf-8").split("\n## ")[1:]:
        title, _, body = section.partition("\n")
        rows = re.findall(r"^\|`([^`]+)`", body, re.MULTILINE)
        flags = {flag for row in rows for flag in re.findall(r"(?<![\w-])--?[a-z][\w-]*", row)}
        flags |= {f"--no-{row[2:]}" for row in rows if re.fullmatch(r"--[\w-]+", row)}
        program = ""
        for command in title.split(", "):  # a subcommand may follow another one of the same command
            program = command.split()[0] if command.startswith("eagle-") else program
            found.setdefault(command if command.startswith(program) else f"{program} {command}", set()).update(flags)
    return found


@pytest.mark.parametrize("page", [page for page in PAGES if page.parent in (ROOT, ROOT / "docs")], ids=lambda p: p.name)
def test_examples_of_commands_use_flags_that_exist(page: Path) -> None:
    known = known_flags()
    blocks = re.findall(r"^ *```\w*\n(.*?)^ *```", page.read_text(encoding="utf-8"), re.MULTILINE | re.DOTALL)
    for line in "\n".join(blocks).replace("\\\n", " ").splitlines():
        for command, rest in re.findall(r"(eagle-[a-z]+) +([^#]*)", re.sub(r"'[^']*'", "text", line)):
            section = f"{command} {rest.split()[0]}" if rest.split() else command
            flags = known.get(section, known.get(command, set()))
            assert set(re.findall(r"(?<![\w-])--?[a-z][\w-]*", rest)) <= flags, line
