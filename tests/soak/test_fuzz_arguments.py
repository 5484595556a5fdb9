"""ContinuousBatchingGenerator with arguments out of hypothesis: an answer or a documented error, and usable after."""

import os

import pytest
import torch
from helpers import random_stock, stock_greedy
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from transformers import GenerationConfig

from lfm2_cb import ContinuousBatchingGenerator
from lfm2_cb.requests.options import HONOURED, INERT, LEFT_TO_STOCK

#: what `generate()` and the constructor say they raise before anything runs (all of ours are ValueErrors)
DOCUMENTED = (ValueError,)
EXAMPLES = int(os.environ.get("LFM2_CB_FUZZ_EXAMPLES", 100))
RELAXED = settings(max_examples=EXAMPLES, deadline=None, suppress_health_check=list(HealthCheck))

numbers = st.one_of(st.integers(-3, 70), st.sampled_from([10**6, 2**70, -(2**70)]), st.floats(), st.booleans())
values = st.recursive(
    numbers | st.none() | st.text(max_size=4) | st.binary(max_size=3),
    lambda inner: (
        st.lists(inner, max_size=3) | st.tuples(inner) | st.dictionaries(st.text(max_size=2), inner, max_size=2)
    ),
    max_leaves=5,
)
likely = {
    "max_new_tokens": st.integers(1, 6),
    "do_sample": st.booleans(),
    "temperature": st.floats(0.1, 3),
    "top_k": st.integers(1, 60),
    "top_p": st.floats(0.01, 1),
    "num_return_sequences": st.integers(1, 3),
    "seed": st.integers(0, 9),
    "eos_token_id": st.lists(st.integers(0, 59), max_size=3),
    "repetition_penalty": st.floats(0.5, 2),
    "logprobs": st.integers(0, 4),
}
names = st.sampled_from(
    sorted(HONOURED | LEFT_TO_STOCK | INERT | {*likely, "logits_processor", "stopping_criteria", "x"})
)
prompts = st.one_of(
    st.lists(st.lists(st.integers(3, 59), min_size=1, max_size=12), max_size=3),
    st.lists(values, max_size=3),
    values,
    st.lists(st.integers(0, 59), min_size=1, max_size=6).map(lambda ids: torch.tensor([ids])),
)


@pytest.fixture(scope="module")
def stock():
    return random_stock(41, conv_bias=False, max_position_embeddings=128)


@pytest.fixture(scope="module")
def generator(stock):
    with ContinuousBatchingGenerator(stock, cache_memory="2MiB", block_size=4, max_sequences=4) as generator:
        yield generator


def assert_usable(generator, stock):
    (output,) = generator.generate([[5, 6, 7]], max_new_tokens=3, do_sample=False, eos_token_id=None)
    assert output.token_ids == stock_greedy(stock, [5, 6, 7], 3)
    assert not generator.engine.has_unfinished and not generator.loop._submissions
    generator.engine.scheduler.cache.check_integrity([])


@RELAXED
@given(st.data())
def test_generate(generator, stock, data):
    prompt = data.draw(prompts)
    options = {"max_new_tokens": 4}
    for name in data.draw(st.lists(names, max_size=4, unique=True)):
        sensible = name in likely and data.draw(st.integers(0, 3)) > 0
        options[name] = data.draw(likely[name] if sensible else values)
    if isinstance(options.get("num_return_sequences"), int) and options["num_return_sequences"] > 100:
        del options["num_return_sequences"]  # sensible or not, it is how many the caller wants
    if data.draw(st.booleans()) and "x" not in options:
        try:
            config = GenerationConfig(**{k: v for k, v in options.items() if k in HONOURED})
        except Exception:  # stock's own door
            return
        options = {"generation_config": config, **{k: v for k, v in options.items() if k not in HONOURED}}
    try:
        outputs = generator.generate(prompt, **options)
    except DOCUMENTED:
        pass
    except RuntimeError as error:  # of a tensor: its request has failed
        assert isinstance(prompt, torch.Tensor) and "generation failed" in str(error)
    else:
        for output in outputs if isinstance(outputs, list) else []:
            assert (output.finish_reason == "error") == (output.error is not None)
    assert_usable(generator, stock)


@RELAXED
@given(
    options=st.fixed_dictionaries(
        {},
        optional={
            "max_batch_tokens": st.integers(1, 40) | values,
            "max_sequences": st.integers(1, 9) | values,
            "cache_memory": st.sampled_from(["64KB", "1MiB", 3 * 10**5, "2 MB"]) | values,
            "block_size": st.integers(1, 40) | values,
            "seed": st.integers(0, 5) | values,
            "prefix_caching": st.booleans() | values,
            "policy": st.sampled_from(["fcfs"]) | values,
        },
    )
)
def test_the_constructor(stock, options):
    try:
        generator = ContinuousBatchingGenerator(stock, **{"cache_memory": "1MiB", **options})
    except (*DOCUMENTED, MemoryError):
        return
    with generator:
        assert_usable(generator, stock)
