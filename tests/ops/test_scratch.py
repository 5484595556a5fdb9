"""Scratch memory of the native kernels' threads: it grows, is given back when a thread ends, and is bounded."""

import os
import sys
import threading

import pytest
import torch

from lfm2_cb.ops.linear.dense import few_rows_linear, many_rows_linear
from lfm2_cb.ops.native import library as native


@pytest.fixture
def kernels():  # by this processor's best instruction set
    try:
        return native.load()
    except native.NativeUnavailable as reason:
        pytest.skip(str(reason))


def is_right(kernels, product, rows, inner, outputs=24):
    generator = torch.Generator().manual_seed(rows)
    x, weight = (torch.randn(n, inner, generator=generator).bfloat16() for n in (rows, outputs))
    found = product(kernels, x, weight).float()
    expected = x.float() @ weight.float().t()
    return torch.allclose(found, expected, rtol=0.02, atol=0.02 * inner**0.5)


def in_a_new_thread(work):
    results = []
    thread = threading.Thread(target=lambda: results.append(work()))
    thread.start()
    thread.join()
    return results[0]


def test_it_grows_with_what_is_asked_for(kernels):
    sizes = [(3, 100), (40, 700), (500, 3000), (7, 50), (2000, 4700), (2200, 4700), (1, 33)]  # the largest: over 32 MB

    def work():
        return [is_right(kernels, many_rows_linear, *size) for size in sizes]

    assert all(in_a_new_thread(work))


@pytest.mark.skipif(sys.platform != "linux", reason="/proc")
def test_threads_that_end_give_it_back(kernels):
    def resident():
        with open("/proc/self/statm") as file:
            return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")

    def work():
        return is_right(kernels, few_rows_linear, 4, 2048)

    assert in_a_new_thread(work)
    before = resident()
    assert all(in_a_new_thread(work) for _ in range(100))
    assert resident() - before < 50 << 20  # they kept a huge page each
