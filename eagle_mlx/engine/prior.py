"""What an engine has learnt about rounds, kept in a file for the next: the first requests do not pay for it again."""

from __future__ import annotations

import hashlib
import json
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path
from typing import Any

from eagle_mlx.engine.engine import Engine
from eagle_mlx.errors import ConfigError
from eagle_mlx.files import cache_folder, write_whole
from eagle_mlx.machine import describe
from eagle_mlx.policy import ThroughputPolicy
from eagle_mlx.target import fingerprint

_VERSION = 1
"""Of what the files hold. One of another version is as good as none."""
_BANDS = (512, 2048, 8192, 32768)
"""Tokens of context up to which rounds are alike: four times as many change what attention takes, hardly the rest."""
_LEAST_ROUNDS = 100
"""Before so many the first guesses, and kernels that were compiled, are still in what was learnt."""


class Prior:
    """Gives an engine's policy what earlier engines of the same kind have learnt, and keeps what it learns.

    One file for each machine, target, proposer and setting, with a part for each band of context. It may be deleted at
    any time. Nothing fails where it cannot be read or written.
    """

    def __init__(self, engine: Engine, policy: ThroughputPolicy, folder: Path | None = None):
        """The engine must be new, and the policy its own. `folder`: by default `policies` in the cache folder."""
        self._engine, self._policy = engine, policy
        self._about = _about(engine, policy)
        digest = hashlib.blake2s(json.dumps(self._about, sort_keys=True).encode()).hexdigest()[:16]
        self.file = (folder or cache_folder() / "policies") / f"{digest}.json"
        engine.on_first_round = self._begin

    def _begin(self, context: int) -> None:
        """`context`: tokens of a row, the mean of those that are decoded first."""
        bands = self._bands()
        known = [band for band in (_band(context), *map(str, _BANDS)) if band in bands]
        if known:
            start(self._policy, bands[known[0]])

    def _bands(self) -> dict[str, Any]:
        """What the file holds, by band; nothing where it is none of ours."""
        try:
            content = json.loads(self.file.read_text(encoding="utf-8"))
        except (OSError, ValueError):
            return {}
        ours = isinstance(content, dict) and content.get("version") == _VERSION and content.get("about") == self._about
        bands = content.get("bands") if ours else None
        return bands if isinstance(bands, dict) else {}

    def save(self) -> bool:
        """Keep what the policy has learnt, where that is worth it; whether it was kept."""
        if self._policy.rounds < _LEAST_ROUNDS:
            return False
        bands = self._bands() | {_band(self._engine.context): self._policy.knowledge()}
        content = {"version": _VERSION, "about": self._about, "bands": bands}
        try:
            self.file.parent.mkdir(parents=True, exist_ok=True)
            write_whole(self.file, json.dumps(content).encode())
        except OSError:
            return False
        return True


def start(policy: ThroughputPolicy, knowledge: Any) -> bool:
    """Have a new policy begin with this; where it is no knowledge, nothing happens and the answer is False."""
    trial = type(policy)(policy.max_depth, policy.explore, policy.max_nodes)
    with suppress(AttributeError, ConfigError, IndexError, KeyError, OverflowError, TypeError, ValueError):
        for each in (trial, policy):  # one that fails half-way is of no use
            each.start_from(knowledge)
        return True
    return False


def _band(context: int) -> str:
    return str(next((band for band in _BANDS if context <= band), _BANDS[-1] * 4))


def _about(engine: Engine, policy: ThroughputPolicy) -> dict[str, Any]:
    """What has to be the same for rounds to cost and yield the same."""
    proposer = engine.proposer
    return {
        "machine": {name: str(value) for name, value in asdict(describe()).items()},
        "target": fingerprint(engine.target),
        "proposer": None if proposer is None else [proposer.name, getattr(proposer, "identity", "")],
        "depth": policy.max_depth,
        "nodes": policy.max_nodes,
        "kv_bits": engine.kv_bits,
    }
