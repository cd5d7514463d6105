"""How many tokens to draft in a round: policies that fix it, follow the acceptance, or measure what pays."""

from eagle_mlx.policy.acceptance import AcceptancePolicy
from eagle_mlx.policy.base import FixedPolicy, Policy
from eagle_mlx.policy.throughput import ThroughputPolicy

HybridPolicy = ThroughputPolicy
"""The name that the policy had for a head or a draft model alongside n-grams."""

__all__ = ["AcceptancePolicy", "FixedPolicy", "HybridPolicy", "Policy", "ThroughputPolicy"]
