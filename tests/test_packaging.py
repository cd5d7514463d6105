"""The package list, the version, the entry points, and the contents of a wheel."""

from __future__ import annotations

import importlib.util
import re
import runpy
import shutil
import subprocess
import sys
import tomllib
import zipfile
from fnmatch import fnmatch
from importlib.metadata import requires, version
from pathlib import Path
from typing import Any

import pytest
import yaml
from packaging.requirements import Requirement
from packaging.version import Version

import eagle_mlx as em

ROOT = Path(__file__).parent.parent
SOURCES = ("eagle_mlx", "train", "serve", "data_pipelines")
PROJECT: dict[str, Any] = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))


def packages_of_the_tree() -> dict[str, str]:
    """Return the import name of every folder with an `__init__.py`."""
    folders = {}
    for source in SOURCES:
        for init in (ROOT / source).rglob("__init__.py"):
            folder = init.parent.relative_to(ROOT).as_posix()
            name = folder.replace("/", ".")
            folders[name if source == "eagle_mlx" else f"eagle_mlx.{name}"] = folder
    return folders


def test_every_package_of_the_tree_is_listed() -> None:
    assert sorted(PROJECT["tool"]["setuptools"]["packages"]) == sorted(packages_of_the_tree())


def test_every_module_lies_in_a_package() -> None:
    modules = [path for source in SOURCES for path in (ROOT / source).rglob("*.py")]
    assert modules
    assert [path for path in modules if not (path.parent / "__init__.py").exists()] == []


def test_applications_are_mapped_into_the_package() -> None:
    mapping = PROJECT["tool"]["setuptools"]["package-dir"]
    assert mapping == {name if name == "eagle_mlx" else f"eagle_mlx.{name}": name for name in SOURCES}


def test_installed_version_is_the_projects() -> None:
    assert version("eagle-mlx") == em.__version__


def oldest(requirements: list[str], environment: dict[str, str]) -> Version:
    """Return the oldest MLX that these requirements allow in an environment. MLX must be among them."""
    ours = [Requirement(text) for text in requirements]
    mlx = [need for need in ours if need.name == "mlx" and (need.marker is None or need.marker.evaluate(environment))]
    return max(Version(bound.version) for need in mlx for bound in need.specifier if bound.operator == ">=")


@pytest.mark.parametrize(
    ("platform", "system", "extra", "ours"),
    [("darwin", "Darwin", "", ""), ("linux", "Linux", "cpu", ""), ("linux", "Linux", "cuda13", "cuda")],
)
def test_no_mlx_is_allowed_that_is_older_than_mlx_lm_wants(platform: str, system: str, extra: str, ours: str) -> None:
    project = PROJECT["project"]
    declared = project["optional-dependencies"][ours] if ours else project["dependencies"]
    environment = {"sys_platform": platform, "platform_system": system, "extra": extra}
    assert oldest(declared, environment) >= oldest(requires("mlx-lm") or [], environment)


def test_a_release_has_urls_and_links_that_work_outside_of_the_repository() -> None:
    spec = importlib.util.spec_from_file_location("release_links", ROOT / ".github" / "release_links.py")
    assert spec is not None
    assert spec.loader is not None
    links = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(links)
    address, tag = "https://example.org/eagle-mlx", "v0.1.0"
    readme = links.absolute((ROOT / "README.md").read_text(encoding="utf-8"), address, tag)
    assert f"]({address}/blob/{tag}/docs/install.md)" in readme
    assert f"]({address}/raw/{tag}/docs/images/" in readme
    assert all(link.startswith(("http", "#")) for link in re.findall(r"\]\(([^)]+)\)", readme))
    project = tomllib.loads(links.with_urls((ROOT / "pyproject.toml").read_text(encoding="utf-8"), address, tag))
    assert project["project"]["urls"]["Repository"] == address


def test_changelog_speaks_of_this_version() -> None:
    release = em.__version__.split(".dev")[0]
    assert f"## {release}" in (ROOT / "CHANGELOG.md").read_text(encoding="utf-8")


def test_the_citation_names_this_version() -> None:
    citation = yaml.safe_load((ROOT / "CITATION.cff").read_text(encoding="utf-8"))
    assert citation["version"] == em.__version__
    assert citation["license"] == PROJECT["project"]["license"]


@pytest.mark.parametrize("path", sorted((ROOT / ".github").rglob("*.yml")), ids=lambda path: path.name)
def test_workflows_and_templates_use_targets_and_commands_that_exist(path: Path) -> None:
    text = path.read_text(encoding="utf-8")
    assert yaml.safe_load(text)
    targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(encoding="utf-8"), re.MULTILINE))
    assert set(re.findall(r"run: make ([a-z-]+)", text)) <= targets
    assert set(re.findall(r"\beagle-(?!mlx)[a-z]+\b", text)) - {"eagle-serve"} <= set(PROJECT["project"]["scripts"])


def test_jobs_run_make_with_the_python_that_they_set_up() -> None:
    """If there is no environment, make takes the first Python that it finds, even if a job has set up another."""
    workflows = [yaml.safe_load(path.read_text("utf-8")) for path in (ROOT / ".github" / "workflows").glob("*.yml")]
    jobs = [job["steps"] for workflow in workflows for job in workflow["jobs"].values()]
    scripts = ["\n".join(step.get("run", "") for step in steps) for steps in jobs]
    before_make = [script.partition("make ")[0] for script in scripts if "make " in script]
    assert len(before_make) >= 3
    assert all("python -m venv .venv" in script for script in before_make)


@pytest.mark.parametrize("command", sorted(PROJECT["project"]["scripts"]))
def test_entry_point_resolves(command: str) -> None:
    module, function = PROJECT["project"]["scripts"][command].split(":")
    assert callable(getattr(importlib.import_module(module), function))


@pytest.mark.parametrize("command", sorted(PROJECT["project"]["scripts"]))
def test_help_names_the_command(
    command: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    module, function = PROJECT["project"]["scripts"][command].split(":")
    monkeypatch.setattr(sys, "argv", [command, "--help"])
    with pytest.raises(SystemExit) as stop:
        getattr(importlib.import_module(module), function)()
    assert stop.value.code == 0
    assert command in capsys.readouterr().out


def test_wheel_puts_one_name_into_site_packages(tmp_path: Path) -> None:
    source = tmp_path / "source"
    source.mkdir()
    for name in SOURCES:
        shutil.copytree(ROOT / name, source / name, ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, source / name)
    build = f"from setuptools import build_meta; build_meta.build_wheel({str(tmp_path)!r})"
    built = subprocess.run([sys.executable, "-c", build], cwd=source, capture_output=True, text=True, check=False)
    assert built.returncode == 0, built.stderr
    assert "absent from the `packages`" not in built.stdout + built.stderr
    (wheel,) = tmp_path.glob("eagle_mlx-*.whl")
    with zipfile.ZipFile(wheel) as archive:
        names = archive.namelist()
    assert {name.split("/")[0] for name in names if ".dist-info/" not in name} == {"eagle_mlx"}
    modules = {path.relative_to(ROOT).as_posix() for package in SOURCES for path in (ROOT / package).rglob("*.py")}
    assert {name for name in names if name.endswith(".py")} == {
        name if name.startswith("eagle_mlx/") else f"eagle_mlx/{name}" for name in modules
    }
    assert "eagle_mlx/py.typed" in names


def test_the_source_archive_has_every_file_of_the_root_that_a_test_reads() -> None:
    lines = (ROOT / "MANIFEST.in").read_text(encoding="utf-8").splitlines()
    words = [word for line in lines for word in line.split()[1:] if line.startswith(("graft ", "include "))]
    sources = [path.read_text(encoding="utf-8") for path in (ROOT / "tests").rglob("*.py")]
    read = {name for text in sources for name in re.findall(r'ROOT / "([\w.-]+)"', text)} - {".git"}
    always = {"pyproject.toml", "MANIFEST.in", *SOURCES}
    assert "mkdocs.yml" in read
    assert [name for name in sorted(read - always) if not any(fnmatch(name, word) for word in words)] == []


def test_the_table_of_files_is_that_of_the_docstrings() -> None:
    script = runpy.run_path(str(ROOT / "docs" / "structure.py"))
    text = (ROOT / "docs" / "structure.md").read_text(encoding="utf-8")
    assert script["page"](text) == text, "run: python docs/structure.py"
    rows = re.findall(r"^\| \*?\*?`([\w./]+)`", text, re.MULTILINE)
    assert {f"{package}/" for package in SOURCES} <= set(rows)


def test_readme_names_what_exists() -> None:
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    assert set(re.findall(r"`(eagle-[a-z]+)`", text)) == set(PROJECT["project"]["scripts"])
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    for target in set(re.findall(r"^make ([a-z]+)$|`make ([a-z]+)`", text, re.MULTILINE)):
        assert re.search(rf"^{''.join(target)}:", makefile, re.MULTILINE), target
    for link in re.findall(r"\]\(([^)#:]+)\)", text):
        assert (ROOT / link).exists(), link
