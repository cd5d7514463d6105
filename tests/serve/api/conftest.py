"""One server for the tests that leave it as it was."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.serve.api.live import Live, live


@pytest.fixture(scope="package")
def server() -> Iterator[Live]:
    with live() as running:
        yield running
        assert running.idle
