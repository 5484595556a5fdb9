"""Each engine runs its own kernels, whatever other engines on the same model run."""

import random
import shutil
import threading
from collections import Counter

import pytest
import torch
from helpers import ours, random_prompts, random_stock, stock_greedy
from torch import nn
from torch.utils.cpp_extension import get_cxx_compiler

from lfm2_cb import ContinuousBatchingGenerator
from lfm2_cb.model.quantization import quantize
from lfm2_cb.ops.kernel_set import REFERENCE
from lfm2_cb.ops.native import NativeKernels

pytestmark = pytest.mark.skipif(shutil.which(get_cxx_compiler()) is None, reason="no C++ compiler")
GREEDY = {"do_sample": False, "eos_token_id": None, "max_new_tokens": 12}


@pytest.fixture
def calls(monkeypatch):
    """Native calls by the thread that made them."""
    counted, call = Counter(), NativeKernels.call

    def counting(self, name, *args):
        counted[threading.get_ident()] += 1
        call(self, name, *args)

    monkeypatch.setattr(NativeKernels, "call", counting)
    return counted


@pytest.fixture(params=["full precision", "int8"])
def model(request):
    stock = random_stock(3)
    return ours(stock) if request.param == "full precision" else quantize(stock, "int8")


def generators(model):
    options = {"cache_memory": "4MiB", "prefix_caching": False}
    return {kernels: ContinuousBatchingGenerator(model, kernels=kernels, **options) for kernels in ("torch", "native")}


@pytest.mark.parametrize("order", [("torch", "native"), ("native", "torch")])
def test_interleaved_on_one_model(model, order, calls):
    made, prompts = generators(model), random_prompts(random.Random(0), 5, 20)
    for _ in range(2):
        for kernels in order:
            before = calls.total()
            made[kernels].generate(prompts, **GREEDY)
            assert (calls.total() > before) == (kernels == "native")
    for generator in made.values():
        generator.close()


def test_in_two_threads_on_one_model(model, calls):
    made, prompts = generators(model), random_prompts(random.Random(0), 9, 20)
    start, counts, answers = threading.Barrier(2), {}, {}

    def run(kernels):
        start.wait()
        answers[kernels] = [o.token_ids for _ in range(3) for o in made[kernels].generate(prompts, **GREEDY)]
        counts[kernels] = calls[threading.get_ident()]

    threads = [threading.Thread(target=run, args=(kernels,)) for kernels in made]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert counts["torch"] == 0 < counts["native"]
    if getattr(model, "hf_quantizer", None) is None:  # 8-bit inputs may be rounded either way
        assert answers["torch"] == answers["native"]


class TakesOnlyX(nn.Module):
    """What replaces a linear, and knows nothing of kernels."""

    def __init__(self, inner):
        super().__init__()
        self.inner = inner

    def forward(self, x):
        return self.inner(x)


@pytest.mark.parametrize("kernels", ["torch", "native"])
def test_any_linear_may_be_wrapped(kernels):
    stock, prompts = random_stock(5), random_prompts(random.Random(1), 4, 20)
    expected = [stock_greedy(stock, prompt, 12) for prompt in prompts]
    model = ours(stock)
    for name, module in list(model.named_modules()):
        if isinstance(module, nn.Linear) or name.endswith("norm"):
            model.set_submodule(name, TakesOnlyX(module))
    with ContinuousBatchingGenerator(model, cache_memory="4MiB", kernels=kernels) as generator:
        assert [o.token_ids for o in generator.generate(prompts, **GREEDY)] == expected
    with torch.no_grad():
        ids = torch.tensor([prompts[0]])
        torch.testing.assert_close(model(ids).logits, stock(ids).logits, atol=1e-4, rtol=1e-4)


def test_an_embedding_that_scales_its_rows_is_asked_itself():
    rows, ids = torch.empty(2, 4), torch.tensor([1, 3])
    for module in (nn.Embedding(5, 4), nn.Embedding(5, 4, max_norm=0.1)):
        with torch.inference_mode():
            REFERENCE.embed(module, ids, rows)
        assert torch.equal(rows, module(ids))
    assert rows.norm(dim=1).max() < 0.11
