"""The folder of --learn: bounded, for its owner alone, whole whenever a process is killed, and easy to empty."""

from __future__ import annotations

import json
import os
import time
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from subprocess import TimeoutExpired
from tempfile import TemporaryDirectory

import numpy as np
import pytest

import eagle_mlx as em
from eagle_mlx.errors import ConfigError
from eagle_mlx.files import locked
from eagle_mlx.heads.eagle3 import save_eagle3
from eagle_mlx.hidden_states import Example, HiddenStates
from eagle_mlx.memory import gb
from eagle_mlx.paired import Gain
from eagle_mlx.serve.api.cli import main as serve
from eagle_mlx.serve.heads import main as heads
from eagle_mlx.serve.learning.options import LearnOptions
from eagle_mlx.serve.learning.texts import Texts
from eagle_mlx.serve.learning.versions import Event, Versions, claim
from eagle_mlx.shards import ShardMeta
from tests.fakes import tiny_head, tiny_target
from tests.forks import Fork
from tests.full import in_full

META = ShardMeta("tiny", 4, 100, (0, 1))
TOKEN_BYTES = 3 * 4 * 2 + 5


def example(key: int, tokens: int = 20) -> Example:
    rng = np.random.default_rng(key)
    states = HiddenStates.split((0, 1), rng.integers(0, 1 << 15, (tokens, 12)).astype(np.uint16))
    ids = rng.integers(0, 100, tokens).astype(np.int32)
    return Example(ids, (np.arange(tokens) >= 5).astype(np.uint8), states, key)


def same(first: Example, second: Example) -> bool:
    assert first.states is not None
    assert second.states is not None
    return np.array_equal(first.tokens, second.tokens) and np.array_equal(first.states.whole, second.states.whole)


def test_texts_are_read_as_they_were_written_and_the_oldest_leave_first(tmp_path: Path) -> None:
    limit = 200 * 20 * TOKEN_BYTES
    texts = Texts(tmp_path / "texts", limit, META)
    for key in range(400):
        texts.add(example(key))
        assert texts.disk_bytes <= limit
        assert sum(path.stat().st_size for path in (tmp_path / "texts").iterdir()) == texts.disk_bytes
    keys = [text.key for text in texts.all]
    assert keys == list(range(400 - len(keys), 400))
    assert 60 < len(keys) < 200
    assert all(same(texts.read(text), example(text.key)) for text in texts.all[::7])
    again = Texts(tmp_path / "texts", limit, META)
    assert [text.key for text in again.all] == [text.key for text in texts.all]
    assert all(same(again.read(text), example(text.key)) for text in again.all[::7])
    assert {path.stat().st_mode & 0o777 for path in (tmp_path / "texts").iterdir()} == {0o600}
    assert (tmp_path / "texts").stat().st_mode & 0o777 == 0o700


def test_a_text_larger_than_the_limit_pushes_no_others_out(tmp_path: Path) -> None:
    texts = Texts(tmp_path / "texts", 40 * 20 * TOKEN_BYTES, META)
    texts.add(example(1))
    texts.add(example(2, tokens=2000))
    assert [text.key for text in texts.all] == [1]


def test_what_was_not_written_whole_is_deleted(tmp_path: Path) -> None:
    texts = Texts(tmp_path / "texts", 1 << 20, META)
    texts.add(example(1))
    [path] = (tmp_path / "texts").iterdir()
    (tmp_path / "texts" / "7.safetensors.part").write_bytes(path.read_bytes())
    (tmp_path / "texts" / "8.safetensors").write_bytes(path.read_bytes()[:-9])
    (tmp_path / "texts" / "copy.safetensors").write_bytes(path.read_bytes())
    again = Texts(tmp_path / "texts", 1 << 20, META)
    assert [text.key for text in again.all] == [1]
    assert [*(tmp_path / "texts").iterdir()] == [path]


@pytest.mark.parametrize("name", ["heads", "texts"])
def test_a_folder_with_heads_or_texts_of_the_user_is_refused(name: str, tmp_path: Path) -> None:
    """A server deletes what is not its own there: `--learn .` in a folder with trained heads must not lose them."""
    (tmp_path / name).mkdir()
    (tmp_path / name / "mine").write_text("mine")
    with pytest.raises(ConfigError, match="has heads or texts of something else; name a new folder"):
        claim(tmp_path, {})
    assert [*tmp_path.rglob("*")] == [tmp_path / name, tmp_path / name / "mine"]


def event(version: int) -> Event:
    gain = Gain(0.1, 0.05, 0.15, "better", 20, 12)
    return Event("took over", version, 2.0, 2.2, gain, 0.1, 5000, 1_790_000_000 * 10**9)


def save(versions: Versions, version: int) -> None:
    save_eagle3(tiny_head(tiny_target(), seed=version), versions.candidate, target_name="tiny", extra={"step": version})


def test_a_folder_that_cannot_be_written_is_refused_before_a_model_is_loaded(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "file").touch()
    assert serve(["--target", str(tmp_path), "--learn", str(tmp_path / "file/texts"), "--port", "0"]) == 2
    assert f"{tmp_path}/file is a file, so it can hold no output" in capsys.readouterr().err


def test_old_versions_leave_and_the_serving_one_stays(tmp_path: Path) -> None:
    with claim(tmp_path / "learned", {}):
        versions = Versions(tmp_path / "learned")
        for version in range(1, 9):
            save(versions, version)
            versions.take_over(event(version))
        kept = sorted(int(path.name) for path in (tmp_path / "learned" / "heads").iterdir())
        assert kept == [4, 5, 6, 7, 8]
        versions.note(replace(event(4), outcome="rolled back", after=1.9))
        for version in range(9, 12):
            save(versions, version)
            versions.take_over(event(version))
            versions.note(event(4))
        assert versions.path(4).is_dir()
        again = Versions(tmp_path / "learned")
        assert (again.serving, again.events, again.latest) == (4, versions.events, 11)
    files = [path for path in (tmp_path / "learned").rglob("*") if path.is_file()]
    assert {path.stat().st_mode & 0o777 for path in files} == {0o600}
    assert {path.stat().st_mode & 0o777 for path in (tmp_path / "learned").rglob("*") if path.is_dir()} == {0o700}


def test_the_version_before_the_serving_one_stays_however_often_it_returned(tmp_path: Path) -> None:
    with claim(tmp_path, {}):
        versions = Versions(tmp_path)
        for version in range(1, 10):
            save(versions, version)
            versions.take_over(event(version))
            if 4 < version < 9:
                versions.note(replace(event(4), outcome="rolled back"))
        versions.note(replace(event(9), outcome="not better"))
        assert versions.path(4).is_dir()


WRITER = """
import sys
from pathlib import Path
from tests.serve.test_learned_folder import claim, event, save
from eagle_mlx.serve.learning.versions import Versions
with claim(Path(sys.argv[1]), {}), open(sys.argv[2], "w") as begun:
    versions = Versions(Path(sys.argv[1]))
    while True:
        version = versions.latest + 1
        print(version, file=begun, flush=True)
        save(versions, version)
        versions.take_over(event(version))
"""


def test_a_killed_process_leaves_a_whole_head(tmp_path: Path) -> None:
    """At moments spread over the time of a version: the version that the log names loads, and is that version."""
    folder, target, pipe = tmp_path / "learned", tiny_target(), tmp_path / "begun"
    os.mkfifo(pipe)
    for moment in range(in_full(20, 2)):
        writer = Fork("-c", WRITER, str(folder), str(pipe))
        with pipe.open() as begun:
            began = int(begun.readline())
            after = time.monotonic()
            while int(begun.readline()) < began + 2:
                pass
            took = (time.monotonic() - after) / 2
            with suppress(TimeoutExpired):
                writer.wait(timeout=took * moment / in_full(5, 2))
            writer.kill()
            writer.wait()
        with claim(folder, {}):
            versions = Versions(folder)
            assert versions.serving >= began + 1
            place = versions.path(versions.serving)
            em.load_head(place, target)
            assert json.loads((place / "config.json").read_text())["eagle_mlx"]["step"] == versions.serving
            assert not versions.candidate.exists()
            assert not [path for path in folder.rglob("*") if path.name.startswith(".")]


def test_forget_deletes_the_texts_and_log_shows_the_versions(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "learned"
    assert heads(["forget", str(folder)]) == 2
    assert heads(["log", str(folder)]) == 2
    assert capsys.readouterr().err.count(f"{folder} is not a folder of eagle-serve --learn") == 2
    with claim(folder, {}):
        texts, versions = Texts(folder / "texts", 1 << 20, META), Versions(folder)
        texts.add(example(1))
        nbytes = sum(path.stat().st_size for path in (folder / "texts").iterdir())
        assert heads(["log", str(folder)]) == 1
        assert f"{gb(nbytes)} of texts" in capsys.readouterr().out
        save(versions, 1)
        versions.take_over(event(1))
    with locked(folder):
        assert heads(["forget", str(folder)]) == 2
        assert f"another process is writing to {folder}" in capsys.readouterr().err
    assert (folder / "texts").exists()
    assert heads(["forget", str(folder)]) == 0
    assert not [*(folder / "texts").iterdir()]
    assert heads(["log", str(folder)]) == 0
    shown = capsys.readouterr().out
    assert "took over: tau 2.000 to 2.200, +10.0% (+5.0% to +15.0%) over 20 held-out conversations" in shown
    assert shown.endswith("version 1 serves\n")


def test_forget_deletes_texts_on_another_disk_even_if_this_one_is_full(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    folder, disk = tmp_path / "learned", tmp_path / "disk"
    disk.mkdir()

    def full(path: Path, *_: object) -> None:
        raise OSError(28, "No space left on device", str(path))

    with claim(folder, {}):
        (folder / "texts").symlink_to(disk)
        texts = Texts(folder / "texts", 1 << 20, META)
        texts.add(example(1))
    monkeypatch.setattr(Path, "write_text", full)
    assert heads(["forget", str(folder)]) == 0
    assert not [*disk.iterdir()]
    (disk / "1.safetensors").touch()
    monkeypatch.setattr(Path, "unlink", full)
    assert heads(["forget", str(folder)]) == 2
    assert f"the texts in {folder} cannot be deleted: " in capsys.readouterr().err


def test_a_disk_for_the_texts_keeps_its_own_folder(tmp_path: Path) -> None:
    """New file systems contain lost+found."""
    folder = tmp_path / "learned"
    with claim(folder, {}):
        (folder / "texts" / "lost+found").mkdir(parents=True)
        texts = Texts(folder / "texts", 1 << 20, META)
        texts.add(example(1))
        assert len(Texts(folder / "texts", 1 << 20, META).all) == 1
    assert heads(["forget", str(folder)]) == 0
    assert [path.name for path in (folder / "texts").iterdir()] == ["lost+found"]


def test_a_folder_of_another_user_is_an_error_in_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    """A service may run as a user of its own, who alone can read what it learns from."""
    user = os.geteuid()
    with TemporaryDirectory() as place:
        folder = Path(place) / "learned"
        claim(folder, {}).close()
        folder.chmod(0)
        try:
            if user == 0:
                os.seteuid(65534)
            assert heads(["forget", str(folder)]) == heads(["log", str(folder)]) == 2
        finally:
            os.seteuid(user)
            folder.chmod(0o700)
    assert capsys.readouterr().err == f"error: {folder} cannot be read: Permission denied\n" * 2


def test_each_version_has_the_tau_of_its_last_judgment(tmp_path: Path) -> None:
    with claim(tmp_path, {}):
        versions = Versions(tmp_path)
        for outcome, version, before, after in (
            ("not better", 0, 2.0, 1.9),
            ("took over", 1, 2.1, 2.3),
            ("took over", 2, 2.2, 2.5),
            ("rolled back", 1, 2.4, 2.0),
        ):
            versions.note(replace(event(version), outcome=outcome, before=before, after=after))
        assert versions.taus == {0: 2.1, 1: 2.4, 2: 2.0}


def test_a_version_that_is_rolled_back_has_lost_nothing(tmp_path: Path) -> None:
    with claim(tmp_path, {}):
        versions = Versions(tmp_path)
        for outcome, version, of_candidate, lost in (
            ("took over", 1, 0.01, 0.01),
            ("took over", 2, 0.02, 0.02),
            ("not better", 2, 0.07, 0.02),
            ("rolled back", 1, 0.01, 0.01),
            ("took over", 3, 0.0, 0.0),
        ):
            versions.note(replace(event(version), outcome=outcome, lost=of_candidate))
            assert versions.lost == lost


def test_candidates_that_are_not_better_do_not_hide_what_versions_have_lost(tmp_path: Path) -> None:
    """The log has 200 lines, and learning goes on for years."""
    with claim(tmp_path, {}):
        versions = Versions(tmp_path)
        for version in (1, 2):
            versions.note(replace(event(version), before=2.0 + version, lost=0.01 * version))
        for _ in range(210):
            versions.note(replace(event(2), outcome="not better", before=5.0))
        assert versions.lost == 0.02
        assert versions.taus == {0: 3.0, 1: 4.0, 2: 5.0}
        assert len(versions.events) == 200
        assert Versions(tmp_path).events == versions.events


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"learn_share": 0.1}, "--learn-share needs --learn"),
        ({"learn_redact": ("x",)}, "--learn-redact needs --learn"),
        ({"learn": "folder", "learn_redact": ("(",)}, "not a regular expression"),
        ({"learn": "folder", "learn_share": 0.9}, "--learn-share must be"),
    ],
)
def test_settings_that_mean_nothing_are_refused(settings: dict[str, object], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        LearnOptions.of(**settings)
