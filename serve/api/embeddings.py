"""POST /v1/embeddings, which is not served, and says what to use instead."""

from __future__ import annotations

from fastapi import APIRouter

from .errors import ApiError

router = APIRouter()


@router.post("/v1/embeddings", include_in_schema=False)
async def embeddings() -> None:
    """Raises ApiError 501, always."""
    said = (
        "this server has no embedding model: it writes text, through /v1/chat/completions, /v1/responses and "
        "/v1/messages. For embeddings run a server that has one beside it, such as llama.cpp's "
        "`llama-server --embedding`, and give clients its address for them"
    )
    raise ApiError(501, said, code="embeddings_not_supported")
