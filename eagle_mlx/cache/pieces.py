"""Keys and values of some positions of one row, as the prefix cache keeps them."""

from __future__ import annotations

from dataclasses import dataclass

import mlx.core as mx

from eagle_mlx.cache.buffers import copied


@dataclass(frozen=True)
class KVPiece:
    """Of all layers that keep every position."""

    layers: list[list[mx.array]]
    """Layer by layer [1, heads, L, D], keys before values; empty for a layer that nothing was written to."""

    @property
    def arrays(self) -> list[mx.array]:
        return [x for layer in self.layers for x in layer]

    def split(self, at: int) -> tuple[KVPiece, KVPiece]:
        """The first `at` positions and the others. This piece is given away: at most one array is there twice."""
        heads, tails = KVPiece([]), KVPiece([])
        for layer in self.layers:
            heads.layers.append([])
            tails.layers.append([])
            for index, x in enumerate(layer):
                head, tail = copied(x[:, :, :at]), copied(x[:, :, at:])
                mx.eval(head, tail)
                layer[index] = head
                heads.layers[-1].append(head)
                tails.layers[-1].append(tail)
        return heads, tails
