"""Runs llguidance in processes that can be killed: this file is such a process's program, and imports no other of ours.

The first process holds the tokenizer. It is forked for each grammar, which is compiled in the fork, and that is forked
for each row that follows the grammar. A fork shares the tokenizer's and the grammar's memory until it writes to it, so
a row costs a few milliseconds and what it changes; and whatever becomes of it, it shares no state with any other row.
"""

from __future__ import annotations

import json
import os
import resource
import signal
import sys
import threading
from collections.abc import Callable, Sequence
from multiprocessing.connection import Connection
from multiprocessing.reduction import recv_handle
from pathlib import Path
from typing import Any

import llguidance

# About 20 ms of work for one mask at most, and some 100 MB; what needs more ends its own request.
_LIMITS = llguidance.LLParserLimits(
    max_lexer_states=50_000, max_grammar_size=200_000, precompute_large_lexemes=False, verbose_errors=False
)
_DEEP_STACK = 64 << 20
"""Bytes; a schema of 64 KiB that is nothing but references takes half."""

Places = tuple[tuple[str, str], ...]
"""Schemas as JSON texts, each behind its place in the request."""


class Refused(Exception):
    """A grammar, or a token, that cannot be taken; the message is llguidance's reason."""


class MatcherProcess:
    """What one process holds, and the questions that it answers over its connection, one after the other."""

    def __init__(self, connection: Connection, memory: int):
        self.connection, self.memory = connection, memory
        self.tokenizer: llguidance.LLTokenizer | None = None
        self.matcher: llguidance.LLMatcher | None = None

    def serve(self) -> None:
        """Answer until nobody asks any more."""
        while True:
            try:
                name, *arguments = self.connection.recv()
            except EOFError:
                return
            if name == "fork":
                self.fork()
            else:
                self.connection.send(self.answer(getattr(self, name), arguments))

    def answer(self, work: Callable[..., Any], arguments: Sequence[Any]) -> tuple[Any, str]:
        """What the work gives, or why it gives nothing."""
        try:
            return work(*arguments), ""
        except (Refused, ValueError, RuntimeError) as e:
            return None, str(e)

    def fork(self) -> None:
        """A copy of this process answers over a connection of its own, and first tells its id."""
        handle = recv_handle(self.connection)
        if os.fork():
            os.close(handle)
            return
        self.connection.close()
        self.connection = Connection(handle)
        _bound_memory(self.memory)
        self.connection.send(os.getpid())
        self.serve()
        os._exit(0)

    def open(self, tokenizer: str, vocab: int, ends: list[int]) -> list[int]:
        """Read the tokenizer; those of its tokens that grammars name by their ids."""
        self.tokenizer = llguidance.LLTokenizer(literal(tokenizer), n_vocab=vocab, eos_token=ends)
        return [token for token in range(vocab) if self.tokenizer.is_special_token(token)]

    def compile(self, grammar: str, schemas: Places) -> bytes:
        """The mask of the first token."""
        answers: list[tuple[Any, str]] = []
        # llguidance follows a schema's references by recursion: a long chain would overflow an ordinary stack.
        threading.stack_size(_DEEP_STACK)
        thread = threading.Thread(target=lambda: answers.append(self.answer(self._compile, (grammar, schemas))))
        thread.start()
        thread.join()
        first, reason = answers[0]
        if reason:
            raise Refused(reason)
        return first  # type: ignore[no-any-return]  # of `_compile`

    def _compile(self, grammar: str, schemas: Places) -> bytes:
        assert self.tokenizer is not None
        for where, schema in schemas:
            alone = llguidance.LLMatcher.grammar_from_json_schema(schema, overrides={"lenient": False})
            if reason := llguidance.LLMatcher.validate_grammar(alone, limits=_LIMITS):
                raise Refused(f"{where}: {reason}")
        parsed = llguidance.LLMatcher.grammar_from_lark(grammar)
        self.matcher = llguidance.LLMatcher(self.tokenizer, parsed, log_level=0, limits=_LIMITS)
        first = self.matcher.compute_bitmask()  # some schemas turn out to allow nothing, or too much, only here
        if self.matcher.is_error():
            where = ", ".join(where for where, _ in schemas)
            raise Refused(f"{where}: no text can follow this ({self.matcher.get_error()})")
        return first

    def masks(self, undo: int, taken: list[int], draft: list[int]) -> list[bytes]:
        """Go back, then on, and give the masks along a draft up to its first illegal token."""
        matcher = self.matcher
        assert matcher is not None
        if undo:
            matcher.rollback(undo)
        if (count := matcher.try_consume_tokens(taken)) < len(taken) and not matcher.is_error():
            raise Refused(f"token {taken[count]} was allowed and then refused")
        masks = [matcher.compute_bitmask()]
        for token in draft:
            if matcher.try_consume_tokens([token]) != 1:
                break
            masks.append(matcher.compute_bitmask())
        matcher.rollback(len(masks) - 1)
        if matcher.is_error():
            raise Refused(matcher.get_error())
        return masks


def literal(tokenizer: str) -> str:
    """A tokenizer.json that encodes every text as it is written: no special token is found in it, no letter changed.

    Where a grammar leaves no choice, llguidance encodes the text to come, and allows the token that this begins with.
    A special token would be refused then, because it stands for no text, or would end the answer in its middle.
    """
    content = json.loads(tokenizer)
    added, model = content["added_tokens"], content["model"]
    # Those that llguidance takes for special; no JSON holds the character 0, so no grammar forces these names.
    names = {
        token["content"]: f"<\0{token['id']}>"
        for token in added
        if token["special"] or (token["content"].startswith("<") and token["content"].endswith(">"))
    }
    for token in added:
        token["content"] = names.get(token["content"], token["content"])
    if isinstance(model["vocab"], dict):
        model["vocab"] = {names.get(text, text): token for text, token in model["vocab"].items()}
    else:
        model["vocab"] = [[names.get(text, text), *rest] for text, *rest in model["vocab"]]
    if "unk_token" in model:
        model["unk_token"] = names.get(model["unk_token"], model["unk_token"])
    if "merges" in model:
        model["merges"] = [[a, b] for a, b in model["merges"] if names.keys().isdisjoint((a, b, a + b))]
    content["normalizer"] = _spelling(content["normalizer"])
    return json.dumps(content)


def _spelling(normalizer: dict[str, Any] | None) -> dict[str, Any] | None:
    """What of a normalizer is how the vocabulary spells a text, and not another text."""
    if normalizer is None or normalizer["type"] in ("ByteLevel", "Prepend"):
        return normalizer
    if normalizer["type"] == "Sequence":
        parts = [part for part in map(_spelling, normalizer["normalizers"]) if part]
        return {"type": "Sequence", "normalizers": parts}
    return normalizer if normalizer.get("pattern") == {"String": " "} else None  # a space as a letter of its own


def _bound_memory(more: int) -> None:
    """Let this process have so many bytes more than it has. Only Linux keeps to it; elsewhere time is the bound."""
    if sys.platform == "linux":
        pages = Path("/proc/self/statm").read_text().split()[0]
        size = int(pages) * resource.getpagesize()
        resource.setrlimit(resource.RLIMIT_AS, (size + more, resource.RLIM_INFINITY))


def main() -> None:
    """Serve the descriptor that is the first argument; with its end all forks end too, whatever they are doing."""
    os.setsid()
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # forks that have ended leave nothing to be waited for
    resource.setrlimit(resource.RLIMIT_CORE, (0, resource.getrlimit(resource.RLIMIT_CORE)[1]))
    MatcherProcess(Connection(int(sys.argv[1])), int(sys.argv[2])).serve()
    os.killpg(0, signal.SIGKILL)


if __name__ == "__main__":
    main()
