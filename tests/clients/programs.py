"""The programs to try: how each one finds the server, and its prompt."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from tests.clients.scripted_target import Line, call

ASKED = "Read note.txt and tell me its word."
NOTE = "The word is heron.\n"
SAID = "It says so in the note. All is done."
"""The scripted target's answer after a tool result."""
SHORT = "A short answer to whom nothing is offered."
"""Its answer to programs without tools, and to requests for a title."""
PATCH = "*** Begin Patch\n*** Update File: note.txt\n@@\n-The word is heron.\n+The word is heron!\n*** End Patch\n"
READ = {"command": "cat note.txt", "description": "Read it"}


@dataclass(frozen=True)
class Program:
    """One program. In its texts, @URL@ is the server, @MODEL@ the model, @CONTEXT@ its context."""

    name: str
    program: str
    """The file to run."""
    api: str
    ask: Sequence[str]
    """Its arguments."""
    calls: tuple[str, Mapping[str, Any]] | None = None
    """A tool that it offers, and valid arguments."""
    without_tools: Sequence[str] | None = None
    """`ask` for models without tools; None if the program always offers some."""
    first: Sequence[str] = ()
    """Commands to run before."""
    variables: Mapping[str, str] = field(default_factory=dict)
    files: Mapping[str, str] = field(default_factory=dict)
    """Files in its home folder, which is also its working folder."""
    too_long: str = "maximum context length"
    """Its message for a prompt longer than the context."""
    model: str = "scripted"
    """The model's name. Some programs send other requests for names that they know."""
    file: str = ""
    """The name for recorded requests, if not the program's."""

    @property
    def recorded(self) -> str:
        return f"{self.file or self.program}.jsonl"


CODEX = """\
model = "@MODEL@"
model_provider = "eagle"
model_context_window = @CONTEXT@

[model_providers.eagle]
name = "eagle-serve"
base_url = "@URL@/v1"
wire_api = "responses"
"""
CONTINUE = """\
name: Local
version: 0.0.1
schema: v1
models:
  - name: Local
    provider: openai
    model: @MODEL@
    apiBase: @URL@/v1
    apiKey: none
    roles: [chat, edit, apply]
    defaultCompletionOptions:
      contextLength: @CONTEXT@
"""
LLM = """\
- model_id: eagle
  model_name: @MODEL@
  api_base: @URL@/v1
  supports_tools: true
  supports_schema: true
"""
QUIET = ("--no-git", "--no-check-update", "--analytics-disable", "--no-show-model-warnings")
MODELS = ("MODEL", "DEFAULT_OPUS_MODEL", "DEFAULT_SONNET_MODEL", "DEFAULT_HAIKU_MODEL")


def opencode() -> str:
    """Return a configuration with an agent that has no tools, for models without them."""
    provider = {
        "npm": "@ai-sdk/openai-compatible",
        "options": {"baseURL": "@URL@/v1", "apiKey": "none"},
        "models": {"@MODEL@": {"limit": {"context": 32768, "output": 1024}}},
    }
    plain = {"mode": "primary", "prompt": "Be brief.", "tools": {"*": False}}
    return json.dumps({"model": "eagle/@MODEL@", "provider": {"eagle": provider}, "agent": {"plain": plain}})


PROGRAMS = (
    Program(
        "Claude Code",
        "claude",
        "messages",
        ["-p", ASKED],
        ("Bash", READ),
        ["-p", "--tools", "", "--system-prompt", "Be brief.", ASKED],
        variables={
            "ANTHROPIC_BASE_URL": "@URL@",
            "ANTHROPIC_AUTH_TOKEN": "none",
            **{f"ANTHROPIC_{name}": "@MODEL@" for name in MODELS},
            "CLAUDE_CODE_MAX_CONTEXT_TOKENS": "@CONTEXT@",
            "CLAUDE_CODE_MAX_OUTPUT_TOKENS": "8192",
            **dict.fromkeys(("DISABLE_TELEMETRY", "DISABLE_ERROR_REPORTING", "DISABLE_AUTOUPDATER"), "1"),
        },
        too_long="Prompt is too long",
    ),
    Program(
        "Codex CLI",
        "codex",
        "responses",
        ["exec", "--skip-git-repo-check", ASKED],
        ("exec_command", {"cmd": "cat note.txt"}),
        files={".codex/config.toml": CODEX},
        too_long="ran out of room in the model's context window",
    ),
    Program(
        "Codex CLI, for a model called as one of OpenAI's",
        "codex",
        "responses",
        ["exec", "--skip-git-repo-check", "--sandbox", "workspace-write", ASKED],
        ("apply_patch", {"input": PATCH}),
        files={".codex/config.toml": CODEX},
        too_long="ran out of room in the model's context window",
        model="gpt-5.5",
        file="codex_patch",
    ),
    Program(
        "opencode",
        "opencode",
        "chat",
        ["run", ASKED],
        ("bash", {**READ, "description": "Read the note"}),
        ["run", "--agent", "plain", ASKED],
        files={"opencode.json": opencode()},
    ),
    Program(
        "Qwen Code",
        "qwen",
        "chat",
        ["--approval-mode", "yolo", ASKED],
        ("run_shell_command", {**READ, "is_background": False}),
        variables={"OPENAI_BASE_URL": "@URL@/v1", "OPENAI_API_KEY": "none", "OPENAI_MODEL": "@MODEL@"},
    ),
    Program(
        "Continue CLI",
        "cn",
        "chat",
        ["-p", ASKED, "--config", "config.yaml"],
        ("Bash", READ),
        files={"config.yaml": CONTINUE},
    ),
    Program(
        "Cline CLI",
        "cline",
        "chat",
        ["--json", "--retries", "1", ASKED],
        ("run_commands", {"commands": ["cat note.txt"]}),
        too_long="exceeds the model's context window",
        first=["auth", "-p", "openai", "-k", "none", "-m", "@MODEL@", "-b", "@URL@/v1"],
    ),
    Program(
        "GitHub Copilot CLI",
        "copilot",
        "chat",
        ["-p", ASKED, "--allow-all-tools"],
        ("bash", {**READ, "description": "Read the note"}),
        variables={"COPILOT_PROVIDER_BASE_URL": "@URL@/v1", "COPILOT_MODEL": "@MODEL@", "COPILOT_OFFLINE": "true"},
        too_long="exceeded the model's context limit",
    ),
    Program(
        "llm",
        "llm",
        "chat",
        ["-m", "eagle", "-T", "llm_version", ASKED],
        ("llm_version", {}),
        ["-m", "eagle", ASKED],
        files={".config/io.datasette.llm/extra-openai-models.yaml": LLM},
    ),
    Program(
        "aider",
        "aider",
        "chat",
        ["--model", "openai/@MODEL@", "--yes", *QUIET, "--message", ASKED],
        without_tools=[
            *("--model", "openai/@MODEL@", "--yes", *QUIET),
            *("--map-tokens", "0", "--edit-format", "ask", "--message", ASKED),
        ],
        variables={"OPENAI_API_BASE": "@URL@/v1", "OPENAI_API_KEY": "none"},
        too_long="To reduce input tokens",
    ),
)


def script() -> list[Line]:
    """Return lines that call each program's tool, with the same end for all."""
    offered = dict(program.calls for program in PROGRAMS if program.calls is not None)
    names = sorted(offered, key=lambda name: name != "apply_patch")  # Codex offers another tool besides it
    calls = [Line(f"'{name}' in names", call(name, **offered[name])) for name in names]
    return [Line("'tool' in roles", SAID), *calls, Line("true", SHORT)]
