"""The command `eagle-serve launch`: how to start a coding agent with a running server."""

from __future__ import annotations

import json
import os
import shlex
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from http import HTTPStatus
from http.client import HTTPException
from typing import Literal
from urllib.error import HTTPError
from urllib.request import Request, urlopen

from eagle_mlx.command import exit_code, read
from eagle_mlx.errors import ConfigError
from eagle_mlx.setting import REQUIRED, Group, setting

_ABOUT = "Print the command that starts a coding agent with a running server. With --run, start it."
_EPILOG = """\
examples:
  eagle-serve launch claude
  eagle-serve launch codex --run
  eagle-serve launch opencode --url http://studio.local:8000 --model Qwen3-4B-4bit --run -- run 'Fix the tests'

Arguments after -- go to the program. If the server needs a key, set EAGLE_API_KEY. The programs' own files do not
change; docs/agents.md shows how to change them."""
_KEY = "EAGLE_API_KEY"
_SECONDS = 5
"""Timeout of the request for the models, which a running server answers at once; httpx has the same default."""
_PACKAGES = {"claude": "@anthropic-ai/claude-code", "codex": "@openai/codex", "opencode": "opencode-ai"}
"""Names in npm's registry."""
_MOST_OUTPUT = 8192
"""Tokens of an answer that an agent may ask for, or a quarter of the context if that is less: prompts need the rest.
docs/agents.md has the same figure."""


@dataclass(frozen=True)
class LaunchOptions(Group):
    """A coding agent, and the server that it uses."""

    program: Literal["claude", "codex", "opencode"] = setting(REQUIRED, "the agent to start", positional=True)
    url: str = setting("http://127.0.0.1:8000", "address of the server", metavar="URL")
    model: str = setting("", "a model's name in /v1/models; by default the first that is loaded, or the first")
    run: bool = setting(False, "start the program")


@dataclass(frozen=True)
class ServedModel:
    url: str
    model: str
    context: int | None  # tokens; None until the model is loaded
    key: str | None

    @property
    def output(self) -> int:
        """The tokens of an answer for which an agent reserves a part of the context."""
        return min(_MOST_OUTPUT, (self.context or 0) // 4)


@dataclass(frozen=True)
class Launch:
    arguments: Sequence[str]
    variables: Mapping[str, str] = field(default_factory=dict)  # environment variables

    def shell(self, key: str | None) -> str:
        """Return the command for a POSIX shell, with the name of the key's variable in place of the key."""

        def quoted(text: str) -> str:
            parts = text.split(key) if key else [text]
            return f'"${_KEY}"'.join(shlex.quote(part) if part or len(parts) == 1 else "" for part in parts)

        variables = [f"{name}={quoted(value)}" for name, value in self.variables.items()]
        return " ".join([*variables, *map(quoted, self.arguments)])


def main(argv: Sequence[str]) -> int:
    """Print a command, or become the program. Returns the exit status: 0, or 2 for an error."""
    at = argv.index("--") if "--" in argv else len(argv)
    own, more = argv[:at], argv[at + 1 :]
    return exit_code(lambda: _run(read(LaunchOptions, own, "eagle-serve launch", _ABOUT, _EPILOG), more))


def _run(options: LaunchOptions, more: Sequence[str]) -> None:
    server = find(options.url.rstrip("/").removesuffix("/v1"), options.model, os.environ.get(_KEY))
    start = {"claude": claude, "codex": codex, "opencode": opencode}[options.program](server)
    start = Launch([*start.arguments, *more], start.variables)
    if not options.run:
        print(start.shell(server.key))
        return
    if shutil.which(options.program) is None:
        raise ConfigError(f"{options.program} is not installed: npm install -g {_PACKAGES[options.program]}")
    os.execvpe(options.program, list(start.arguments), {**os.environ, **start.variables})


def find(url: str, name: str, key: str | None) -> ServedModel:
    """Ask a server for its models. Raises ConfigError if it does not answer, refuses the key, or lacks the model."""
    try:
        request = Request(f"{url}/v1/models", headers={"Authorization": f"Bearer {key}"} if key else {})
        with urlopen(request, timeout=_SECONDS) as answer:
            models = [
                ServedModel(url, str(model["id"]), model["max_model_len"] and int(model["max_model_len"]), key)
                for model in json.load(answer)["data"]
            ]
    except (OSError, HTTPException, ValueError, KeyError, TypeError) as e:
        if isinstance(e, HTTPError) and e.code == HTTPStatus.UNAUTHORIZED:
            need = f"another key than {_KEY}" if key else f"a key; set {_KEY}"
            raise ConfigError(f"{url} needs {need}") from e
        raise ConfigError(f"no eagle-serve answers at {url} ({e}); start it, or name its address with --url") from e
    fitting = [model for model in models if name in ("", model.model)]
    if not fitting:
        wish = f"--model {name}: " if name else ""
        raise ConfigError(f"{wish}{url} has {', '.join(model.model for model in models) or 'no models'}")
    return next((model for model in fitting if model.context), fitting[0])


def claude(server: ServedModel) -> Launch:
    """Start Claude Code. It needs all three default models, because unknown names get a 404."""
    variables = {"ANTHROPIC_BASE_URL": server.url, "ANTHROPIC_AUTH_TOKEN": server.key or "none"}
    tiers = ("MODEL", "DEFAULT_OPUS_MODEL", "DEFAULT_SONNET_MODEL", "DEFAULT_HAIKU_MODEL")
    variables |= {f"ANTHROPIC_{tier}": server.model for tier in tiers}
    if server.context:
        variables["CLAUDE_CODE_MAX_CONTEXT_TOKENS"] = str(server.context)
        variables["CLAUDE_CODE_MAX_OUTPUT_TOKENS"] = str(server.output)
    return Launch(["claude"], variables)


def codex(server: ServedModel) -> Launch:
    """Start Codex CLI. Values of its -c are TOML; JSON's strings and integers are, too."""
    provider = {"name": "eagle-serve", "base_url": f"{server.url}/v1", "wire_api": "responses"}
    if server.key:
        provider["env_key"] = _KEY
    settings: dict[str, str | int] = {"model": server.model, "model_provider": "eagle"}
    if server.context:
        settings["model_context_window"] = server.context
    settings |= {f"model_providers.eagle.{name}": value for name, value in provider.items()}
    flags = [part for name, value in settings.items() for part in ("-c", f"{name}={json.dumps(value)}")]
    return Launch(["codex", *flags])


def opencode(server: ServedModel) -> Launch:
    """Start opencode. Its variable overrides the files of settings."""
    limit = {"context": server.context, "output": server.output} if server.context else None
    provider = {
        "npm": "@ai-sdk/openai-compatible",
        "options": {"baseURL": f"{server.url}/v1", "apiKey": server.key or "none"},
        "models": {server.model: {"limit": limit} if limit else {}},
    }
    content = {"model": f"eagle/{server.model}", "provider": {"eagle": provider}}
    return Launch(["opencode"], {"OPENCODE_CONFIG_CONTENT": json.dumps(content)})
