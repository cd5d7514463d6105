"""Policies decide how many tokens a round drafts: a fixed number, by acceptance, or by measured speed."""

from eagle_mlx.policy.base import AcceptancePolicy, FixedPolicy, Policy
from eagle_mlx.policy.throughput import ThroughputPolicy

__all__ = ["AcceptancePolicy", "FixedPolicy", "Policy", "ThroughputPolicy"]
