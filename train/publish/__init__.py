"""eagle-publish: prepares a folder with a trained head and its model card, and uploads it to the hub. Its settings."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from eagle_mlx.errors import ConfigError
from eagle_mlx.late import late
from eagle_mlx.setting import REQUIRED, Group, Limit, setting

_LICENSE = "license id on the hub, such as apache-2.0, mit or llama3.1 (required)"
_LICENSE_ID = Limit(str.islower, "must be an id of the hub, such as apache-2.0, not {}")
_BASE_MODEL = (
    "hub id of the model that the head is for (default: the target in the head's config); if the head was trained on a "
    "conversion, give the original, so that other servers find it"
)
_FIGURES = "output of eagle-bench --json; repeatable, for several sets of prompts"


@dataclass(frozen=True)
class CardOptions(Group):
    """Facts for the model card."""

    license: str | None = setting(None, _LICENSE, _LICENSE_ID, metavar="ID")
    license_name: str | None = setting(None, "with --license other: its name")
    license_link: str | None = setting(None, "with --license other: its address", metavar="URL")
    base_model: str | None = setting(None, _BASE_MODEL, metavar="USER/NAME")
    figures: tuple[Path, ...] = setting((), _FIGURES, metavar="FILE", repeat=True)


@dataclass(frozen=True)
class UploadOptions(Group):
    """The upload itself."""

    dry_run: bool = setting(False, "show the files and the card, without the network")
    private: bool = setting(False, "make the repository private (default: public)")
    overwrite: bool = setting(False, "replace a head that the repository has already")
    message: str | None = setting(None, "commit message", metavar="TEXT")
    token: str | None = setting(None, "hub token (default: HF_TOKEN, then that of `hf auth login`)", metavar="TOKEN")


@dataclass(frozen=True)
class PublishOptions(Group):
    """A head, where to publish it, and its card."""

    folder: Path = setting(REQUIRED, "the head's folder, or the output of eagle-train", name="DIR", positional=True)
    repo: str = setting(REQUIRED, "repository, created if necessary", metavar="USER/NAME")
    card: CardOptions = CardOptions()
    upload: UploadOptions = UploadOptions()

    def _check(self) -> None:
        late("eagle_mlx.hub:check_full_id")(self.repo)
        card = self.card
        if not card.license:
            raise ConfigError(
                "no license: give one with --license (apache-2.0, mit, llama3.1, ...), or nobody may use the head. "
                "Check the licenses of the target and of the training data first"
            )
        if card.license == "other" and not (card.license_name and card.license_link):
            raise ConfigError("--license other needs --license-name and --license-link")
        if card.license != "other" and (card.license_name or card.license_link):
            raise ConfigError("--license-name and --license-link go with --license other")
