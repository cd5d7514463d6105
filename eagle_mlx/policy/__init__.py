"""Policies decide how many tokens a round drafts: a fixed number, by acceptance, or by measured speed."""

from eagle_mlx.policy.base import AcceptancePolicy, FixedPolicy, Policy
from eagle_mlx.policy.throughput import ThroughputPolicy

HybridPolicy = ThroughputPolicy  # the name for a head or a draft model together with n-grams

__all__ = ["AcceptancePolicy", "FixedPolicy", "HybridPolicy", "Policy", "ThroughputPolicy"]
