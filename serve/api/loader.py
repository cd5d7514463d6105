"""Loads and tries out the model to serve, or several models that share memory."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import ExitStack, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import mlx.core as mx

from eagle_mlx import Engine, FixedPolicy, SamplingParams, Target, blas, hub, memory
from eagle_mlx.engine.disk import DiskTier, default_bytes
from eagle_mlx.errors import ConfigError, TargetError, loading
from eagle_mlx.formats.tensors import check_length
from eagle_mlx.memory import gb
from eagle_mlx.proposers.base import Proposer
from eagle_mlx.proposers.memory_file import MemoryFile
from eagle_mlx.target_options import TargetOptions

from ..bench.measure import compare
from ..learning.learner import Learner, head_of, with_new_head
from ..prompts import remember
from ..speculation import AUTO, NO_HEAD, bytes_of, load_proposer
from .model import Loaded, sampling_defaults
from .options import LoadConfig
from .service import ModelSource

_CHECK_PROMPT = "def fibonacci(n):\n    if n < 2:\n        return n\n    return"
_CHECK_TOKENS = 16  # enough to see a difference, in about a second


def load(config: LoadConfig, say: Callable[[str], None]) -> Loaded:
    """Load target and proposer, and decode a few tokens so that problems show now. Raises EagleError."""
    with loading(config.name), ExitStack() as opened:
        loaded = _load(config, say, opened)
        opened.pop_all()
    with suppress(ConfigError):  # requests that need a grammar report why there is none
        loaded.grammars.tokenizer()
    for line in _description(config, loaded):
        say(line)
    return loaded


def _load(config: LoadConfig, say: Callable[[str], None], opened: ExitStack) -> Loaded:
    """Load a model. `opened`: gets what must be closed if the rest cannot be loaded: its threads keep the weights."""
    target = load_target(config)
    speculation, proposer = load_proposer(config.speculation, target, config.name, say)
    config.loading.wire_active()
    name = proposer.name if proposer is not None else "none"
    proposer = speculation.for_requests(proposer)
    _try_out(target, proposer, speculation.depth)
    learner = None
    if config.learning.folder is not None:
        proposer = with_new_head(proposer, target, speculation)
        learner = Learner(config.learning, target, proposer, speculation)
        opened.callback(learner.close)
        name = head_of(proposer).name
    if (prefix_cache_bytes := bytes_of(config.prefix_cache_gb)) is None:
        prefix_cache_bytes = memory.prefix_cache_bytes(target.free_memory)
    files = None
    if config.prefix_cache_dir is not None and prefix_cache_bytes:
        folder = config.prefix_cache_dir.expanduser()
        limit = bytes_of(config.prefix_disk_gb) or default_bytes(folder)
        files = DiskTier(folder, limit, target, proposer, config.kv_bits)
        opened.callback(files.close, 0.0)
    engine = replace(speculation, keep=speculation.keep and name != "none").engine(  # plain servers start sooner
        target,
        proposer,
        config.memory,
        max_batch=config.max_batch,
        prefix_cache_bytes=prefix_cache_bytes,
        prefix_files=files,
        collector=learner.collector if learner is not None else None,
        kv_bits=config.kv_bits,
        prefill_ms=config.prefill_ms,
        drafter="none" if name == "none" else speculation.drafter,
    )
    remember(speculation.memory_texts, engine, say)
    drafts, texts = (0, None) if proposer is None else (speculation.max_depth, proposer.memory)
    kept = MemoryFile(folder, texts, target) if files is not None and texts is not None else None
    return Loaded(
        engine,
        name,
        drafts,
        sampling_defaults(config.name),
        speculation,
        memory_file=kept,
        learner=learner,
        thinking_budget=config.thinking_budget,
        image_limits=config.images,
    )


def load_target(config: LoadConfig, lazy: bool = False) -> Target:
    """Load the target; `lazy` reads only the headers of its weights. Raises EagleError if it cannot be served."""
    target = config.loading.load(config.name, lazy=lazy)
    if target.tokenizer is None:
        raise TargetError(f"{config.name} has no tokenizer, so it cannot be served")
    if config.max_context is not None:
        if config.max_context > target.context_length:
            raise ConfigError(
                f"--max-context {config.max_context} is more than the {target.context_length} tokens of {config.name}"
            )
        target.context_length = config.max_context
    return target


def check(loaded: Loaded, say: Callable[[str], None]) -> bool:
    """Return whether greedy text is the same with and without speculation, apart from rounding."""
    target, own = loaded.target, loaded.engine
    shared: dict[str, Any] = {"max_batch": 1, "exact": own.exact, "kv_bits": own.kv_bits}
    most, drafter = min(_CHECK_TOKENS, target.context_length - 2), own.drafter
    params = SamplingParams(max_tokens=most, ignore_eos=True, drafter=drafter)
    prompt = own.prepare(_CHECK_PROMPT, params).prompt[-(target.context_length - params.max_tokens - 1) :]
    plain = Engine(target, **shared).generate([prompt], params)[0]
    engine = Engine(target, own.proposer, policy=FixedPolicy(loaded.most_drafts), **shared)
    drafted = engine.generate([prompt], params)[0]
    identity = compare(target, [prompt], [plain.tokens], [drafted.tokens], [params], own.kv_bits)
    tau = f"tau {drafted.acceptance_length:.2f} ({len(drafted.tokens)} tokens in {drafted.rounds} forwards)"
    if identity.different:
        say(f"check: FAILED: the text is {drafted.text!r} with speculation and {plain.text!r} without; {tau}")
        return False
    same = "equal but for rounding" if identity.excused else "equal"
    say(f"check: ok: {len(plain.tokens)} tokens with and without speculation are {same}; {tau}")
    return True


def _try_out(target: Target, proposer: Proposer | None, depth: int) -> None:
    """Decode with and without drafts. This also compiles what the first request needs."""
    prompt = [0] * min(8, target.context_length - 1)
    params = SamplingParams(max_tokens=2 * depth + 2, ignore_eos=True, drafter="model")
    Engine(target, proposer, policy=FixedPolicy(depth), max_batch=1).generate([prompt], params)
    mx.synchronize()


def _description(config: LoadConfig, loaded: Loaded) -> list[str]:
    target, chat = loaded.target, loaded.chat
    template = "chat template" if chat.tokenizer.has_chat_template else "no chat template (completions only)"
    chats = f"{template}{', tools' if chat.calls else ''}{', reasoning' if chat.thoughts.think_start else ''}"
    budget, prefixes, disk = loaded.engine.kv_budget, loaded.engine.prefixes, loaded.disk
    cache = "no prefix cache"
    if prefixes is not None:
        cache = f"{gb(min(prefixes.capacity, budget.nbytes))} of it for the prefix cache"
    keys = f"keys and values up to {gb(budget.nbytes)}" + (f" in {config.kv_bits} bits" if config.kv_bits else "")
    return [
        f"target: {target.name}, {target.num_layers} layers, {str(target.dtype).rpartition('.')[2]}",
        f"speculation: {loaded.speculation}",
        *loaded.speculation.notes(loaded.engine),
        f"chat: {chats}",
        f"sampling: temperature {loaded.defaults.get('temperature', 1.0):g} unless the request sets another",
        f"context: {target.context_length} tokens, {config.max_batch} requests at once",
        *([f"prefix files: {disk.folder}, {gb(disk.nbytes)}, limit {gb(disk.limit)} for all models"] if disk else []),
        *([f"memory file: {file.path}"] if (file := loaded.memory_file) else []),
        *([f"learning: {loaded.learner}"] if loaded.learner else []),
        f"memory: {gb(mx.get_active_memory())} in use, {keys} ({budget.longest} tokens for one request), {cache}",
        f"blas: {blas.activate()}, mlx on {'the CPU' if mx.default_device() == mx.Device(mx.cpu) else 'the GPU'}",
    ]


def several(configs: Mapping[str, LoadConfig], nbytes: int, say: Callable[[str], None]) -> list[ModelSource]:
    """Return the sources of models that share `nbytes`. Raises ConfigError if a local model would not fit alone."""
    for name, config in configs.items():
        if Path(config.name).is_dir() and (needed := _sized(config, nbytes, len(configs))[1]) > nbytes:
            raise ConfigError(
                f"model {name!r} needs {gb(needed)} with its KV cache, but all models together may use {gb(nbytes)}; "
                "increase --memory-gb, or remove the model"
            )

    def source(name: str, config: LoadConfig) -> ModelSource:
        def needed() -> int:
            check_files(config)
            return _sized(config, nbytes, len(configs))[1]

        def loaded() -> Loaded:
            return load(_sized(config, nbytes, len(configs))[0], lambda text: say(f"{name}: {text}"))

        return ModelSource(name, loaded, config.max_batch, needed)

    return [source(name, config) for name, config in configs.items()]


def _sized(config: LoadConfig, nbytes: int, count: int) -> tuple[LoadConfig, int]:
    """Return the config with its KV cache size, and the model's total bytes. Fetches missing files."""
    weights = weights_bytes(config)
    # By default, an equal part of half the memory, or what the weights leave if that is less.
    share = max(1, min(nbytes // 2 // count, nbytes - weights))
    kv = share if config.memory.kv_bytes is None else config.memory.kv_bytes
    return config.changed(kv_gb=kv / 1e9), weights + kv


def weights_bytes(config: LoadConfig) -> int:
    """Return the bytes of the weights of target and head or draft model. Raises EagleError if one is not available."""
    return sum(file.stat().st_size for folder in _folders(config) for file in hub.weight_files(folder))


def check_files(config: LoadConfig) -> None:
    """Raise EagleError if a model cannot be loaded, as its configs, tokenizer and headers of weights show."""
    for folder in _folders(config):
        if not hub.weight_files(folder):
            raise TargetError(f"{folder} has no weights; download or create them again")
        for file in folder.glob(hub.WEIGHTS):
            check_length(file)
    load_target(config, lazy=True)
    if config.speculation.draft_model is not None:
        TargetOptions().load(config.speculation.draft_model, lazy=True)


def _folders(config: LoadConfig) -> list[Path]:
    speculation = config.speculation
    head = None if speculation.head in (AUTO, NO_HEAD) else speculation.head
    named = [config.name, *(place for place in (head, speculation.draft_model) if place is not None)]
    return [hub.resolve(place, config.loading.trust_remote_code) for place in named]
