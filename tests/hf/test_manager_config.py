"""Stock's `ContinuousBatchingConfig` and ours: each field is honoured, inert or refused by name."""

import queue

import pytest
import torch
import transformers
from helpers import generated_tokens
from transformers import ContinuousBatchingConfig, GenerationConfig

import lfm2_cb
from lfm2_cb import ContinuousBatchingGenerator
from lfm2_cb.engine.config import EngineConfig
from lfm2_cb.hf import manager as manager_module
from lfm2_cb.hf.manager_config import HONOURED, INERT, REFUSED, Lfm2CbBatchingConfig
from lfm2_cb.requests.options import UnsupportedOptionError

PROMPTS = [[5, 9, 13, 8], [7, 7, 4]]
GREEDY = GenerationConfig(do_sample=False, max_new_tokens=8, eos_token_id=-1)


def test_every_field_of_the_config_is_known():
    fields = vars(ContinuousBatchingConfig()).keys()
    assert fields == HONOURED | INERT | REFUSED.keys() and not HONOURED & INERT and not INERT & REFUSED.keys()


@pytest.mark.parametrize(
    "name, value",
    [
        ("use_async_batching", True),
        ("use_cuda_graph", True),
        ("q_padding_interval_size", 64),
        ("kv_padding_interval_size", 64),
        ("varlen_compile_config", transformers.CompileConfig()),
        ("decode_compile_config", transformers.CompileConfig()),
        ("default_compile_level", 1),
        ("scheduler_type", "prefill_first"),
        ("safety_margin", 0.5),
        ("cpu_offload_space", 1.0),
    ],
)
def test_what_cannot_be_honoured_is_refused_by_name(model, name, value):
    with pytest.raises(UnsupportedOptionError, match=name):
        model.init_continuous_batching(GREEDY, ContinuousBatchingConfig(**{name: value}))


def test_config_fields_are_honoured(model):
    def engine(**fields):
        manager = model.init_continuous_batching(GREEDY, ContinuousBatchingConfig(**fields))
        manager.warmup()
        assert manager.warmed_up
        return manager.batch_processor.engine

    assert engine().config.block_size == 64 and engine().config.max_batch_tokens == 4096
    assert engine(page_size=32).config.block_size == engine(block_size=32).config.block_size == 32
    assert engine(num_blocks=7).plan.num_blocks == 7
    assert engine(num_blocks=7, allow_block_sharing=False).plan.num_blocks == 7
    assert engine(max_batch_tokens=33, max_requests_per_batch=5).scheduler.max_sequences == 5
    assert not engine(allow_block_sharing=False).config.prefix_caching
    assert engine(max_memory_percent=0.001).config.cache_memory != engine().config.cache_memory
    with pytest.raises(TypeError, match="ContinuousBatchingConfig"):
        model.init_continuous_batching(GREEDY, {"page_size": 32})


def test_options_of_our_generator_go_with_our_config(model, stock):
    def engine(**fields):
        manager = model.init_continuous_batching(GREEDY, Lfm2CbBatchingConfig(**fields))
        manager.warmup()
        return manager.batch_processor.engine

    assert engine(kernels="torch").runner.native is None
    assert engine(policy="batch", drafting="auto").config.drafting == "auto"
    assert engine(max_step_seconds=0.5).config.max_step_seconds == 0.5
    low = engine(cache_dtype="int8", num_blocks=7, page_size=32)
    assert low.plan.num_blocks == 7 and low.plan.cache_dtype == "int8" and low.config.block_size == 32
    for wrong, message in (({"cache_dtype": "int3"}, "cache_dtype"), ({"kernels": "fast"}, "kernels")):
        with pytest.raises(ValueError, match=message):
            engine(**wrong)
    for wrong in (5, 0, -1, "half"):
        with pytest.raises(ValueError, match=r"max_memory_percent is a share"):
            engine(max_memory_percent=wrong)
    options = EngineConfig(
        max_batch_tokens=100,
        max_sequences=3,
        cache_memory=3 * 2**20,
        block_size=256,
        prefix_caching=False,
        kernels="torch",
    )
    manager = model.init_continuous_batching(GREEDY, Lfm2CbBatchingConfig.from_engine(options))
    manager.warmup()
    assert manager.batch_processor.engine.config == options
    assert engine(num_blocks=5, cache_memory="1GiB").plan.num_blocks == 5
    config = Lfm2CbBatchingConfig(drafting="auto", kernels="torch")
    answers = model.generate_batch(PROMPTS[:2], GREEDY, config)
    assert generated_tokens(answers) == generated_tokens(model.generate_batch(PROMPTS[:2], GREEDY))


def test_a_model_with_low_bit_weights_speaks_the_protocol():
    model = lfm2_cb.load_model(lfm2_cb.demo_model_path(), torch.float32, weights="int8")
    with ContinuousBatchingGenerator(model, cache_memory="16MiB") as generator:
        expected = [o.token_ids for o in generator.generate(PROMPTS[:2], GREEDY)]
    assert generated_tokens(model.generate_batch(PROMPTS[:2], GREEDY)) == expected


def test_a_full_queue_is_waited_for_and_then_refused(model, monkeypatch):
    monkeypatch.setattr(manager_module, "QUEUE_TIMEOUT", 0.05)
    manager = model.init_continuous_batching(GREEDY, ContinuousBatchingConfig(max_queue_size=2))
    names = [manager.add_request([5]), manager.add_request([6])]
    with pytest.raises(queue.Full, match="max_queue_size"):
        manager.add_request([7])
    manager.start()
    assert all(manager.get_result(name).error is None for name in names)
    assert manager.get_result(manager.add_request([7])).error is None
    manager.stop()
