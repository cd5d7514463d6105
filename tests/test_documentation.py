"""The examples in the documentation work as written."""

from __future__ import annotations

import dataclasses
import os
import re
import runpy
import shlex
import shutil
import subprocess
import sys
import sysconfig
from functools import cache
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

import eagle_mlx as em

import mlx.core as mx  # isort: skip
from eagle_mlx.catalog.models import described_target, published_model, published_models
from eagle_mlx.formats.tensors import arrays_of
from tests.fakes import tiny_target
from tests.full import FULL

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


def test_the_site_has_every_page() -> None:
    nav = (ROOT / "mkdocs.yml").read_text(encoding="utf-8")
    assert [page for page in PAGES if f": {page.relative_to(ROOT)}\n" not in nav] == []


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


def test_packages_that_examples_need_are_named() -> None:
    """Those that EAGLE-MLX itself does not install."""
    installed = {*sys.stdlib_module_names, "eagle_mlx", "mlx", "numpy"}
    for page in (page for page in PAGES if page.parent in (ROOT, ROOT / "docs")):
        code = "\n".join(python_blocks(str(page)))
        for package in set(re.findall(r"^(?:from|import) (\w+)", code, re.MULTILINE)) - installed:
            assert f"`pip install {package}`" in page.read_text(encoding="utf-8"), (page.name, package)


OTHER_FLAGS = {"--help", "--version", "--backend", "--stop-timeout", "--tools", "--system-prompt", "--against"}
"""Flags of all commands, and of other programs: mlx.launch, docker, Claude Code, a benchmark."""


@pytest.mark.parametrize("page", [page for page in PAGES if page.parent in (ROOT, ROOT / "docs")], ids=lambda p: p.name)
def test_a_flag_that_is_named_exists(page: Path) -> None:
    flags = set().union(*known_flags().values(), OTHER_FLAGS)
    for text in re.findall(r"`([^`\n]+)`", page.read_text(encoding="utf-8")):
        assert set(re.findall(r"(?<![\w-])--[a-z][\w-]*(?<!-)\b", text)) <= flags | {"--no"}, text


def test_a_flag_has_one_default() -> None:
    assert "default:" not in (ROOT / "docs" / "flags.md").read_text(encoding="utf-8")


def test_sizes_of_models_are_those_that_commands_compute() -> None:
    """A plan prints the size in float32, since scales and biases have that type on a Linux CPU."""
    text = (ROOT / "docs" / "models.md").read_text(encoding="utf-8")
    rows = dict(re.findall(r"^\| ([\w. -]+?) \| ([\d.]+) GB", text, re.MULTILINE))
    shapes = {name: name.lower().replace(" ", "-").replace("gemma-", "gemma") for name in rows}
    shapes["Qwen3.8-27B"] = "qwen3.6-27b"  # the same shape
    for name in [name for name in rows if shapes[name] in published_models()]:
        assert f"{gigabytes(shapes[name], mx.bfloat16):.1f}" == rows.pop(name), name
    assert len(rows) <= 3, "those of other shapes"
    assert gigabytes("qwen3.6-27b", mx.float32) / gigabytes("qwen3.6-27b", mx.bfloat16) == pytest.approx(10 / 9, 0.01)
    guide = (ROOT / "docs" / "recipes.md").read_text(encoding="utf-8")
    for dtype in (mx.bfloat16, mx.float32):
        assert f"{gigabytes('qwen3-32b', dtype):.1f}" in guide


def gigabytes(shape: str, dtype: mx.Dtype) -> float:
    model = described_target(shape, published_model(shape), dtype).model
    return sum(array.nbytes for array in arrays_of(model.parameters()).values()) / 1e9


def anchors(text: str) -> set[str]:
    """Return the anchors that a forge creates for a page's headings."""
    headings = re.findall(r"^#+ (.*)$", text, re.MULTILINE)
    return {re.sub(r"[^\w -]", "", heading.lower()).replace(" ", "-") for heading in headings}


def links(page: Path) -> list[tuple[str, str]]:
    """Return a page's links to files, and their anchors, without those to other sites."""
    text = re.sub(r"^```.*?^```", "", page.read_text(encoding="utf-8"), flags=re.MULTILINE | re.DOTALL)
    return re.findall(r"\]\(([^)#:\s]*)(?:#([^)\s]+))?\)", text)


@pytest.mark.skipif(not shutil.which("git") or not (ROOT / ".git").exists(), reason="no clone of the repository")
def test_links_lead_to_files_of_the_site() -> None:
    """`make docs` copies only these files, and a link to another ends it."""
    command = re.search(r"@(git ls-files .+?) \| tar", (ROOT / "Makefile").read_text(encoding="utf-8"))
    assert command is not None
    listed = subprocess.run(["bash", "-c", command[1]], cwd=ROOT, capture_output=True, text=True, check=True).stdout
    site = {ROOT / name for name in listed.splitlines()}
    for page in (file for file in site if file.suffix == ".md"):
        places = {(page.parent / link).resolve() for link, _ in links(page) if link}
        assert {place for place in places - site if not place.is_dir()} == set(), page


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_lead_somewhere(page: Path) -> None:
    for link, anchor in links(page):
        there = page.parent / link if link else page
        assert there.exists(), link
        if anchor:
            assert anchor in anchors(there.read_text(encoding="utf-8")), f"{link}#{anchor}"


def test_the_page_of_flags_is_what_help_says() -> None:
    script = runpy.run_path(str(ROOT / "docs" / "flags.py"))
    page = (ROOT / "docs" / "flags.md").read_text(encoding="utf-8")
    assert page == script["page"](), "type: python docs/flags.py"


@cache
def known_flags() -> dict[str, set[str]]:
    """Return the flags of each command and subcommand from docs/flags.md."""
    by_command: dict[str, set[str]] = {}
    for section in (ROOT / "docs" / "flags.md").read_text(encoding="utf-8").split("\n## ")[1:]:
        title, _, body = section.partition("\n")
        rows = re.findall(r"^\|`([^`]+)`", body, re.MULTILINE)
        flags = {flag for row in rows for flag in re.findall(r"(?<![\w-])--?[a-z][\w-]*", row)}
        flags |= {f"--no-{row[2:]}" for row in rows if re.fullmatch(r"--[\w-]+", row)}
        program = ""
        for command in title.split(", "):  # a subcommand may follow another one of the same command
            program = command.split()[0] if command.startswith("eagle-") else program
            by_command.setdefault(command if command.startswith(program) else f"{program} {command}", set()).update(
                flags
            )
    return by_command


FLAG = re.compile(r"(?<![\w-])--?[a-z][\w-]*")


def commands_on(page: Path) -> list[str]:
    """Return the lines of a page's blocks and its inline code, but for commands of earlier states of the project."""
    text, block = page.read_text(encoding="utf-8"), r"^ *```\w*\n(.*?)^ *```"
    blocks = "\n".join(re.findall(block, text, re.MULTILINE | re.DOTALL)).replace("\\\n", " ")
    inline = re.findall(r"`([^`\n]+)`", re.sub(block, "", text, flags=re.MULTILINE | re.DOTALL))
    lines = [line for line in blocks.splitlines() if "# of the state before" not in line]
    return [re.sub(r"'[^']*'|\"[^\"]*\"", "text", line) for line in [*lines, *inline]]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: f"{page.parent.name}/{page.name}")
def test_commands_on_a_page_exist_and_have_their_flags(page: Path) -> None:
    """Our commands with their subcommands, scripts of the repository, and targets of make."""
    targets = re.findall(r"^([a-z][\w-]*):", (ROOT / "Makefile").read_text(encoding="utf-8"), re.MULTILINE)
    for line in commands_on(page):
        for command, rest in re.findall(r"(?<![\w/.-])(eagle-[a-z]+)\b(?![-:])([^#|;&)]*)", line):
            section = " ".join([command, *rest.split()[:1]])
            flags = known_flags().get(section, known_flags().get(command, set()))
            assert set(FLAG.findall(rest)) <= {*flags, "--help", "--version"}, line
        for script, rest in re.findall(r"python3? ((?:[\w/-]+/)[\w-]+\.py)\b([^#|;&]*)", line):
            source = (ROOT / script).read_text(encoding="utf-8")
            assert [flag for flag in FLAG.findall(rest) if f'"{flag}"' not in source] == [], line
        for target in re.findall(r"(?:^|[\s;&])make ([a-z][a-z-]+)\b", line):
            assert target in targets, line


@pytest.mark.parametrize("page", [page for page in PAGES if page.parent in (ROOT, ROOT / "docs")], ids=lambda p: p.name)
def test_commands_to_paste_have_no_comments(page: Path) -> None:
    """The shell of macOS, zsh, takes a comment for arguments unless `setopt interactivecomments` was typed."""
    blocks = re.findall(r"^ *```(\w*)\n(.*?)^ *```", page.read_text(encoding="utf-8"), re.MULTILINE | re.DOTALL)
    lines = [line for language, block in blocks if not language for line in block.splitlines()]
    assert [line for line in lines if re.search(r"(^|\s)#\s", line)] == []


# README's commands, in order

MODEL = "out/real/smollm2-135m-instruct"
STAND_IN = f"""mkdir -p out/real && cp -r checkpoints/target {MODEL}
cp checkpoints/head/model.safetensors checkpoints/smollm2-135m-instruct
sed 's|"eagle_mlx": {{|&"base_model": "a/smollm2-135m-instruct",|' checkpoints/head/config.json > out/config.json
mv out/config.json checkpoints/smollm2-135m-instruct"""
"""The included model and head, with the names of the real ones."""
RUN_OTHERWISE = {
    "make demo": "# trains for minutes; tests/test_demo.py runs it with a tiny model",
    "make real": "# takes 20 minutes; tests/test_real.py runs it with a tiny model",
    "make test": "# would run this test again",
    "make model": "make model" if FULL else STAND_IN,  # fetches 98 MB
    # Serves until it is stopped, and another program may use its port.
    f"eagle-serve --target {MODEL}": f"""mkfifo log
eagle-serve --target {MODEL} --port 0 2> log &
exec 3< log
while read -r line <&3; do echo "$line"; [[ $line == 'ready: http://'* ]] && break; done
kill $! && wait $!""",
    f"eagle-train --target {MODEL} --hours 8 --output out/head": (
        f"eagle-train --target {MODEL} --hours 8 --dry-run --rows 2 --length 64 --unroll 2"
    ),
}
INSTALL = """python3 -m venv --without-pip .venv
cd .venv/lib/python*/site-packages
printf '%s\n' {packages} "import sys; sys.modules['wandb'] = None" > installed.pth
cd - > /dev/null
{python} -m pip --python .venv/bin/python install -q --no-index --no-deps --no-build-isolation --editable .
touch .venv/.ready"""
"""Make .venv with the packages that are installed already, in place of 1 GB from the registry.

All but wandb, which mlx-lm imports if it can: a fifth of each start.
"""


def test_readme_names_the_command_that_runs_the_tests() -> None:
    """On a line of its own, where `.ci/run` looks for it."""
    assert "\nmake test\n" in (ROOT / "README.md").read_text(encoding="utf-8")


@pytest.mark.skipif(not shutil.which("git") or not (ROOT / ".git").exists(), reason="no clone of the repository")
def test_the_commands_of_readme_work_as_typed(tmp_path: Path) -> None:
    """Run README's commands in order in one shell, with an empty environment, from `git clone` on."""
    origin, script, clone = tmp_path / "origin", ["set -e"], ""
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    for language, block in re.findall(r"^```(\w*)\n(.*?)^```", text, re.MULTILINE | re.DOTALL):
        if language == "python":
            code = block if FULL else block.replace("max_tokens=200", "max_tokens=48")
            script.append(f"python - <<'EOF'\n{code}EOF")
            continue
        for command in block.splitlines():
            script.append(f"echo {shlex.quote('$ ' + command)}\n{RUN_OTHERWISE.get(command, command)}")
            if command.startswith("git clone"):
                clone = command.split()[2]
                script.append(INSTALL.format(packages=sysconfig.get_path("purelib"), python=sys.executable))
    fast = ("MLX_DISABLE_COMPILE", "OPENBLAS_NUM_THREADS")  # as tests/conftest.py sets them
    environment = {name: os.environ[name] for name in fast if name in os.environ} | {
        "PATH": f"{Path(sys.executable).resolve().parent}:/usr/bin:/bin",
        "HOME": str(tmp_path),
        "GIT_CONFIG_COUNT": "1",
        "GIT_CONFIG_KEY_0": f"url.{origin}.insteadOf",
        "GIT_CONFIG_VALUE_0": clone,
    }
    publish = f"""mkdir {origin}
git ls-files -z -co --exclude-standard | tar -c -f - --null -T - | tar -x -f - -C {origin}
cd {origin} && git init -q && git config core.compression 0
git add -A && git -c user.name=a -c user.email=a commit -qm a"""
    subprocess.run(["bash", "-ec", publish], cwd=ROOT, env=environment, check=True)
    whole = ["bash", "-c", "\n".join(script)]
    done = subprocess.run(
        whole, cwd=tmp_path, env=environment, stdin=subprocess.DEVNULL, capture_output=True, text=True
    )
    print(done.stdout)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
    example = done.stdout.split("$ eagle-train")[0]
    assert float(re.findall(r"([\d.]+) tokens per forward of the model", example)[-1]) > (2 if FULL else 1)
