"""Mixture of experts: the router's choice, and the experts' products by native kernels or in torch."""

from .modules import Experts, QuantizedExperts
from .native import native_mix_experts
from .reference import mix_experts
from .routing import expected_experts, route

__all__ = ["Experts", "QuantizedExperts", "expected_experts", "mix_experts", "native_mix_experts", "route"]
