"""Where a model runs, said at every door, and what a card's memory allows; without a card."""

from contextlib import contextmanager

import pytest
import torch
from helpers import random_stock

import lfm2_cb
from lfm2_cb import ContinuousBatchingGenerator, loading
from lfm2_cb.cli.main import main
from lfm2_cb.engine import runner
from lfm2_cb.engine.config import EngineConfig
from lfm2_cb.engine.memory_budget import cache_budget
from lfm2_cb.loading import load_model
from lfm2_cb.model.quantization import check_device
from lfm2_cb.ops.triton import launching_on

CUDA = torch.device("cuda")
needs_no_card = pytest.mark.skipif(torch.cuda.is_available(), reason="there is a card")


@pytest.fixture
def card(monkeypatch):
    """6 GB are free, and torch keeps 1 GB that nobody uses."""
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (6 * 10**9, 80 * 10**9))
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda device: 3 * 10**9)
    monkeypatch.setattr(torch.cuda, "memory_allocated", lambda device: 2 * 10**9)


def test_a_cache_is_no_larger_than_what_is_free_on_the_card(card):
    assert cache_budget("2GB", CUDA) == 2 * 10**9 and cache_budget(7 * 10**9, CUDA) == 7 * 10**9
    assert cache_budget("50%", CUDA) == 35 * 10**8 and cache_budget(" 100 % ", CUDA) == 7 * 10**9
    with pytest.raises(MemoryError, match=r"'8GB' is 8,000,000,000 bytes, and 7,000,000,000 are free on cuda"):
        cache_budget("8GB", CUDA)


def test_a_share_is_of_a_cards_memory():
    assert EngineConfig(cache_memory="80%").cache_memory == "80%"
    for share in ("0%", "101%"):
        with pytest.raises(ValueError, match="cache_memory must be above 0 and up to 100%"):
            EngineConfig(cache_memory=share)
    with pytest.raises(ValueError, match="cache_memory='80%' is a share of a GPU's memory, but the model is on cpu"):
        ContinuousBatchingGenerator(random_stock(0), cache_memory="80%")


@pytest.mark.parametrize("weights", ["int8", "int4"])
def test_low_bit_weights_are_refused_on_a_card_before_anything_is_loaded(weights, monkeypatch):
    monkeypatch.setattr(loading, "parse_device", lambda device: CUDA)
    monkeypatch.setattr(loading.PreTrainedConfig, "get_config_dict", lambda *_: pytest.fail("it was read"))
    message = f"weights='{weights}' runs on CPUs only, and not on cuda: load in full precision"
    with pytest.raises(ValueError, match=message):
        load_model(lfm2_cb.demo_model_path(), weights=weights, device="cuda")
    with pytest.raises(ValueError, match=message):
        ContinuousBatchingGenerator(lfm2_cb.demo_model_path(), weights=weights, device="cuda")
    check_device(None, CUDA)
    check_device(weights, torch.device("cpu"))


@needs_no_card
def test_a_card_that_is_not_there_is_said_before_anything_is_loaded(monkeypatch, capsys):
    monkeypatch.setattr(loading.PreTrainedConfig, "get_config_dict", lambda *_: pytest.fail("it was read"))
    path = lfm2_cb.demo_model_path()
    for door in (load_model, ContinuousBatchingGenerator):
        with pytest.raises(ValueError, match="device 'cuda': "):
            door(path, device="cuda")
    assert main(["info", path, "--device", "cuda"]) == 2
    assert capsys.readouterr().err.startswith("lfm2-cb: error: --device cuda: ")


def test_a_path_is_loaded_there_and_a_live_model_is_used_where_it_is():
    with ContinuousBatchingGenerator(lfm2_cb.demo_model_path(), device="cpu", cache_memory="8MiB") as generator:
        assert generator.model.device.type == "cpu" and len(generator.generate([[5, 6]], max_new_tokens=2)) == 1
    with pytest.raises(ValueError, match="device='meta', but the model is on cpu: move it first"):
        ContinuousBatchingGenerator(random_stock(0), device="meta", cache_memory="4MiB")


def test_a_step_is_launched_on_the_models_device(monkeypatch):
    """Not on the current one, where Triton launches by itself."""
    assert launching_on(torch.device("cuda:1")).idx == 1
    entered, inside, outside = [], [], []

    @contextmanager
    def launching(device):
        entered.append(device)
        inside.append(device)
        yield
        inside.pop()

    monkeypatch.setattr(runner, "launching_on", launching)
    with ContinuousBatchingGenerator(random_stock(0), cache_memory="4MiB") as generator:
        generator.model.model.register_forward_pre_hook(lambda *_: None if inside else outside.append(1))
        generator.generate([[5, 6]], max_new_tokens=2)
    assert not outside and len(entered) >= 2 and set(entered) == {torch.device("cpu")}
