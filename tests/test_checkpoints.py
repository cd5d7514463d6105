"""A binary in checkpoints/ changes at most once per release, so that clones stay small."""

from __future__ import annotations

import hashlib
import shutil
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
SUMS = "checkpoints/SHA256SUMS"
BINARIES = {".safetensors", ".gz", ".npz", ".bin", ".png"}


def sums() -> dict[str, str]:
    lines = (ROOT / SUMS).read_text(encoding="utf-8").splitlines()
    return {path: digest for digest, path in (line.split() for line in lines)}


def git(*arguments: str) -> str:
    done = subprocess.run(["git", *arguments], cwd=ROOT, capture_output=True, text=True, check=False)
    return done.stdout.strip()


def test_binaries_are_those_of_the_list() -> None:
    """Whoever changes one must change the list too, which a review sees."""
    files = [path for path in (ROOT / "checkpoints").rglob("*") if path.suffix in BINARIES]
    digests = {str(path.relative_to(ROOT)): hashlib.sha256(path.read_bytes()).hexdigest() for path in files}
    assert digests == sums(), f"if this release changes it, write its sha256sum to {SUMS}"


@pytest.mark.skipif(not shutil.which("git") or not (ROOT / ".git").exists(), reason="no clone of the repository")
def test_a_binary_changes_at_most_once_per_release() -> None:
    if git("rev-parse", "--is-shallow-repository") == "true":
        pytest.skip("a shallow clone has no history")
    release = git("describe", "--tags", "--abbrev=0", "--match", "v*")
    start = release or git("log", "--diff-filter=A", "--format=%H", "--", SUMS).split("\n")[-1]
    for path in sums() if start else ():
        commits = git("log", "--format=%h", f"{start}..HEAD", "--", path).split()
        assert len(commits) <= 1, f"{path} changed in {commits}; keep candidates outside of the repository"
