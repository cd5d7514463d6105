"""`eagle-serve --check`: a short decode with and without speculation, compared."""

from __future__ import annotations

from collections.abc import Callable

from eagle_mlx.engine import Engine
from eagle_mlx.policy import FixedPolicy
from eagle_mlx.sampling_params import SamplingParams

from ..bench.identity import compare, tolerance_for
from .model import Loaded

PROMPT = "def fibonacci(n):\n    if n < 2:\n        return n\n    return"
TOKENS = 16


def check(loaded: Loaded, say: Callable[[str], None]) -> bool:
    """Whether greedy text is the same either way; where it first differs by rounding alone, it is."""
    target = loaded.target
    params = SamplingParams(max_tokens=min(TOKENS, target.context_length - 2), ignore_eos=True)
    prompt = loaded.engine.prepare(PROMPT, params).prompt[-(target.context_length - params.max_tokens - 1) :]
    plain = Engine(target, max_batch=1).generate([prompt], params)[0]
    policy = FixedPolicy(loaded.most_drafts)
    drafted = Engine(target, loaded.engine.proposer, policy, max_batch=1).generate([prompt], params)[0]
    identity = compare(target, [prompt], [plain.tokens], [drafted.tokens], [params], tolerance_for(target))
    tau = f"tau {drafted.acceptance_length:.2f} ({len(drafted.tokens)} tokens in {drafted.rounds} forwards)"
    if identity.different:
        say(f"check: FAILED: with speculation the text is {drafted.text!r}, without {plain.text!r}; {tau}")
        return False
    same = "equal but for rounding" if identity.excused else "equal"
    say(f"check: ok: {len(plain.tokens)} tokens with and without speculation are {same}; {tau}")
    return True
