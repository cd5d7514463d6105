"""What of which sources a run reads."""

from __future__ import annotations

from eagle_mlx.data_pipelines import DataConfig

from ..config import TrainConfig
from ..plan import sources_of


def data_config(config: TrainConfig) -> DataConfig:
    """What to read, and what of it to keep."""
    return DataConfig(
        sources_of(config),
        config.data.map,
        config.data.limit,
        config.run.seed,
        config.data.stream,
        config.data.skip_bad,
        config.data.keep_turns,
        config.data.keep_tokens,
        config.data.dedupe,
    )
