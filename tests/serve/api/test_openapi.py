"""The published schema holds: what it allows never breaks the server, and answers are as it says.

The long run, 5,000 cases: `SCHEMA_CASES=1250 pytest tests/serve/api/test_openapi.py` (so many for each of the four
routes that take a body).
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from typing import Any

import pytest
import schemathesis
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from schemathesis.checks import CheckFunction
from schemathesis.openapi.checks import (
    content_type_conformance,
    response_schema_conformance,
    status_code_conformance,
)

from eagle_mlx.serve.api.app import create_app
from eagle_mlx.serve.api.model import Loaded
from eagle_mlx.serve.api.worker import Worker
from tests.serve.api.live import DEPTH, Live, engine, live, wide

CASES = int(os.environ.get("SCHEMA_CASES", "60"))
