"""User turns that a target writes: their domains, and their place in the chat template."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from eagle_mlx.errors import ConfigError, TargetError
from eagle_mlx.files import read_yaml
from eagle_mlx.setting import ABOVE_0, REQUIRED, Group, setting

from ..conversation import Message

if TYPE_CHECKING:
    from mlx_lm.tokenizer_utils import TokenizerWrapper

FILE = Path(__file__).parent / "domains.yaml"
_MARKS = ("\ue0f0\ue0f1", "\ue0f2 \ue0f3\ue0f4")
"""Private-use characters in place of the user's text. Two kinds detect templates that depend on the text."""


@dataclass(frozen=True)
class Domain(Group):
    """A kind of conversation. Raises ConfigError on creation if a value is invalid."""

    name: str = setting(REQUIRED, "")
    weight: float = setting(1.0, "share of the conversations, relative to the other weights", ABOVE_0)
    system: str = setting("", "system prompt for generating user turns; answers do not see it")
    openings: tuple[str, ...] = setting(("",), "beginnings of the first user turn; each conversation gets one")

    def _check(self) -> None:
        if not self.openings:
            raise ConfigError("openings must have at least one text")


def read_domains(file: Path) -> tuple[Domain, ...]:
    """Read domains from a YAML file. Raises ConfigError, with the file and the domain, if something is invalid."""
    entries = read_yaml(file, "file of domains")
    if not isinstance(entries, dict) or not entries:
        raise ConfigError(f"{file} must have domains, each with a weight under its name; see {FILE}")
    domains = []
    for name, entry in entries.items():
        if not isinstance(entry, dict):
            raise ConfigError(f"{file}: {name}: needs keys such as `weight: 2` under it, not {entry!r}")
        try:
            domains.append(Domain.of(**{**entry, "name": str(name)}))
        except ConfigError as e:
            raise ConfigError(f"{file}: {name}: {e}") from e
    return tuple(domains)


DOMAINS = read_domains(FILE)


def choose_domains(wishes: Sequence[str], file: Path = FILE) -> tuple[Domain, ...]:
    """Return a file's domains selected by `NAME` or `NAME=WEIGHT`; all if there is no selection. Raises ConfigError."""
    domains = {domain.name: domain for domain in read_domains(file)}
    chosen: dict[str, Domain] = {}
    for wish in wishes:
        name, given, weight = wish.partition("=")
        if name not in domains:
            raise ConfigError(f"--domain {wish}: the domains are {', '.join(domains)}")
        try:
            chosen[name] = domains[name].changed(weight=weight) if given else domains[name]
        except ConfigError as e:
            raise ConfigError(f"--domain {wish}: a weight must be a number above 0, such as code=2") from e
    return tuple((chosen or domains).values())


class UserPlace(NamedTuple):
    tokens: tuple[int, ...]
    stop_token_ids: tuple[int, ...]
    """The special token after the user's text. The model's own end tokens end a turn too."""
    stop: tuple[str, ...]
    """The text after the user's text, if it does not begin with a special token."""


def find_user_place(
    tokenizer: TokenizerWrapper, messages: Sequence[Message], name: str, opening: str = ""
) -> UserPlace:
    """Return the place of the next user turn after `messages`, and after the words of an `opening`.

    Raises TargetError, with the target's `name` and what to do instead, if the template refuses the conversation, hides
    or changes earlier messages, or depends on the user's text.
    """
    around = {_around(tokenizer, messages, mark, name) for mark in _MARKS}
    if len(around) != 1:
        raise _closed(name, "the text around the user's words depends on them")
    before, after = around.pop()
    if hidden := [m for m in messages if m.content.strip() and m.content.strip() not in before]:
        raise _closed(name, f"before the user's turn, it leaves out the {hidden[0].role} message")
    # A trailing space would be a separate token, and no training text begins that way.
    tokens = tuple(tokenizer.encode(before + opening if opening else before.rstrip(" "), add_special_tokens=False))
    if not tokens:
        raise _closed(name, "it has no text before the user's words, so there is nothing to continue")
    following = list(tokenizer.encode(after, add_special_tokens=False))
    if following and following[0] in tokenizer.all_special_ids:
        return UserPlace(tokens, (following[0],), ())
    return UserPlace(tokens, (), (after,) if after else ())


def _around(tokenizer: TokenizerWrapper, messages: Sequence[Message], mark: str, name: str) -> tuple[str, str]:
    """Return the template's text before the user's text, and the stripped text after it, up to the answer."""
    chat = [*(m.as_dict() for m in messages), {"role": "user", "content": mark}]
    try:
        text: str = tokenizer.apply_chat_template(chat, tokenize=False, add_generation_prompt=True)
    except Exception as e:  # templates may raise anything
        raise _closed(name, f"it refuses the conversation: {e}") from e
    if text.count(mark) != 1:
        raise _closed(name, "it changes, drops or repeats the user's words")
    before, _, after = text.partition(mark)
    return before, after.strip()


def _closed(name: str, why: str) -> TargetError:
    return TargetError(
        f"the target cannot write user turns with the chat template of {name}: {why}; give it prompts to answer "
        "(eagle-data regenerate --data prompts.jsonl), or use another template with --chat-template FILE"
    )


def steerable(tokenizer: TokenizerWrapper, domains: tuple[Domain, ...], name: str) -> tuple[Domain, ...]:
    """Return the domains that the template supports. Raises TargetError, as `find_user_place` does, if there are none.

    If it refuses system prompts, a domain keeps only its openings, and a domain without openings is dropped.
    """
    if not tokenizer.has_chat_template:
        raise TargetError(
            f"{name} has no chat template, so it cannot make up conversations; use data instead: text:FOLDER, texts or "
            "conversations as FILE.jsonl, or a data set on the hub (docs/data.md)"
        )
    usable: list[Domain] = []
    refused: TargetError | None = None
    for domain in domains:
        for form in (domain, replace(domain, system="")) if any(domain.openings) else (domain,):
            try:
                find_user_place(tokenizer, [Message("system", form.system)] if form.system else [], name)
            except TargetError as e:
                refused = e
                continue
            usable.append(form)
            break
    if not usable and refused is not None:
        raise refused
    return tuple(usable)
