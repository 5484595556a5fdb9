"""Captured native calls, replayed: the same results from new inputs, in memory that no two living tensors share."""

import gc
import shutil
import threading

import pytest
import torch

from lfm2_cb.ops.linear.dense import few_rows_linear
from lfm2_cb.ops.native import Arena, CapturedGraph
from lfm2_cb.ops.pointwise import add, rms_norm, rotary, swiglu

pytestmark = pytest.mark.skipif(
    not any(shutil.which(name) for name in ("c++", "g++", "clang++")), reason="needs a C++ compiler"
)

FREQUENCIES = torch.arange(1, 9) / 7


def network(kernels, x, weights, norm, positions):
    """Many layers, a tensor that lives through all of them, and views."""
    cos, sin = rotary(positions, FREQUENCIES, 0.5, x.dtype, kernels)
    for weight in weights:
        x = add(x, rms_norm(swiglu(few_rows_linear(kernels, x, weight), kernels), norm, 1e-3, kernels), kernels)
    return add(add(x, cos.flatten(1), kernels), sin.flatten(1), kernels)


def inputs(dtype, rows=3, width=16):
    x = torch.randn(rows, width, dtype=dtype)
    return x, torch.randint(0, 5000, (rows,)), [torch.randn(2 * width, width, dtype=dtype) / 9 for _ in range(20)]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_a_graph_computes_what_the_calls_would_from_what_is_in_the_inputs_now(kernels, dtype):
    x, positions, weights = inputs(dtype)
    norm = torch.randn(16, dtype=dtype)
    arena = Arena()
    graph = CapturedGraph(kernels, arena)
    captured = graph.capture(lambda: network(kernels, x, weights, norm, positions))
    assert graph.not_captured is None
    assert torch.equal(captured, network(kernels, x, weights, norm, positions))
    for _ in range(3):
        x.copy_(torch.randn_like(x))
        positions.random_(0, 5000)
        weights[3].mul_(-1)  # the weights themselves are read anew as well
        expected = network(kernels, x, weights, norm, positions)
        assert torch.equal(graph.replay(), expected)


def test_an_arena_lends_again_what_has_come_back_and_nothing_else(kernels):
    x, positions, weights = inputs(torch.float32)
    norm, arena = torch.ones(16), Arena()
    sizes = []
    for _ in range(3):
        graph = CapturedGraph(kernels, arena)
        graph.capture(lambda: network(kernels, x, weights, norm, positions))
        gc.collect()
        sizes.append(arena.num_bytes)
    made = 20 * (3 * 32 + 3 * 3 * 16) * 4
    assert sizes[0] == sizes[1] == sizes[2] < made / 4

    kept = [arena.empty(torch.Size([n]), torch.float32).fill_(n) for n in range(1, 40)]
    views = [tensor.view(-1)[:1] for tensor in kept[::2]]  # which keep their memory too
    del kept
    others = [arena.empty(torch.Size([n]), torch.float32).fill_(-1) for n in range(1, 40)]
    assert [view.item() for view in views] == list(range(1, 40, 2)) and all(o.lt(0).all() for o in others)
    assert all(tensor.data_ptr() % 64 == 0 for tensor in others)


def test_what_no_native_call_does_is_noticed(kernels):
    x, w = torch.randn(2, 16), torch.randn(16, 16)

    def product():
        return few_rows_linear(kernels, x, w)

    cases = {
        "aten.mul": lambda: product() * 2,
        "aten.add_": lambda: product().add_(1),
        "aten.copy_": lambda: product().copy_(x),
        "aten.zeros": lambda: add(product(), torch.zeros(2, 16), kernels),
        "aten._to_copy": lambda: product().double(),
        "the result": lambda: w,
    }
    for name, compute in cases.items():
        graph = CapturedGraph(kernels, Arena())
        graph.capture(compute)
        assert graph.not_captured is not None and graph.not_captured.startswith(name)
    views = CapturedGraph(kernels, Arena())
    views.capture(
        lambda: add(product().view(4, 8)[1:, None, :].float().contiguous().flatten(1), x.view(4, 8)[1:], kernels)
    )
    assert views.not_captured is None
    copies = CapturedGraph(kernels, Arena())
    copies.capture(lambda: add(product().t(), x.t(), kernels))
    assert copies.not_captured == "aten.clone.default"


def test_other_threads_calls_are_not_captured(kernels):
    x, w = torch.randn(2, 16), torch.randn(16, 16)
    graph = CapturedGraph(kernels, Arena())

    def compute():
        other = threading.Thread(target=lambda: few_rows_linear(kernels, -x, w))
        other.start()
        other.join()
        return few_rows_linear(kernels, x, w)

    graph.capture(compute)
    assert len(graph) == 1 and not kernels.recorders
    assert torch.equal(graph.replay(), few_rows_linear(kernels, x, w))
