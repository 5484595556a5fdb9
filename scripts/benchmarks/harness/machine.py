"""What this machine could do at best, measured in the same run, and how much of it a reading reached."""

from __future__ import annotations

import functools
import platform
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers import Lfm2ForCausalLM, PreTrainedModel

from .readings import Reading
from .roofline import Step, rates, roofline_seconds
from .workloads import Workload

#: workload → what bounds it: reading the weights once a step, or the arithmetic of its prompts
BOUND_BY = {"single": "decode", "five": "decode", "long8": "prefill"}


def best_seconds(run: Callable[[], Any], budget: float) -> float:
    """The quickest of at least two runs, and of as many as begin within `budget` seconds."""
    times: list[float] = []
    until = time.perf_counter() + budget
    while len(times) < 2 or time.perf_counter() < until:
        start = time.perf_counter()
        run()
        times.append(time.perf_counter() - start)
    return min(times)


def read_rate(budget: float) -> float:
    """GB/s by which memory is read, of 256 MB: the better of a sum and a product of a matrix with a vector."""
    matrix, vector = torch.ones(2**14, 2**12), torch.ones(2**12)
    seconds = min(best_seconds(run, budget / 2) for run in (matrix.sum, lambda: matrix @ vector))
    return matrix.nbytes / seconds / 1e9


#: the ways that a matrix product's operands may lie in memory
LAYOUTS: tuple[Callable[[torch.Tensor, torch.Tensor], torch.Tensor], ...] = (
    lambda a, b: a @ b,
    lambda a, b: a @ b.t(),
    lambda a, b: a.t() @ b,
)


@functools.cache
def best_layout(dtype: torch.dtype) -> Callable[[torch.Tensor, torch.Tensor], torch.Tensor]:
    """What `torch.matmul` is quickest with: where bf16 is emulated they are tens of times apart."""
    a, b = torch.randn(2, 512, 512).to(dtype)
    return min(LAYOUTS, key=lambda product: best_seconds(lambda: product(a, b), 0.1))


def matrix_rate(dtype: torch.dtype, budget: float) -> float:
    """TFLOP/s of `torch.matmul` on square matrices: of 1024, and of 2048 where that does not take too long."""
    product, rates = best_layout(dtype), []
    for size in (1024, 2048):
        if rates and 2 * 2 * size**3 / (rates[0] * 1e12) > budget:
            break
        a, b = torch.randn(2, size, size).to(dtype)
        rates.append(2 * size**3 / best_seconds(lambda a=a, b=b: product(a, b), budget / 2) / 1e12)
    return max(rates)


def measure(budget: float = 0.4) -> dict[str, float]:
    """Read bandwidth (GB/s) and matrix rates (TFLOP/s) of this moment, torch's and (`roofline.rates`) the processor's.

    Args: budget: seconds for each, roughly.
    """
    return {
        "read_gb_per_s": read_rate(budget),
        "bf16_tflop_per_s": matrix_rate(torch.bfloat16, budget),
        "fp32_tflop_per_s": matrix_rate(torch.float32, budget),
        **rates(budget / 2),
    }


def measure_card(device: torch.device, budget: float = 0.4) -> dict[str, float]:
    """As `measure`, of a CUDA card: what torch reads of its memory, and multiplies.

    Args: budget: seconds for each, roughly.
    """

    def quickest(run: Callable[[], Any]) -> float:
        def whole() -> None:
            run()
            torch.cuda.synchronize(device)

        whole()
        return best_seconds(whole, budget / 4)

    # A matrix with a vector reads the matrix once, 1 GB of it: far more than the card's cache holds.
    matrix = torch.ones(2**14, 2**15, dtype=torch.bfloat16, device=device)
    found = {"read_gb_per_s": matrix.nbytes / quickest(lambda: matrix @ matrix[0]) / 1e9}
    for dtype, name in ((torch.bfloat16, "bf16"), (torch.float32, "fp32")):
        a, b = torch.randn(2, 4096, 4096, device=device).to(dtype)
        found[f"{name}_tflop_per_s"] = 2 * 4096**3 / quickest(lambda a=a, b=b: a @ b) / 1e12
    return found


def card_facts(device: torch.device) -> dict[str, Any]:
    """What this card is; nothing of a CPU."""
    if device.type != "cuda":
        return {}
    card = torch.cuda.get_device_properties(device)
    return {"card": card.name, "card_gib": round(card.total_memory / 2**30), "cuda": torch.version.cuda}


def has_bf16_hardware() -> bool:
    return bool(torch.cpu._is_avx512_bf16_supported() or torch.cpu._is_amx_tile_supported())


def facts() -> dict[str, Any]:
    """What this machine is."""
    info = Path("/proc/cpuinfo")
    lines = info.read_text("utf-8").splitlines() if info.is_file() else []
    name = next((line.split(":")[1].strip() for line in lines if line.startswith("model name")), platform.processor())
    return {
        "cpu": name,
        "threads": torch.get_num_threads(),
        "bf16_hardware": has_bf16_hardware(),
        "torch": torch.__version__,
    }


def bytes_a_step(model: PreTrainedModel) -> int:
    """What every step reads of the weights: all once, but an embedding that is no head."""
    weights = sum(parameter.nbytes for parameter in model.parameters())
    tied = model.lm_head.weight is model.model.embed_tokens.weight
    return weights if tied else weights - sum(p.nbytes for p in model.model.embed_tokens.parameters())


@dataclass(frozen=True)
class ModelWork:
    """What a model's arithmetic and its weights amount to.

    Attributes:
        weight_bytes: read by every step, whatever its rows: all weights once (not an embedding that is no head).
        token_flops: of one token through the layers' matrices. head_flops: of one row through the head.
        attention_flops: of one attended pair (query, key), all layers and heads.
        block_bytes: of one cache block's keys and values, all layers. weights: "int8" or "int4", where of so few bits.
    """

    weight_bytes: int
    token_flops: int
    head_flops: int
    attention_flops: int
    block_bytes: int = 0
    weights: str | None = None

    @classmethod
    def of(cls, model: Lfm2ForCausalLM) -> ModelWork:
        config, head = model.config, model.lm_head.weight
        linears = sum(m.weight.numel() for m in model.model.modules() if isinstance(m, nn.Linear))
        head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
        layers = config.layer_types.count("full_attention")
        return cls(
            bytes_a_step(model),
            2 * linears,
            2 * head.numel(),
            4 * layers * config.num_attention_heads * head_dim,
        )

    def prompt_flops(self, workload: Workload) -> int:
        """Of prefilling all prompts, nothing shared: matrices, causal attention, and the head once a prompt."""
        lengths = [len(prompt) for prompt, _ in workload]
        pairs = sum(n * (n + 1) // 2 for n in lengths)
        return self.token_flops * sum(lengths) + self.attention_flops * pairs + self.head_flops * len(lengths)


def reached(
    name: str,
    work: ModelWork,
    workload: Workload,
    ours: Reading,
    machine: dict[str, float],
    steps: Sequence[Step] = (),
) -> dict[str, float]:
    """Fractions of the machine's best that a reading reached.

    Returns: "read_bandwidth" where decoding is bound by reading the weights: the time to read them once over the
    median gap between two tokens (K/V comes on top, and is not counted). "bf16_matrix_rate" and "fp32_matrix_rate"
    where prefill dominates: the prompts' arithmetic over the time to the last first token. "roofline", of any
    workload, where its steps are given: their best time (`roofline_seconds`) over the time they took.
    """
    bound, found = BOUND_BY.get(name), {}
    if bound == "decode" and ours.itl_p50:
        found = {"read_bandwidth": work.weight_bytes / (machine["read_gb_per_s"] * 1e9) / ours.itl_p50}
    if bound == "prefill":
        rate = work.prompt_flops(workload) / ours.ttft_last / 1e12
        found = {f"{dtype}_matrix_rate": rate / machine[f"{dtype}_tflop_per_s"] for dtype in ("bf16", "fp32")}
    flops = work.token_flops, work.head_flops, work.attention_flops
    best = roofline_seconds(steps, machine, work.weight_bytes, work.block_bytes, *flops, weights=work.weights)
    return found | ({"roofline": best / ours.seconds} if best else {})
