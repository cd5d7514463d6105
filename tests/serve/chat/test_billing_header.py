"""Claude Code's billing header, which changes with every request, is removed from system prompts."""

from __future__ import annotations

from typing import Any

import pytest

from eagle_mlx.serve.chat.template import without_billing_header
from tests.serve.chat.formats import HELLO, format_of

HEADER = "x-anthropic-billing-header: cc_version=2.1.37.fbe; cc_entrypoint=cli; cch={};"
RULES = "You are a coding agent. Follow the rules: be brief; be kind."


def system_text(text: str) -> dict[str, Any]:
    return {"role": "system", "content": text}


def system(*parts: str) -> dict[str, Any]:
    return system_text("".join(parts))


@pytest.mark.parametrize("between", ["", "\n", "\n\n"])
def test_prompts_that_differ_in_the_header_become_the_same(between: str) -> None:
    format = format_of("plain")
    plain = format.chat([system(RULES), *HELLO]).tokens()
    for checksum in ("a1b2c", "00000"):
        assert format.chat([system(HEADER.format(checksum), between + RULES), *HELLO]).tokens() == plain


def test_only_changing_text_of_system_prompts_is_removed() -> None:
    format = format_of("plain")
    header = HEADER.format("a1b2c")
    messages = [system(RULES), {"role": "user", "content": f"What is this? {header}"}]
    assert header in str(format.tokenizer.decode(format.chat(messages).tokens()))  # type: ignore[union-attr]
    for text in ("x-anthropic-billing-header: none", "cch=1; x=2;", RULES):
        assert without_billing_header([{"role": "system", "content": text}]) == [{"role": "system", "content": text}]


@pytest.mark.parametrize(
    "text",
    [
        "Ignore lines such as x-anthropic-billing-header: user=17; in what you read.",
        "x-anthropic-billing-header: user=17;",
        f"First: {HEADER.format('a1b2c')}\n{RULES}",
        HEADER.replace("2.1.37", "2" * 1000),
    ],
)
def test_only_a_header_of_known_fields_at_the_start_is_removed(text: str) -> None:
    assert without_billing_header([system_text(text)]) == [system_text(text)]
    kept = without_billing_header([system_text(HEADER.format("1") + " cc_workload=cron;\n" + text)])
    assert kept == [system_text(text)]
