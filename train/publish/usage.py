"""How others use a published head: exact commands."""

from __future__ import annotations

import json
import shlex
from collections.abc import Callable

from eagle_mlx.catalog.base_model import by_mlx_community

from .source import Source

DEPTH = 4
"""Draft tokens a round where nothing was measured: the default of eagle-serve."""


def sections(source: Source, repo: str, target: str, base: str, depth: int) -> str:
    """Markdown for EAGLE-MLX and every server that loads this layout.

    `target` is what the head was trained on, for MLX; `base` is the model that other servers load.
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
