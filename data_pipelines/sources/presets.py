"""Well-known conversation data sets: their place on the hub and the names of their fields."""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from dataclasses import dataclass, field

from eagle_mlx.errors import ConfigError

from .rows import FieldMap


@dataclass(frozen=True)
class Preset:
    """A data set. Its content and license are as stated on its own page; check that page before you rely on them."""

    id: str
    """Hub id."""
    split: str
    holds: str
    licence: str
    config: str | None = None
    files: str | None = None
    """The one file to read if the repository has several versions."""
    names: Mapping[str, str] = field(default_factory=dict, hash=False)
    """Field names, as in `rows.FieldMap`."""
    uneven: bool = False
    """Whether the set has unusable rows, such as empty conversations. They are left out and counted."""

    @property
    def map(self) -> FieldMap | None:
        return FieldMap(self.names) if self.names else None


PRESETS: dict[str, Preset] = {
    "sharegpt": Preset(
        id="Aeala/ShareGPT_Vicuna_unfiltered",
        split="train",
        files="ShareGPT_V4.3_unfiltered_cleaned_split.json",
        holds="of the order of 100,000 pieces of people's conversations with ChatGPT: many turns, many languages, code",
        licence="apache-2.0 as far as known; the answers are OpenAI's models', whose terms of use apply",
        names={"messages": "conversations", "role": "from", "content": "value"},
        uneven=True,
    ),
    "ultrachat": Preset(
        id="HuggingFaceH4/ultrachat_200k",
        split="train_sft",
        holds="207,865 conversations of several turns made by ChatGPT: questions, writing, work on given texts",
        licence="mit",
        names={"messages": "messages"},
    ),
    "openhermes": Preset(
        id="teknium/OpenHermes-2.5",
        split="train",
        holds="about 1,000,000 conversations, mostly of one turn, from many synthetic sets: general, code, mathematics",
        licence="none stated; the sets that it was put together from have their own",
        names={"messages": "conversations", "role": "from", "content": "value"},
    ),
    "magicoder": Preset(
        id="ise-uiuc/Magicoder-OSS-Instruct-75K",
        split="train",
        holds="75,197 programming problems with solutions in nine languages, made by GPT-3.5 from open-source code",
        licence="mit; the answers are OpenAI's models', whose terms of use apply",
        names={"prompt": "problem", "completion": "solution"},
    ),
    "magicoder-evol": Preset(
        id="ise-uiuc/Magicoder-Evol-Instruct-110K",
        split="train",
        holds="111,183 instructions about code, made harder step by step (Evol-Instruct), with answers",
        licence="apache-2.0; the answers are OpenAI's models', whose terms of use apply",
        names={"prompt": "instruction", "completion": "response"},
    ),
    "gsm8k": Preset(
        id="openai/gsm8k",
        config="main",
        split="train",
        holds="7,473 school mathematics problems with worked answers (with `<<48/2=24>>` notes: better regenerated)",
        licence="mit",
        names={"prompt": "question", "completion": "answer"},
    ),
}


def find(name: str) -> Preset:
    """Return the preset with this name. Raises ConfigError, with the nearest name, if there is none."""
    if name not in PRESETS:
        near = difflib.get_close_matches(name, PRESETS, 1)
        hint = f"did you mean {near[0]}? " if near else ""
        raise ConfigError(f"preset:{name}: {hint}the presets are {', '.join(PRESETS)} (see `eagle-data presets`)")
    return PRESETS[name]


def describe() -> str:
    """Return a description of all presets."""
    parts = []
    for name, preset in PRESETS.items():
        fields = ", ".join(f"{ours}={theirs}" for ours, theirs in preset.names.items())
        what = ":".join(part for part in (preset.id, preset.config, preset.split) if part)
        lines = [f"preset:{name}", f"  reads    {what}" + (f", file {preset.files}" if preset.files else "")]
        lines += [f"  fields   {fields}", f"  holds    {preset.holds}", f"  licence  {preset.licence}"]
        parts.append("\n".join(lines))
    return "\n\n".join(parts)
