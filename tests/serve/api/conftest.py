"""Servers for the tests that leave them as they were."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.serve.api.live import Live, live, loaded_format


@pytest.fixture(scope="package")
def server() -> Iterator[Live]:
    with live() as running:
        yield running
        assert running.idle


@pytest.fixture(scope="module")
def caller() -> Iterator[Live]:
    """With a model that calls tools."""
    with live(lambda: loaded_format("qwen")) as running:
        yield running


@pytest.fixture(scope="module")
def thinker() -> Iterator[Live]:
    """With a model that thinks, and calls tools."""
    with live(lambda: loaded_format("thinking")) as running:
        yield running
