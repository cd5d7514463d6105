"""Head checkpoints on disk, one file a layout."""

from __future__ import annotations

from pathlib import Path

from eagle_mlx import hub
from eagle_mlx.errors import HeadError
from eagle_mlx.formats.eagle3 import load_eagle3, save_eagle3
from eagle_mlx.heads.eagle3 import Eagle3Head
from eagle_mlx.target import Target

__all__ = ["check_fit", "load_eagle3", "load_head", "save_eagle3"]


def load_head(name: str | Path, target: Target | None = None) -> Eagle3Head:
    """Load a head from a folder or a hub id, and with a target see that it fits.

    Raises CheckpointError for files that cannot be read, HeadError for a head of another target.
    """
    head = load_eagle3(hub.resolve(name), target.num_layers if target is not None else None)
    if target is not None:
        check_fit(head, target)
    return head


def check_fit(head: Eagle3Head, target: Target) -> None:
    """Raise HeadError where the head cannot belong to the target."""
    config = head.config
    for what, trained, actual in (
        ("hidden size", config.target_hidden_size, target.hidden_size),
        ("embedding width", config.hidden_size, target.hidden_size),
        ("vocabulary", config.vocab_size, target.vocab_size),
    ):
        if trained != actual:
            raise HeadError(
                f"head expects a target of {what} {trained} but the target has {actual}; "
                "was it trained for another model?"
            )
    if max(config.aux_layers) >= target.num_layers or min(config.aux_layers) < 0:
        raise HeadError(
            f"head reads layers {config.aux_layers} but the target has {target.num_layers} layers; "
            "was it trained for another model?"
        )
