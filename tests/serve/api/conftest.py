"""Servers shared by tests that leave them unchanged."""

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
    """A server with a model that calls tools."""
    with live(lambda: loaded_format("qwen")) as running:
        yield running


@pytest.fixture(scope="module")
def thinker() -> Iterator[Live]:
    """A server with a model that reasons and calls tools."""
    with live(lambda: loaded_format("thinking")) as running:
        yield running


@pytest.fixture(scope="module")
def mistral() -> Iterator[Live]:
    """A server with a model whose template takes only users and assistants."""
    with live(lambda: loaded_format("mistral")) as running:
        yield running
