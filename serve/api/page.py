"""GET /: a page for people, drawn in the browser from /health and /metrics."""

from __future__ import annotations

import re
from base64 import b64encode
from hashlib import sha256
from pathlib import Path

from fastapi import APIRouter
from starlette.responses import HTMLResponse

router = APIRouter()


def _hash(html: str, tag: str) -> str:
    """A page's one inline script or style, as its policy names it."""
    (text,) = re.findall(rf"<{tag}>(.*?)</{tag}>", html, re.DOTALL)
    return f"'sha256-{b64encode(sha256(text.encode()).digest()).decode()}'"


PAGE = Path(__file__).with_name("page.html").read_text(encoding="utf-8")
HEADERS = {
    # The page's own script and style, requests to this server, and nothing else.
    "Content-Security-Policy": "; ".join(
        (
            "default-src 'none'",
            f"script-src {_hash(PAGE, 'script')}",
            f"style-src {_hash(PAGE, 'style')}",
            "connect-src 'self'",
            "img-src data:",
            "base-uri 'none'",
            "form-action 'none'",
            "frame-ancestors 'none'",
            "require-trusted-types-for 'script'",
        )
    ),
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cache-Control": "no-cache",
}


@router.api_route("/", methods=["GET", "HEAD"], include_in_schema=False)
async def page() -> HTMLResponse:
    """The page. It asks for nothing but this server's own numbers."""
    return HTMLResponse(PAGE, headers=HEADERS)
