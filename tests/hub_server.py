"""A stand-in of the hub in memory, with its routes for creating, filling and reading model repositories."""

from __future__ import annotations

import asyncio
import base64
import hashlib
import json
import threading
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import uvicorn
import yaml
from fastapi import FastAPI, Request, Response
from fastapi.responses import JSONResponse, StreamingResponse
from huggingface_hub import constants

WRITE, READ = "hf_may_write", "hf_may_read"
OWNER = "user"
_LARGE = (".safetensors", ".bin", ".png")


@dataclass
class Repo:
    private: bool = False
    gated: bool = False
    files: dict[str, bytes] = field(default_factory=dict)
    commits: list[str] = field(default_factory=list)
    """Commit messages."""

    @property
    def sha(self) -> str:
        return hashlib.sha1(repr((self.commits, sorted(self.files))).encode()).hexdigest()


class Hub:
    """The stand-in's contents, and every request that it received."""

    def __init__(self) -> None:
        self.repos: dict[str, Repo] = {}
        self.large: dict[str, bytes] = {}
        self.requests: list[str] = []
        self.refuse_commits = False
        self.refuse_large = False
        self.keep_apart = True
        """Whether large files are uploaded separately from the commit."""
        self.is_slow = False
        """Whether files are sent at 20 bytes a second."""
        self.base = ""

    def clear(self) -> None:
        """Delete all contents and requests, and refuse nothing."""
        for held in (self.repos, self.large, self.requests):
            held.clear()
        self.refuse_commits, self.refuse_large, self.keep_apart, self.is_slow = False, False, True, False

    def put(self, repo: str, files: dict[str, bytes], **access: Any) -> None:
        self.repos[repo] = Repo(files=files, commits=["first"], **access)

    def created(self) -> list[str]:
        return [request for request in self.requests if request == "POST /api/repos/create"]


def _refuse(status: int, message: str, code: str | None = None) -> JSONResponse:
    headers = {"X-Error-Message": message, **({"X-Error-Code": code} if code else {})}
    return JSONResponse({"error": message}, status, headers=headers)


def _reader(request: Request, hub: Hub, name: str) -> Repo | JSONResponse:
    """Return the repository, or an error if this request may not read it."""
    token = request.headers.get("authorization", "").removeprefix("Bearer ")
    if token and token not in (WRITE, READ):
        return _refuse(401, "Invalid credentials in Authorization header")
    repo = hub.repos.get(name)
    if repo is None or (repo.private and not token):
        return _refuse(404, "Repository not found", "RepoNotFound")
    return repo


def _writer(request: Request, owner: str) -> JSONResponse | None:
    """Return an error if this request may not write, else None."""
    token = request.headers.get("authorization", "").removeprefix("Bearer ")
    if token not in (WRITE, READ):
        return _refuse(401, "Invalid credentials in Authorization header")
    if token != WRITE or owner != OWNER:
        return _refuse(403, f"you may not write to {owner}")
    return None


def app_of(hub: Hub) -> FastAPI:
    app = FastAPI()

    @app.middleware("http")
    async def note(request: Request, call_next: Any) -> Any:
        hub.requests.append(f"{request.method} {request.url.path}")
        return await call_next(request)

    _add_making(app, hub)
    _add_filling(app, hub)
    _add_reading(app, hub)
    return app


def _add_making(app: FastAPI, hub: Hub) -> None:
    @app.post("/api/validate-yaml")
    async def validate(request: Request) -> Response:
        front = yaml.safe_load((await request.json())["content"].split("---")[1])
        if front.get("license") == "no-such-license":
            return JSONResponse({"errors": [{"message": '"license" must be one of apache-2.0, mit'}]}, 400)
        return JSONResponse({"errors": [], "warnings": []})

    @app.post("/api/repos/create")
    async def create(request: Request) -> Response:
        fields = await request.json()
        name = f"{fields['organization']}/{fields['name']}"
        if (refused := _writer(request, fields["organization"])) is not None:
            return refused
        if name in hub.repos:
            return _refuse(409, "You already created this model repo")
        hub.repos[name] = Repo(fields.get("visibility") == "private", files={".gitattributes": b"*.bin filter=lfs\n"})
        return JSONResponse({"url": f"{hub.base}/{name}"})


def _add_filling(app: FastAPI, hub: Hub) -> None:
    @app.post("/api/models/{owner}/{name}/preupload/{revision}")
    async def preupload(owner: str, name: str, request: Request) -> Response:
        if (refused := _writer(request, owner)) is not None:
            return refused
        paths = [file["path"] for file in (await request.json())["files"]]
        modes = [
            {
                "path": path,
                "uploadMode": "lfs" if hub.keep_apart and path.endswith(_LARGE) else "regular",
                "shouldIgnore": False,
            }
            for path in paths
        ]
        return JSONResponse({"files": modes})

    @app.post("/{owner}/{name}.git/info/lfs/objects/batch")
    async def batch(request: Request) -> Response:
        listed = (await request.json())["objects"]
        objects = [
            {**stored, "actions": {"upload": {"href": f"{hub.base}/lfs/{stored['oid']}", "header": {}}}}
            for stored in listed
        ]
        return JSONResponse({"transfer": "basic", "objects": objects})

    @app.put("/lfs/{oid}")
    async def store(oid: str, request: Request) -> Response:
        content = await request.body()
        if hub.refuse_large:
            return _refuse(403, "this account is over its quota")
        assert hashlib.sha256(content).hexdigest() == oid
        hub.large[oid] = content
        return Response()

    @app.post("/api/models/{owner}/{name}/commit/{revision}")
    async def commit(owner: str, name: str, request: Request) -> Response:
        if (refused := _writer(request, owner)) is not None:
            return refused
        if hub.refuse_commits:
            return _refuse(403, "this repository is over its quota")
        repo = hub.repos[f"{owner}/{name}"]
        for line in (await request.body()).splitlines():
            item = json.loads(line)
            value = item["value"]
            if item["key"] == "header":
                repo.commits.append(value["summary"])
            elif item["key"] == "file":
                repo.files[value["path"]] = base64.b64decode(value["content"])
            elif item["key"] == "lfsFile":
                repo.files[value["path"]] = hub.large[value["oid"]]
            else:
                del repo.files[value["path"]]
        return JSONResponse({"commitUrl": f"{hub.base}/{owner}/{name}/commit/{repo.sha}", "commitOid": repo.sha})


def _add_reading(app: FastAPI, hub: Hub) -> None:
    @app.get("/api/models/{owner}/{name}")
    @app.get("/api/models/{owner}/{name}/revision/{revision}")
    async def info(owner: str, name: str, request: Request) -> Response:
        repo = _reader(request, hub, f"{owner}/{name}")
        if isinstance(repo, Response):
            return repo
        files = [{"rfilename": path, "size": len(content)} for path, content in repo.files.items()]
        card = yaml.safe_load(repo.files.get("README.md", b"---\n{}\n---").split(b"---")[1])
        about = {"id": f"{owner}/{name}", "sha": repo.sha, "private": repo.private, "siblings": files, "cardData": card}
        return JSONResponse({**about, "tags": [], "downloads": 0, "likes": 0})

    @app.get("/api/models/{owner}/{name}/tree/{revision}")
    async def tree(owner: str, name: str, request: Request) -> Response:
        repo = _reader(request, hub, f"{owner}/{name}")
        if isinstance(repo, Response):
            return repo
        return JSONResponse(
            [
                {"type": "file", "path": path, "size": len(content), "oid": hashlib.sha1(content).hexdigest()}
                for path, content in repo.files.items()
            ]
        )

    @app.api_route("/{owner}/{name}/resolve/{revision}/{path:path}", methods=["GET", "HEAD"])
    async def file(owner: str, name: str, path: str, request: Request) -> Response:
        repo = _reader(request, hub, f"{owner}/{name}")
        if isinstance(repo, Response):
            return repo
        if repo.gated:
            return _refuse(403, "Access to this model is restricted", "GatedRepo")
        if path not in repo.files:
            return _refuse(404, "Entry not found", "EntryNotFound")
        content = repo.files[path]
        headers = {"X-Repo-Commit": repo.sha, "ETag": f'"{hashlib.sha256(content).hexdigest()}"'}
        if hub.is_slow and request.method == "GET":
            return StreamingResponse(_slowly(content), headers={**headers, "Content-Length": str(len(content))})
        return Response(content, headers=headers, media_type="application/octet-stream")


async def _slowly(content: bytes) -> AsyncIterator[bytes]:
    for byte in content:
        yield bytes([byte])
        await asyncio.sleep(0.05)


@contextmanager
def serving() -> Iterator[Hub]:
    """Serve the stand-in on a free port in a thread."""
    hub = Hub()
    server = uvicorn.Server(uvicorn.Config(app_of(hub), host="127.0.0.1", port=0, log_level="error"))
    thread = threading.Thread(target=server.run, daemon=True)
    thread.start()
    try:
        while not server.started:
            assert thread.is_alive()
            time.sleep(0.005)
        hub.base = f"http://127.0.0.1:{server.servers[0].sockets[0].getsockname()[1]}"
        yield hub
    finally:
        server.should_exit = True
        thread.join(timeout=10)


def use(monkeypatch: pytest.MonkeyPatch, base: str, folder: Path, token: str | None = WRITE) -> None:
    """Point huggingface_hub to `base`, with its own cache and login in `folder`."""
    settings = {
        "ENDPOINT": base,
        "HUGGINGFACE_CO_URL_TEMPLATE": base + "/{repo_id}/resolve/{revision}/{filename}",
        "HF_HUB_OFFLINE": False,
        "HF_HUB_DISABLE_XET": True,
        "HF_HUB_CACHE": str(folder / "cache"),
        "HF_TOKEN_PATH": str(folder / "login" / "token"),
        "HF_STORED_TOKENS_PATH": str(folder / "login" / "stored_tokens"),
    }
    for name, value in settings.items():
        monkeypatch.setattr(constants, name, value)
    monkeypatch.delenv("HUGGING_FACE_HUB_TOKEN", raising=False)
    if token is None:
        monkeypatch.delenv("HF_TOKEN", raising=False)
    else:
        monkeypatch.setenv("HF_TOKEN", token)
