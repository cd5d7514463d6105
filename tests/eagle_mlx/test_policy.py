"""How many tokens to draft."""

from typing import Any

import pytest

from eagle_mlx.errors import ConfigError
from eagle_mlx.policy import FixedPolicy, Policy


@pytest.mark.parametrize("k", [0, 1, 7])
def test_fixed_policy_drafts_k_whatever_happens(k: int) -> None:
    policy: Policy = FixedPolicy(k)
    assert policy.depth(rows=1) == k
    policy.observe(drafted=k, accepted=[0, 0])
    assert policy.depth(rows=64) == k


@pytest.mark.parametrize("k", [-1, 1.5, True, "4", None])
def test_fixed_policy_refuses_what_is_no_length(k: Any) -> None:
    with pytest.raises(ConfigError, match=r"^k, the number of draft tokens"):
        FixedPolicy(k)
