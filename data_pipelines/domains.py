"""What conversations that a target makes up are about: system prompts that steer its user turns, with their shares."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from eagle_mlx.errors import ConfigError


@dataclass(frozen=True)
class Domain:
    """A kind of conversation."""

    name: str
    weight: float
    """Its share of the conversations, relative to the other weights."""
    system: str = ""
    """The system prompt that a user turn is written under; empty for the chat template's own. No answer sees it."""


DOMAINS = (
    Domain("any", 4.0),
    Domain(
        "code",
        2.0,
        "You are an assistant for programmers. The user asks for code in Python and other languages, for explanations "
        "of code, and for help with errors.",
    ),
    Domain(
        "mathematics",
        1.0,
        "You are an assistant for mathematics. The user gives problems of arithmetic, algebra, geometry or "
        "probability, to be solved step by step.",
    ),
    Domain(
        "writing",
        1.0,
        "You are an assistant for writing. The user asks for stories, poems, letters or e-mails, or for a text to be "
        "improved, shortened or summarised.",
    ),
    Domain(
        "knowledge",
        1.0,
        "You are an assistant that explains. The user asks about science, history, geography, health or technology.",
    ),
    Domain(
        "texts",
        2.0,
        "You are an assistant that works with texts. The user gives a passage of several sentences in full, and asks "
        "for a summary, for a translation, for what it says about something, or for facts to be extracted from it.",
    ),
    Domain(
        "everyday",
        1.0,
        "You are a helpful assistant. The user asks for advice on work, study, travel, cooking or the household.",
    ),
)
"""Half is what the target writes unsteered or as code. The other half goes by the kinds of MT-bench (Zheng et al. 2023,
arXiv 2306.05685) and Spec-Bench (Xia et al. 2024, arXiv 2401.07851). So no kind of question that heads are measured on
is left to chance."""


def choose_domains(wishes: Sequence[str]) -> tuple[Domain, ...]:
    """The domains named by `NAME` or `NAME=WEIGHT`; all where none is. Raises ConfigError for a name or weight."""
    if not wishes:
        return DOMAINS
    chosen: dict[str, Domain] = {}
    for wish in wishes:
        name, given, weight = wish.partition("=")
        found = next((domain for domain in DOMAINS if domain.name == name), None)
        if found is None:
            raise ConfigError(f"--domain {wish}: the domains are {', '.join(domain.name for domain in DOMAINS)}")
        chosen[name] = replace(found, weight=_weight(wish, weight)) if given else found
    return tuple(chosen.values())


def _weight(wish: str, text: str) -> float:
    try:
        weight = float(text)
    except ValueError:
        weight = 0.0
    if not 0 < weight < float("inf"):
        raise ConfigError(f"--domain {wish}: a weight must be a number above 0, such as code=2")
    return weight
