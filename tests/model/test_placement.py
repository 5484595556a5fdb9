"""Weights side by side in memory: one copy, and shared with whom they were shared with."""

import copy
import itertools
import sys
import threading

import pytest
import torch
from helpers import random_stock
from safetensors.torch import load_file, save_file
from torch import nn

from lfm2_cb import ContinuousBatchingGenerator
from lfm2_cb.loading import as_lfm2_cb, load_model
from lfm2_cb.model.placement import ALIGNMENT, place_side_by_side
from lfm2_cb.ops.memory import region


def gaps_between(parameters):
    places = sorted((p.data_ptr(), p.nbytes) for p in dict.fromkeys(parameters))
    return [begin - at - size for (at, size), (begin, _) in itertools.pairwise(places)]


@pytest.fixture
def stock():
    return random_stock(0, tie_word_embeddings=True)


def test_a_generators_weights_lie_side_by_side_in_the_order_of_their_use(stock):
    with ContinuousBatchingGenerator(stock, cache_memory="8MiB", kernels="native") as generator:
        model = generator.model
        assert all(0 <= gap < ALIGNMENT for gap in gaps_between(model.parameters()))
        places = [p.data_ptr() for p in model.parameters()]
        assert places == sorted(places) and all(place % ALIGNMENT == 0 for place in places)


def test_a_stock_model_goes_on_sharing_them(stock):
    before = {name: p.clone() for name, p in stock.named_parameters()}
    objects = dict(stock.named_parameters())
    with ContinuousBatchingGenerator(stock, cache_memory="8MiB", kernels="native") as generator:
        for name, parameter in stock.named_parameters():
            assert parameter is objects[name] and torch.equal(parameter, before[name])
        ours = {p.data_ptr() for p in generator.model.parameters()}
        attention = next(layer.self_attn for layer in stock.model.layers if layer.is_attention_layer)
        assert {p.data_ptr() for p in (attention.q_proj.weight, attention.out_proj.weight)} <= ours
        prompt, options = [[5, 6, 7, 8]], {"max_new_tokens": 5, "do_sample": False}
        for value in (0.3, -0.2):
            with torch.no_grad():
                attention.k_proj.weight.add_(value)  # a view of a stack
                stock.model.embed_tokens.weight.mul_(1 - value)
            expected = stock.generate(torch.tensor(prompt), **options)[0, 4:]
            assert generator.generate(prompt, **options)[0].token_ids == expected.tolist()


def test_they_are_moved_once(stock):
    with ContinuousBatchingGenerator(stock, cache_memory="8MiB", kernels="native") as first:
        places = [p.data_ptr() for p in first.model.parameters()]
        with ContinuousBatchingGenerator(stock, cache_memory="8MiB", kernels="native") as second:
            assert [p.data_ptr() for p in second.model.parameters()] == places


def test_a_saved_parameter_is_saved_alone_and_a_copied_model_is_a_copy(stock, tmp_path):
    model = as_lfm2_cb(stock)
    place_side_by_side(model, stock)
    norm = model.model.layers[0].operator_norm.weight
    torch.save(norm, tmp_path / "norm.pt")
    assert (tmp_path / "norm.pt").stat().st_size < norm.nbytes + 4096
    copied = copy.deepcopy(model)
    copied.model.layers[0].operator_norm.weight.data.zero_()
    assert norm.abs().sum() > 0
    model.save_pretrained(tmp_path / "saved")
    for name, parameter in load_model(str(tmp_path / "saved")).named_parameters():
        assert torch.equal(parameter, model.get_parameter(name))


@pytest.mark.parametrize("changed", [False, True])
def test_a_mapped_files_pages_are_given_back_unless_they_were_written_to(changed, tmp_path):
    save_file({"weight": torch.randn(2**20)}, tmp_path / "weights")
    mapped = load_file(tmp_path / "weights")["weight"]
    if changed:
        mapped[5] = 7.0
    layer = nn.Module()
    layer.weight, layer.other = nn.Parameter(mapped), nn.Parameter(torch.ones(3))
    values = mapped.clone()
    place_side_by_side(layer)
    assert torch.equal(layer.weight, values) and torch.equal(mapped, values)
    assert layer.weight.data_ptr() != mapped.data_ptr()


def test_what_cannot_be_moved_stays():
    layer = nn.Module()
    layer.a, layer.b = nn.Parameter(torch.randn(4, 6).t()), nn.Parameter(torch.randn(5))
    layer.c, layer.empty = nn.Parameter(torch.randn(7)), nn.Parameter(torch.empty(0))
    values, place = [p.detach().clone() for p in layer.parameters()], layer.a.data_ptr()
    place_side_by_side(layer)
    assert layer.a.data_ptr() == place
    assert all(torch.equal(p, value) for p, value in zip(layer.parameters(), values, strict=True))


def test_a_region_is_zero_and_aligned():
    memory = region(1000)
    assert memory.nbytes == 1000 and memory.ctypes.data % 64 == 0 and not memory.any()


def test_generators_made_in_many_threads_share_one_copy(stock):
    prompt, made, start = [3, 1, 4, 1], [], threading.Barrier(6)
    options = {"max_new_tokens": 4, "do_sample": False}
    expected = stock.generate(torch.tensor([prompt]), **options)[0, 4:].tolist()

    def make():
        start.wait()
        made.append(ContinuousBatchingGenerator(stock, cache_memory="8MiB", kernels="native"))

    threads = [threading.Thread(target=make) for _ in range(6)]
    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    finally:
        sys.setswitchinterval(interval)
    assert len(made) == 6 and len({id(generator.model) for generator in made}) == 1
    for generator in made:
        with generator:
            assert generator.generate(prompt, **options)[0].token_ids == expected
