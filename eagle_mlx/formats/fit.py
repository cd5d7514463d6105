"""Whether a head belongs to a target."""

from __future__ import annotations

from eagle_mlx.errors import HeadError
from eagle_mlx.heads.base import DraftHead
from eagle_mlx.target import Target


def check_fit(head: DraftHead, target: Target) -> None:
    """Raise HeadError where the head cannot belong to the target."""
    embedding = head.embedding_size
    for what, trained, actual in (
        ("hidden size", head.target_hidden_size, target.hidden_size),
        ("embedding width", target.hidden_size if embedding is None else embedding, target.hidden_size),
        ("vocabulary", head.vocab_size, target.vocab_size),
    ):
        if trained != actual:
            raise HeadError(
                f"head expects a target of {what} {trained} but the target has {actual}; "
                "was it trained for another model?"
            )
    layers = named_layers(head)
    if layers and (max(layers) >= target.num_layers or min(layers) < 0):
        raise HeadError(
            f"head reads layers {layers} but the target has {target.num_layers} layers; "
            "was it trained for another model?"
        )


def named_layers(head: DraftHead) -> tuple[int, ...]:
    """The target layers that a head names itself; none for one that reads the last layer, whichever that is."""
    named: tuple[int, ...] = getattr(getattr(head, "config", None), "aux_layers", ())
    return named
