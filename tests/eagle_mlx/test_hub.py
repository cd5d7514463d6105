from __future__ import annotations

from pathlib import Path

import huggingface_hub
import pytest

from eagle_mlx import hub
from eagle_mlx.errors import EagleError


def test_a_folder_is_taken_as_it_is(tmp_path: Path) -> None:
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
    ],
)
def test_hub_ids(name: str, repo: str | None) -> None:
    assert hub.hub_id(name) == repo


def test_a_bare_name_is_fetched_from_the_community(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[str] = []

    def download(repo: str, **_: object) -> str:
        asked.append(repo)
        return str(tmp_path)

    monkeypatch.setattr(huggingface_hub, "snapshot_download", download)
    assert hub.resolve("Qwen3-32B-4bit") == tmp_path
    assert asked == ["mlx-community/Qwen3-32B-4bit"]


def test_without_a_network_the_error_says_what_was_tried() -> None:
    with pytest.raises(EagleError, match=r"no-such-model-here is no folder here.*hub cannot be reached"):
        hub.resolve("someone/no-such-model-here")


def test_a_path_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(EagleError, match="there is no folder"):
        hub.resolve(tmp_path / "none")
    (tmp_path / "file").write_text("")
    with pytest.raises(EagleError, match="is a file"):
        hub.resolve(tmp_path / "file")


def test_names_for_others_hold_no_paths(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "models" / "mine").mkdir(parents=True)
    monkeypatch.chdir(tmp_path)
    assert hub.public_name(tmp_path / "models" / "mine") == "mine"
    assert hub.public_name("models/mine") == "mine"
    assert hub.public_name("models/../models/mine/") == "mine"
    assert hub.public_name("Qwen/Qwen3-4B") == "Qwen/Qwen3-4B"
    assert hub.public_name("Qwen3-4B-4bit") == "mlx-community/Qwen3-4B-4bit"
