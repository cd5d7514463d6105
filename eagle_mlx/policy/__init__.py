"""How many tokens to draft in a round: rules that fix it, follow the acceptance, or measure what pays."""

from eagle_mlx.policy.acceptance import AcceptancePolicy
from eagle_mlx.policy.base import FixedPolicy, Policy
from eagle_mlx.policy.hybrid import HybridPolicy
from eagle_mlx.policy.throughput import ThroughputPolicy

__all__ = ["AcceptancePolicy", "FixedPolicy", "HybridPolicy", "Policy", "ThroughputPolicy"]
