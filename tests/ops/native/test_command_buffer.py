"""CommandBuffer: native calls put off, and made before anything looks at what they compute."""

import threading

import numpy as np
import pytest
import torch

from lfm2_cb.ops.native import Arena, CommandBuffer, NativeKernels, lend
from lfm2_cb.ops.pointwise import add, swiglu


@pytest.fixture(autouse=True, params=[False, True], ids=["", "inference mode"])
def mode(request):
    """In inference mode torch hands compound operations over whole."""
    with torch.inference_mode(request.param):
        yield


@pytest.fixture
def made(kernels, monkeypatch):
    """Of each time that calls were made from C: how many."""
    counts, call = [], NativeKernels.call

    def noted(self, name, *args):
        if name == "replay":
            counts.append(args[1])
        return call(self, name, *args)

    monkeypatch.setattr(NativeKernels, "call", noted)
    return counts


LOOKS = {
    "an operation": lambda x: x + 0,
    "another dtype": lambda x: x.to(torch.float64),
    "one number": lambda x: torch.full((4, 8), x[0, 0].item()),
    "writing over it": lambda x: x.zero_(),
    "copying from it": lambda x: torch.empty(4, 8).copy_(x),
    "a copy of what does not lie together": lambda x: x.t().reshape(-1),
    "a copy of the same dtype": lambda x: x.to(torch.float32, copy=True),
}


@pytest.mark.parametrize("look", LOOKS)
def test_calls_are_made_before_anything_looks_at_values(kernels, made, look):
    x = torch.randn(4, 8)
    expected = LOOKS[look](add(add(x, x, kernels), x, kernels))
    with CommandBuffer(kernels, Arena()):
        found = add(add(x, x, kernels), x, kernels)
        assert not made
        looked_at = LOOKS[look](found)
        assert made == [2]
    assert made == [2] and torch.equal(looked_at, expected)


def test_views_look_at_nothing_and_the_end_makes_what_is_left(kernels, made):
    x = torch.randn(6, 16)
    with CommandBuffer(kernels, Arena()):
        gated = swiglu(x, kernels)
        for view in (gated.view(3, -1), gated.flatten(), gated[1:, 2:], gated.split(3), gated.t(), gated.to(x.dtype)):
            assert view is not None
        sums = add(gated.view(-1).unflatten(0, (6, 8)), gated, kernels)
        assert not made
    assert made == [2] and torch.equal(sums, 2 * swiglu(x, kernels))


def test_arguments_keep_their_memory_until_the_calls_are_made(kernels):
    x = torch.randn(10, 100)
    with CommandBuffer(kernels, Arena()):
        total = x
        for _ in range(5):
            total = add(total, x, kernels)
            np.full(x.numel(), 7, np.float32)  # where the system puts what is asked for next
    assert torch.allclose(total, 6 * x)


def test_what_comes_from_the_arena_is_lent_again_meanwhile(kernels):
    arena = Arena()
    x = torch.randn(1 << 8, 1 << 10)  # a megabyte: its like come from there
    with CommandBuffer(kernels, arena), lend(arena):
        total = x
        for _ in range(5):
            total = add(total, x, kernels)
    assert torch.allclose(total, 6 * x) and arena.num_bytes == 2 * x.nbytes


def test_calls_of_other_threads_are_not_put_off(kernels, made):
    x, found = torch.randn(4, 8), []
    with CommandBuffer(kernels, Arena()):
        thread = threading.Thread(target=lambda: found.append(add(x, x, kernels).numpy().copy()))
        thread.start()
        thread.join()
    assert not made and torch.equal(torch.from_numpy(found[0]), 2 * x)


def test_an_error_drops_what_was_put_off_and_leaves_nothing_behind(kernels, made):
    x = torch.randn(4, 8)
    with pytest.raises(RuntimeError, match="in the middle"), CommandBuffer(kernels, Arena()):
        add(x, x, kernels)
        raise RuntimeError("in the middle")
    assert not made and threading.get_ident() not in kernels.recorders
    assert torch.equal(add(x, x, kernels), 2 * x)
