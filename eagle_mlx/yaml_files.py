"""YAML that users write: read in one place, so that every such file is judged alike."""

from __future__ import annotations

from collections.abc import Hashable
from pathlib import Path
from typing import Any

import yaml

from eagle_mlx.errors import ConfigError


def read_yaml(file: Path, what: str) -> Any:
    """What a YAML file holds.

    Raises ConfigError, which says `what` it was to be, where it cannot be read, or gives one name twice.
    """
    try:
        return yaml.load(file.read_text(encoding="utf-8"), _Loader)
    except FileNotFoundError as e:
        raise ConfigError(f"there is no {what} {file}") from e
    except (OSError, UnicodeDecodeError, yaml.YAMLError, RecursionError) as e:
        raise ConfigError(f"{file} cannot be read as YAML: {' '.join(str(e).split())}") from e


class _Loader(yaml.SafeLoader):
    """YAML in which no name may be there twice: plain YAML keeps the last one and says nothing."""


def _mapping(loader: yaml.SafeLoader, node: yaml.MappingNode) -> dict[Any, Any]:
    seen: set[Hashable] = set()
    for key, _ in node.value:
        name = loader.construct_object(key, deep=True)
        if isinstance(name, Hashable) and name in seen:
            raise yaml.constructor.ConstructorError(
                None, None, f"{name!r} is there twice; give each name once", key.start_mark
            )
        if isinstance(name, Hashable):
            seen.add(name)
    loader.flatten_mapping(node)
    return loader.construct_mapping(node, deep=True)


_Loader.add_constructor(yaml.resolver.BaseResolver.DEFAULT_MAPPING_TAG, _mapping)
