"""Mixture-of-Kittens in Python: a deterministic, dropless Mixture-of-Experts training layer."""

from mok.config import MoEConfig, Tuning
from mok.fabric import FabricError
from mok.layer import MoE, moe

__all__ = ["FabricError", "MoE", "MoEConfig", "Tuning", "moe"]
