"""Write the model card, with metadata for the hub and text for people."""

from __future__ import annotations

import json
import shlex
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from huggingface_hub import ModelCard, ModelCardData

from eagle_mlx.catalog.base_model import by_mlx_community
from eagle_mlx.errors import ConfigError
from eagle_mlx.heads.precision import described, quantization_of

from .figures import Figures, Measured, machine_line
from .recipe import Rows, data_sets, train_command, training
from .source import Source

DEPTH = 4
"""Draft tokens per round without measurements: the default of eagle-serve."""


def _usage(source: Source, repo: str, target: str, base: str, depth: int) -> str:
    """Return Markdown on usage with EAGLE-MLX and every server that loads this layout.

    `target` is the model that the head was trained on, for MLX; `base` is the model for other servers.
    """
    parts = [_eagle_mlx(repo, target, source.adapter)]
    if source.adapter:
        parts.append(
            f"The head was trained for that model with the LoRA adapters `{source.adapter}`, and drafts for it with "
            "those."
            + (
                " Give the servers below the model with the adapters fused into it (`mlx_lm.fuse`)."
                if source.layout.engines
                else ""
            )
        )
    if source.layout.engines and by_mlx_community(base):
        parts.append(
            f"The servers below do not read MLX's conversions: in place of `{base}` give them the model that it was "
            "made of."
        )
    if source.layout.engines and _is_eagle31(source):
        parts.append(
            "This is an EAGLE-3.1 head (`fc_norm`, `norm_output`). Servers from before June 2026 do not know these and "
            "would reject most of its drafts; the text stays right, but nothing is gained."
        )
    parts += [_ENGINES[engine](source, repo, base, depth) for engine in source.layout.engines]
    return "\n\n".join(parts)


def _is_eagle31(source: Source) -> bool:
    config = getattr(source.head, "config", None)
    return bool(getattr(config, "fc_norm", False) or getattr(config, "norm_output", False))


def _eagle_mlx(repo: str, target: str, adapter: str) -> str:
    flags, argument = (f" --adapter-path {adapter}", f', adapter_path="{adapter}"') if adapter else ("", "")
    return f"""\
With EAGLE-MLX, as a server for any OpenAI client, or in Python:

```
eagle-serve --target {target}{flags} --head {repo}
```

```python
import eagle_mlx as em

target = em.load_target("{target}"{argument})
head = em.load_head("{repo}", target)
engine = em.Engine(target, proposer=em.HeadProposer(head))
print(engine.generate(["Once upon a time"], em.SamplingParams(max_tokens=64))[0].text)
```"""


def _sglang(source: Source, repo: str, base: str, depth: int) -> str:
    algorithm = source.layout.tag.upper()
    return f"""\
With SGLang:

```
python -m sglang.launch_server --model-path {base} \\
  --speculative-algorithm {algorithm} --speculative-draft-model-path {repo} \\
  --speculative-num-steps {depth} --speculative-eagle-topk 1 --speculative-num-draft-tokens {depth + 1}
```"""


def _vllm(source: Source, repo: str, base: str, depth: int) -> str:
    config = json.dumps({"method": source.layout.tag, "model": repo, "num_speculative_tokens": depth})
    return f"""\
With vLLM:

```
vllm serve {base} \\
  --speculative-config {shlex.quote(config)}
```"""


_ENGINES: dict[str, Callable[[Source, str, str, int], str]] = {"sglang": _sglang, "vllm": _vllm}


_PICTURES = {
    "acceptance_by_position": "Acceptance by draft position",
    "acceptance_length": "Acceptance length over the training",
    "accuracy": "Accuracy by draft step over the training",
    "loss": "Training loss",
}


@dataclass(frozen=True)
class Licence:
    name: str
    """Hub spelling; `other` needs a title and a link."""
    title: str | None = None
    link: str | None = None

    def __post_init__(self) -> None:
        if self.name == "other" and not (self.title and self.link):
            raise ConfigError("--license other needs --license-name and --license-link")
        if self.name != "other" and (self.title or self.link):
            raise ConfigError("--license-name and --license-link go with --license other")


@dataclass(frozen=True)
class Beside:
    """The head's other repository."""

    portable: str | None = None
    """For a quantized head, the repository that other servers load."""
    quantized: str | None = None
    """For an unquantized head, the repository with the quantized one."""


def make_card(
    source: Source,
    repo: str,
    base: str,
    licence: Licence,
    figures: Sequence[Figures],
    pictures: Sequence[str] = (),
    beside: Beside = Beside(),
) -> ModelCard:
    """Return the card of a head published as `repo` for the model `base`; `pictures` are paths in the repository."""
    body = _body(source, repo, base, figures, pictures, beside)
    return ModelCard(f"---\n{_data(source, base, licence, beside)}\n---\n\n{body}")


def _data(source: Source, base: str, licence: Licence, beside: Beside) -> ModelCardData:
    how = quantization_of(source.head)
    return ModelCardData(
        base_model=beside.portable or base,
        base_model_relation="quantized" if beside.portable else None,
        datasets=data_sets(source) or None,
        library_name="mlx",
        license=licence.name,
        license_name=licence.title,
        license_link=licence.link,
        pipeline_tag="text-generation",
        tags=[
            source.layout.tag,
            "speculative-decoding",
            "mlx",
            *source.layout.engines,
            *([f"{how['bits']}-bit"] if how is not None else []),
        ],
    )


def _body(
    source: Source, repo: str, base: str, figures: Sequence[Figures], pictures: Sequence[str], beside: Beside
) -> str:
    target = source.trained_on or base
    depth = next((found.depth for found in reversed(figures) if found.depth), DEPTH)
    parts = [
        f"# {repo.split('/')[-1]}",
        f"A draft head ({source.layout.title}) for [{base}](https://huggingface.co/{base}). It speeds the "
        "model up by speculative decoding: the head drafts some tokens, and the model checks them in one forward. The "
        "output is still the model's own text. Made with EAGLE-MLX.",
        *_other_repository(source, beside),
        "## How well it drafts",
        *_acceptance(figures, repo, target),
        *_speed(figures),
        "## How to use it",
        _usage(source, repo, target, base, depth),
        "## The head",
        _pairs(_shape(source)),
        *_training(source, target, [found.command for found in figures]),
        *(f"![{_PICTURES.get(_stem(name), _stem(name))}]({name})" for name in pictures),
    ]
    return "\n\n".join(parts) + "\n"


def _other_repository(source: Source, beside: Beside) -> list[str]:
    if beside.portable:
        return [
            f"This is {_link(beside.portable)} with its large matrices quantized ({described(source.head)}), for MLX "
            "only: SGLang and vLLM load that one. Its card describes the training and its acceptance."
        ]
    if beside.quantized:
        return [f"A smaller version of this head, quantized for MLX, is {_link(beside.quantized)}."]
    return []


def _link(repo: str) -> str:
    return f"[{repo}](https://huggingface.co/{repo})"


def _acceptance(figures: Sequence[Figures], repo: str, target: str) -> list[str]:
    if not figures:
        return [
            "No acceptance is published with this head. Measure it, on your own prompts with `--prompts`:",
            _code(f"eagle-bench --target {target} --head {repo} --depth 1 2 4 6"),
        ]
    parts = [
        "τ is the number of tokens emitted per forward of the target, bonus token included; depth is the number of "
        "tokens drafted in a round, in a chain. Prompts are left out if the continuation loops, because loops are "
        "easy to draft."
    ]
    for found in figures:
        parts += [_tau_table(found.taus), found.how + " The command:", _code(found.command)]
    return parts


def _tau_table(taus: Sequence[Measured]) -> str:
    head = ("prompts", "of them", "left out", "temperature", "depth", "τ", "accepted at position 1, 2, …")
    return _table(
        head,
        [
            (
                tau.data,
                str(tau.prompts),
                str(tau.left_out),
                f"{tau.temperature:g}",
                tau.depth,
                f"{tau.length:.2f}",
                " ".join(f"{share:.2f}" for share in tau.by_position),
            )
            for tau in taus
        ],
    )


def _speed(figures: Sequence[Figures]) -> list[str]:
    timed = [found for found in figures if found.speeds]
    if not timed:
        return []
    parts = [
        "## How fast",
        "Tokens per second of wall time, including prefill. `plain` is EAGLE-MLX without drafts, `eagle` is with "
        "this head, and `mlx-lm` is that library's own decoding.",
    ]
    for found in timed:
        prompts = f"{found.taus[0].prompts} prompts of {found.taus[0].data}"
        parts += [_speed_table(found.speeds), f"{prompts}, with the command above; {found.machine}."]
    return parts


def _speed_table(speeds: Sequence[Measured]) -> str:
    head = ("mode", "rows", "depth", "temperature", "tokens/s", "of mlx-lm", "of plain", "τ", "text identical")
    return _table(
        head,
        [
            (
                speed.mode,
                str(speed.rows),
                speed.depth,
                f"{speed.temperature:g}",
                f"{speed.tokens_per_second:.1f}",
                _ratio(speed.of_mlx_lm),
                _ratio(speed.of_plain),
                f"{speed.length:.2f}",
                speed.identical,
            )
            for speed in speeds
        ],
    )


def _ratio(value: float | None) -> str:
    return "" if value is None else f"{value:.2f}"


def _shape(source: Source) -> Rows:
    head, config = source.head, source.config
    ids, layers, count = head.token_ids, source.aux_layers, source.parameters
    rows: Rows = [("kind", source.layout.title), ("layout", source.layout.written_as)]
    if count is not None:
        rows.append(("parameters", f"{count / 1e6:,.2f} M"))
    if quantization_of(head) is not None:
        rows.append(("type", described(head)))
    elif isinstance(config.get("torch_dtype") or config.get("dtype"), str):
        rows.append(("type", str(config.get("torch_dtype") or config["dtype"])))
    rows.append(("hidden size", f"{head.hidden_size:,}"))
    if layers:
        rows.append(("reads the target's layers", f"{', '.join(map(str, layers))} (their output, counted from 0)"))
    else:
        rows.append(("reads the target's", "last hidden state"))
    rows.append(("vocabulary", f"{head.vocab_size:,} tokens"))
    if ids is not None:
        rows.append(("draft vocabulary", f"{ids.size:,} tokens"))
    return rows


def _training(source: Source, target: str, shown: Sequence[str]) -> list[str]:
    """Describe the training. `shown` holds the commands already on the card."""
    rows = training(source)
    if not rows:
        return []
    report = source.report or {}
    machine = machine_line(report.get("machine") or {})
    rows += [("machine", machine)] if machine else []
    parts = ["## How it was trained", _pairs(rows)]
    command = train_command(report.get("config") or {}, target)
    if command in shown:
        parts.append("The command is above, with the figures that the training measured.")
    elif report.get("config"):
        parts += ["The settings that are not the defaults, as a command:", _code(command)]
    return parts


def _pairs(rows: Rows) -> str:
    return _table(("", ""), rows)


def _table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join("| " + " | ".join(_cell(cell) for cell in line) + " |" for line in lines)


def _cell(text: str) -> str:
    return " ".join(text.replace("|", "\\|").split()) or " "


def _code(text: str) -> str:
    return f"```\n{text}\n```"


def _stem(name: str) -> str:
    return name.rsplit("/", 1)[-1].removesuffix(".png")
