"""The engine by the Triton kernels gives stock's tokens."""

import random

import pytest
import torch
from engine.recorded_graphs import RecordedGraphs, Recorder
from helpers import random_prompts, random_stock
from torch.utils._python_dispatch import _disable_current_modes, _get_current_dispatch_mode

from lfm2_cb import ContinuousBatchingGenerator
from lfm2_cb.engine import padded_steps, runner
from lfm2_cb.model.ragged_batch import Row
from lfm2_cb.ops.kernel_set import KernelSet
from lfm2_cb.ops.triton import TritonUnavailable

GREEDY = {"do_sample": False, "eos_token_id": None}


def expected(stock, prompts, count):
    device = stock.device
    outputs = [stock.generate(torch.tensor([p], device=device), max_new_tokens=count, **GREEDY)[0] for p in prompts]
    return [output[len(p) :].tolist() for output, p in zip(outputs, prompts, strict=True)]


@pytest.fixture
def graphs(device, monkeypatch):
    """On a CPU operators and kernels are recorded. Attributes: as `RecordedGraphs`; launched: names of kernels."""
    made = RecordedGraphs()
    made.launched = set()
    if device.type == "cpu":
        from triton.runtime.interpreter import InterpretedFunction

        run = InterpretedFunction.run

        def launch(kernel, args, kwargs):
            run(kernel, *args, **kwargs)
            return []

        def record(kernel, *args, **kwargs):
            recorder = _get_current_dispatch_mode()
            with _disable_current_modes():
                launch(kernel, args, kwargs)
            if isinstance(recorder, Recorder):
                recorder.calls.append((launch, (kernel, args, kwargs), {}, []))
                made.launched.add(kernel.__name__)

        monkeypatch.setattr(InterpretedFunction, "run", record)
        monkeypatch.setattr(padded_steps, "FIRST_TOKENS", 64)
        monkeypatch.setattr(runner, "graphs_for", lambda kernels, device: made)
    return made


@pytest.mark.parametrize(("seed", "captured"), [(0, False), (7, True)])
def test_greedy_tokens_equal_stock(device, seed, captured, request):
    """Prompts cut into chunks, more than run at once: chunks, decodes, checkpoints, and states that are restored."""
    graphs = request.getfixturevalue("graphs") if captured else None
    stock = random_stock(seed).to(device)
    prompts = random_prompts(random.Random(seed), 3, 25)
    prompts.append(prompts[0] + [7])  # begins with cached blocks
    options = {"cache_memory": "2MiB", "block_size": 8, "max_batch_tokens": 16, "max_sequences": 3}
    with ContinuousBatchingGenerator(stock, kernels="triton", **options) as generator:
        assert generator.engine.runner.kernels.triton is not None
        outputs = generator.generate(prompts, max_new_tokens=4, **GREEDY)
        generator.engine.scheduler.cache.check_integrity([])
    assert [output.token_ids for output in outputs] == expected(stock, prompts, 4)
    if graphs is not None and device.type == "cpu":
        assert graphs.captured == [4, 2, 1] and len(graphs.replayed) >= 3
        assert graphs.launched == {"_rms_norm", "_rotary", "_norm_rotate", "_attention", "_swiglu", "_short_conv"}


def test_drafts_sampling_and_an_8_bit_cache(device):
    """What goes by torch, or by both: conv states of drafts, processors, quantised keys."""
    stock = random_stock(3).to(device)
    prompts = [[5, 6, 7, 5, 6, 7, 5, 6], [9, 8]]
    with ContinuousBatchingGenerator(stock, kernels="triton", cache_memory="2MiB", drafting="auto") as generator:
        outputs = generator.generate(prompts, max_new_tokens=6, **GREEDY)
    assert [output.token_ids for output in outputs] == expected(stock, prompts, 6)
    sampled = {"max_new_tokens": 3, "do_sample": True, "top_k": 10, "seed": 1, "eos_token_id": None}
    found = {}
    for kernels in ("torch", "triton"):
        options = {"kernels": kernels, "cache_memory": "2MiB", "cache_dtype": "int8"}
        with ContinuousBatchingGenerator(stock, **options) as generator:
            found[kernels] = [output.token_ids for output in generator.generate(prompts, **sampled)]
    assert found["torch"] == found["triton"]


def test_what_cannot_be_had_is_refused_by_name(device):
    with pytest.raises(TritonUnavailable, match=r"kernels='triton' is not available: they are for no torch\.float64"):
        KernelSet.resolve("triton", device, torch.float64)


def test_a_row_that_begins_from_a_state_that_another_writes(device):
    """As rows of a prompt with chunks taken up from elsewhere. Programs run in any order; here the writer is first."""
    stock = random_stock(3).to(device)
    logits = []
    for kernels in ("torch", "triton"):
        with ContinuousBatchingGenerator(stock, cache_memory="1MiB", block_size=8, kernels=kernels) as generator:
            run = generator.engine.runner.forward
            run([Row([5, 6, 7, 8], 0, [0, 1], 0)])
            writer, reader = Row([9, 10, 11], 4, [0, 1], 0, num_logits=1), Row([9, 12], 4, [2, 3], 0, num_logits=1)
            reader.keeps_state = False
            logits.append(run([writer, reader]))
    torch.testing.assert_close(*logits)
