"""Compiles grammars. As a program, tries one in a process that time and memory limits end (`structured.py`).

The program runs this file by its path, so this file imports no module of the project.
"""

from __future__ import annotations

import json
import resource
import signal
import sys
import threading
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import llguidance

# Masks are computed in the engine's thread, where all rows wait for them. By llguidance's own figures, 200,000 units of
# lexer fuel take 14 ms and 50,000 items 2.5 ms, so a mask takes at most about 20 ms. 50,000 states of a lexer take
# about 100 MB. A text that exceeds one of these ends with an error.
LIMITS = llguidance.LLParserLimits(
    step_lexer_fuel=200_000,
    step_max_items=50_000,
    max_items_in_row=2_000,
    max_lexer_states=50_000,
    max_grammar_size=200_000,
    precompute_large_lexemes=False,
    verbose_errors=False,
)
# Without a choice, llguidance would compute all forced text at once, without a limit: a pattern can force gigabytes.
_OPTIONS = '%llguidance {"no_forcing": true}\n'
_COERCE = "Enable 'coerce_one_of' option to approximate oneOf with anyOf"  # an option of llguidance's own
_DEEP_STACK = 64 << 20
"""Bytes. llguidance follows references by recursion: a schema of 64 KiB that has only references takes half."""
_SIZING = threading.Lock()  # held while threads start with another stack, because the setting is the whole process's

Places = tuple[tuple[str, str, bool], ...]
"""For each schema: its place in the request, its JSON text, and whether keywords that are not supported are ignored."""


def matcher(tokenizer: llguidance.LLTokenizer, grammar: str) -> llguidance.LLMatcher:
    """Compile a grammar in llguidance's dialect of Lark. A grammar that is refused makes a matcher in an error state.

    The matcher shares nothing with others: a lexer that has reached its limit would end all texts that share it.
    """
    text = llguidance.LLMatcher.grammar_from_lark(_OPTIONS + grammar)
    with ThreadPoolExecutor(1) as pool:
        with _SIZING:
            threading.stack_size(_DEEP_STACK)
            made = pool.submit(llguidance.LLMatcher, tokenizer, text, log_level=0, limits=LIMITS)
            threading.stack_size(0)
        return made.result()


class _Bytes:
    """A vocabulary of bytes, followed by tokens without text, so that a grammar may name any token by its id."""

    eos_token_id, bos_token_id = 0, None
    special_token_ids: Sequence[int] = ()

    def __init__(self, size: int):
        self.tokens = [bytes([byte]) for byte in range(256)] + [b""] * (size - 256)

    def __call__(self, text: bytes) -> list[int]:
        return list(text)


def refusal(made: llguidance.LLMatcher, schemas: Places) -> tuple[list[str], str] | None:
    """Return why a grammar's matcher cannot be used, after the places of the schemas at fault; None if it can be."""
    made.compute_bitmask()  # some schemas fail only here, because they allow nothing or too much
    if not made.is_error():
        return None
    for where, schema, lenient in schemas:
        try:
            alone = llguidance.LLMatcher.grammar_from_json_schema(schema, overrides={"lenient": lenient})
        except ValueError as e:
            return [where], str(e)
        if reason := llguidance.LLMatcher.validate_grammar(alone, limits=LIMITS):
            return [where], reason.replace(_COERCE, "Use anyOf")
    return [where for where, *_ in schemas], f"no text fits this ({made.get_error()})"


def main() -> None:
    """Read a grammar and limits from the standard input, and print why it is refused, as JSON; null if it is not."""
    grammar, schemas, vocab_size, seconds, memory = json.load(sys.stdin)
    signal.setitimer(signal.ITIMER_REAL, seconds)  # even without the server, the process ends
    resource.setrlimit(resource.RLIMIT_CORE, (0, resource.getrlimit(resource.RLIMIT_CORE)[1]))
    if sys.platform == "linux":  # macOS does not enforce it; there, time is the limit
        size = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
        resource.setrlimit(resource.RLIMIT_AS, (size + memory, resource.RLIM_INFINITY))
    tokenizer = llguidance.LLTokenizer(llguidance.TokenizerWrapper(_Bytes(vocab_size)), slices=[])
    try:
        refused = refusal(matcher(tokenizer, grammar), schemas)
    except ValueError as e:  # of text that is not Unicode
        refused = [where for where, *_ in schemas], str(e)
    print(json.dumps(refused))


if __name__ == "__main__":
    main()
