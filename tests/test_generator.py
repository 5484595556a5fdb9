"""ContinuousBatchingGenerator: shapes, options, streams, handles, and what it does with bad input."""

import copy
import random
import threading

import pytest
import torch
import transformers
from datasets import Dataset
from helpers import demo_prompts, random_prompts, random_stock, stock_greedy

import lfm2_cb
from lfm2_cb import ContinuousBatchingGenerator
from lfm2_cb.engine.config import parse_bytes
from lfm2_cb.engine.loop import ClosedError
from lfm2_cb.model.hybrid_cache import CacheTooSmall
from lfm2_cb.ops.native import NativeUnavailable
from lfm2_cb.requests.options import UnsupportedOptionError
from lfm2_cb.requests.prompts import PromptError
from lfm2_cb.scheduling.scheduler import RequestTooLarge

GREEDY = {"do_sample": False, "max_new_tokens": 8}


@pytest.fixture(scope="module")
def stock():
    return random_stock(41, conv_bias=False)


@pytest.fixture
def generator(stock):
    with ContinuousBatchingGenerator(stock, cache_memory="4MiB", block_size=8) as generator:
        yield generator
        assert not generator.engine.has_unfinished
        generator.engine.scheduler.cache.check_integrity([])


@pytest.fixture
def demo(demo_stock, demo_tokenizer):
    with ContinuousBatchingGenerator(demo_stock, demo_tokenizer, cache_memory="64MiB") as generator:
        yield generator
        generator.engine.scheduler.cache.check_integrity([])


def left_padded(prompts: list[list[int]], pad: int = 0):
    width = max(map(len, prompts))
    ids = torch.full((len(prompts), width), pad)
    mask = torch.zeros_like(ids)
    for row, prompt in enumerate(prompts):
        ids[row, width - len(prompt) :] = torch.tensor(prompt)
        mask[row, width - len(prompt) :] = 1
    return ids, mask


# Tensors as in stock generate()


@pytest.mark.parametrize(
    "options", [{}, {"eos_token_id": [17, 23]}, {"max_length": 20, "max_new_tokens": None}], ids=str
)
def test_tensor_in_tensor_out_equals_stock(stock, generator, options):
    prompts = random_prompts(random.Random(0), 6, 12)
    ids, mask = left_padded(prompts)
    kwargs = {**GREEDY, "pad_token_id": 0, **options}
    expected = stock.generate(ids, attention_mask=mask, **kwargs)
    assert torch.equal(generator.generate(ids, attention_mask=mask, **kwargs), expected)
    assert torch.equal(generator.generate(ids, **kwargs), expected)  # the mask inferred as stock infers it


def test_num_return_sequences_has_stocks_shape_and_forks_differ(stock, generator):
    ids, mask = left_padded(random_prompts(random.Random(1), 3, 9))
    out = generator.generate(
        ids, attention_mask=mask, do_sample=True, num_return_sequences=4, max_new_tokens=8, eos_token_id=None, seed=1
    )
    assert out.shape == (12, ids.shape[1] + 8) and torch.equal(out[:, : ids.shape[1]], ids.repeat_interleave(4, 0))
    assert len({tuple(row) for row in out[:4].tolist()}) > 1
    again = generator.generate(
        ids, attention_mask=mask, do_sample=True, num_return_sequences=4, max_new_tokens=8, eos_token_id=None, seed=1
    )
    assert torch.equal(out, again)


def test_right_padding_is_refused(generator):
    with pytest.raises(PromptError, match="pad on the left"):
        generator.generate(torch.tensor([[5, 6, 0]]), attention_mask=torch.tensor([[1, 1, 0]]))


# Lists


def test_every_kind_of_prompt(demo, demo_tokenizer):
    texts = demo_prompts(3)
    by_text = demo.generate(texts, **GREEDY)
    by_ids = demo.generate([demo_tokenizer(t)["input_ids"] for t in texts], **GREEDY)
    by_column = demo.generate(Dataset.from_dict({"text": texts})["text"], **GREEDY)
    assert by_text[0].text and [o.token_ids for o in by_text] == [o.token_ids for o in by_ids]
    assert [o.text for o in by_column] == [o.text for o in by_text]
    assert demo.generate(texts[0], **GREEDY)[0].token_ids == by_text[0].token_ids
    chat = [{"role": "user", "content": "Continue the story.\nIt was"}]
    (one,) = demo.generate(chat, **GREEDY)
    two = demo.generate([chat, chat], **GREEDY)
    assert one.token_ids == two[1].token_ids
    rendered = demo_tokenizer.apply_chat_template(chat, add_generation_prompt=True, return_dict=True)["input_ids"]
    assert one.prompt_token_ids == rendered
    assert demo.generate([]) == []


def test_max_new_tokens_one_per_prompt(stock, generator):
    prompts = random_prompts(random.Random(2), 5, 12)
    outputs = generator.generate(prompts, max_new_tokens=[1, 2, 3, 4, 5], do_sample=False, eos_token_id=None)
    for n, prompt, output in zip(range(1, 6), prompts, outputs, strict=True):
        assert output.token_ids == stock_greedy(stock, prompt, n) and output.finish_reason == "length"


def test_the_end_of_sequence_token_stops_and_is_kept(stock, generator):
    prompt = [5, 9, 4, 30]
    tokens = stock_greedy(stock, prompt, 10)
    eos = tokens[4]
    (output,) = generator.generate([prompt], max_new_tokens=10, do_sample=False, eos_token_id=[eos])
    assert output.finish_reason == "stop" and output.token_ids == tokens[: tokens.index(eos) + 1]
    expected = stock_greedy(stock, prompt, 10, eos_token_id=eos, min_new_tokens=7)
    (longer,) = generator.generate([prompt], max_new_tokens=10, do_sample=False, eos_token_id=eos, min_new_tokens=7)
    assert longer.token_ids == expected and len(expected) >= 7


def test_defaults_come_from_the_models_generation_config(stock):
    stock.generation_config.max_new_tokens = 3
    try:
        with ContinuousBatchingGenerator(stock, cache_memory="4MiB") as generator:
            (output,) = generator.generate([[5, 6, 7]], eos_token_id=None)
    finally:
        stock.generation_config.max_new_tokens = None
    assert len(output.token_ids) == 3


def test_metrics_are_filled(generator):
    (output,) = generator.generate([[5] * 20], **GREEDY, eos_token_id=None)
    m = output.metrics
    assert m.arrival_time <= m.first_scheduled_time <= m.first_token_time <= m.finish_time
    assert m.time_to_first_token >= 0


# Streams and handles


def test_stream_hands_out_every_token_once_and_text_that_adds_up(demo):
    texts = demo_prompts(4)
    outputs = demo.generate(texts, **GREEDY)
    tokens, text, ended = [[] for _ in texts], [""] * 4, set()
    for event in demo.stream(texts, **GREEDY):
        assert event.index not in ended
        tokens[event.index] += event.token_ids
        text[event.index] += event.text
        if event.finished:
            ended.add(event.index)
            assert event.finish_reason in ("stop", "length")
    assert tokens == [o.token_ids for o in outputs] and text == [o.text for o in outputs]


def test_leaving_a_stream_cancels_the_rest(demo):
    for _ in demo.stream(demo_prompts(5), do_sample=False, max_new_tokens=500):
        break
    import gc

    gc.collect()
    assert not demo.engine.has_unfinished and not demo.engine.scheduler.running


def test_submit_runs_in_the_background_and_can_be_cancelled(stock, generator):
    prompts = random_prompts(random.Random(3), 6, 10)
    handles = [generator.submit(p, max_new_tokens=6, do_sample=False, eos_token_id=None) for p in prompts]
    for prompt, handle in zip(prompts, handles, strict=True):
        assert handle.result(60).token_ids == stock_greedy(stock, prompt, 6) and handle.done()
    endless = generator.submit(prompts[0], max_new_tokens=3000, eos_token_id=None)
    with pytest.raises(TimeoutError):
        endless.result(0.01)
    endless.cancel()
    assert endless.result(60).finish_reason == "cancelled"


def test_calls_from_many_threads_share_the_engine(stock, generator):
    rng = random.Random(4)
    work = [random_prompts(rng, 4, 10) for _ in range(6)]
    results: list = [None] * 6

    def call(i):
        results[i] = generator.generate(work[i], max_new_tokens=7, do_sample=False, eos_token_id=None)

    threads = [threading.Thread(target=call, args=(i,)) for i in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
        assert not thread.is_alive()
    for prompts, outputs in zip(work, results, strict=True):
        assert [o.token_ids for o in outputs] == [stock_greedy(stock, p, 7) for p in prompts]


def test_streamer_sees_what_stocks_would(demo, demo_stock):
    class Recorder(transformers.generation.BaseStreamer):
        def __init__(self):
            self.seen = []

        def put(self, value):
            self.seen.append(value.tolist())

        def end(self):
            self.seen.append("end")

    prompt = demo_prompts(2)[1]
    expected, got = Recorder(), Recorder()
    ids = demo.tokenizer(prompt, return_tensors="pt")["input_ids"]
    demo_stock.generate(ids, streamer=expected, **GREEDY)
    demo.generate([prompt], streamer=got, **GREEDY)
    assert got.seen == expected.seen
    with pytest.raises(ValueError, match="streamer"):
        demo.generate([prompt, prompt], streamer=got, **GREEDY)


# Bad input: one clear error, and the generator serves the next request


@pytest.mark.parametrize(
    "prompts, kwargs, error, message",
    [
        ([[]], {}, PromptError, "prompt 0 is empty"),
        ([[5], []], {}, PromptError, "prompt 1 is empty"),
        ([[5, 10**6]], {}, PromptError, "token id 1000000, outside the vocabulary"),
        ([[5, -1]], {}, PromptError, "token id -1"),
        ([[5] * 5000], {}, PromptError, "max_position_embeddings"),
        ([[5] * 4000], {"max_new_tokens": 1000}, ValueError, "4096 positions"),
        (["text"], {}, PromptError, "tokenizer"),
        (3, {}, PromptError, "got int"),
        ([3.5], {}, PromptError, "prompt 0 must be"),
        ([None], {}, PromptError, "NoneType"),
        ({"a": 1}, {}, PromptError, "got dict"),
        ([[5]], {"max_new_tokens": 0}, ValueError, "max_new_tokens"),
        ([[5]], {"max_new_tokens": [1, 2]}, ValueError, "2 entries for 1 prompts"),
        ([[5]], {"max_new_token": 3}, UnsupportedOptionError, "max_new_token"),
        ([[5]], {"penalty_alpha": 0.6}, UnsupportedOptionError, "penalty_alpha"),
        ([[5]], {"generation_config": {"do_sample": True}}, TypeError, "GenerationConfig"),
        ([[5]], {"temperature": -1.0, "do_sample": True}, ValueError, "temperature"),
        ([[5] * 9], {"max_length": 4}, ValueError, "max_length"),
        (torch.tensor([[5.0]]), {}, ValueError, "integers"),
        (torch.tensor([5]), {}, ValueError, r"\[batch, length\]"),
        ([[5]], {"attention_mask": torch.ones(1, 2)}, ValueError, "attention_mask"),
    ],
)
def test_bad_input_gives_one_clear_error(stock, generator, prompts, kwargs, error, message):
    with pytest.raises(error, match=message):
        generator.generate(prompts, **kwargs)
    (output,) = generator.generate([[5, 6]], max_new_tokens=2, do_sample=False, eos_token_id=None)
    assert output.token_ids == stock_greedy(stock, [5, 6], 2)


def test_a_request_beyond_the_budget_is_refused_with_the_numbers(stock):
    with ContinuousBatchingGenerator(stock, cache_memory="300KB", block_size=16, max_sequences=4) as generator:
        there = generator.engine.plan.num_blocks * 16
        with pytest.raises(RequestTooLarge, match=rf"prompt of {there} tokens .* cache_memory holds .*{there} tokens"):
            generator.generate([[5, 6], [5] * there], max_new_tokens=50, eos_token_id=None)
        assert not generator.engine.has_unfinished  # none of the call's prompts was queued
        assert len(generator.generate([[5, 6]], max_new_tokens=2, eos_token_id=None)[0].token_ids) == 2
    with pytest.raises(CacheTooSmall, match="too small"):
        ContinuousBatchingGenerator(stock, cache_memory=100)


@pytest.mark.parametrize("name", ["max_batch_tokens", "max_sequences", "block_size"])
@pytest.mark.parametrize("value", [0, -1, 2.5, "4"])
def test_limits_are_checked(stock, name, value):
    with pytest.raises(ValueError, match=name):
        ContinuousBatchingGenerator(stock, **{name: value})


def test_a_closed_generator_says_so(stock):
    generator = ContinuousBatchingGenerator(stock, cache_memory="4MiB")
    handle = generator.submit([5, 6], max_new_tokens=3000, eos_token_id=None)
    generator.close()
    generator.close()
    assert handle.result(10).finish_reason in ("cancelled", "length")
    with pytest.raises(ClosedError):
        generator.generate([[5]])


def test_an_exception_in_a_streamer_ends_its_call_only(stock, generator):
    class Broken(transformers.generation.BaseStreamer):
        def put(self, value):
            if value.numel() == 1:
                raise OSError("my disk")

        def end(self): ...

    with pytest.raises(OSError, match="my disk"):
        generator.generate([[5, 6]], streamer=Broken(), **GREEDY)
    assert not generator.engine.has_unfinished
    assert len(generator.generate([[5, 6]], **GREEDY, eos_token_id=None)[0].token_ids) == 8


def test_nan_logits_end_their_request_alone():
    stock = random_stock(42, tie_word_embeddings=False)
    expected = stock_greedy(stock, [5, 6], 3)
    assert 9 not in expected
    with torch.no_grad():
        stock.get_input_embeddings().weight[9] = float("nan")
    with ContinuousBatchingGenerator(stock, cache_memory="4MiB") as generator:
        bad, good = generator.generate([[5, 9], [5, 6]], max_new_tokens=3, do_sample=False, eos_token_id=None)
        sampled, _ = generator.generate([[5, 9], [5, 6]], max_new_tokens=3, do_sample=True, eos_token_id=None)
    assert bad.finish_reason == sampled.finish_reason == "error"
    assert "logits" in str(bad.error) and "logits" in str(sampled.error)
    assert good.finish_reason == "length" and good.token_ids == expected


def test_what_is_no_lfm2_is_refused():
    with pytest.raises(TypeError, match="got Linear"):
        ContinuousBatchingGenerator(torch.nn.Linear(2, 2))
    with pytest.raises(ValueError, match="dynamic"):
        ContinuousBatchingGenerator(
            random_stock(5, rope_parameters={"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0})
        )


def test_a_path_loads_model_and_tokenizer():
    with ContinuousBatchingGenerator(lfm2_cb.demo_model_path(), cache_memory="64MiB") as generator:
        assert generator.model.dtype == torch.bfloat16  # the checkpoint's
        assert generator.generate(["It was"], **GREEDY)[0].text


@pytest.mark.parametrize("kernels", ["native", "torch"])
def test_slow_bf16_is_warned_of_where_torch_computes_it(stock, monkeypatch, kernels):
    said = []
    monkeypatch.setattr("lfm2_cb.generator.default_dtype", lambda: torch.float32)
    monkeypatch.setattr("lfm2_cb.generator.logger.warning_once", said.append)
    model = copy.deepcopy(stock).to(torch.bfloat16)
    try:
        ContinuousBatchingGenerator(model, cache_memory="4MiB", kernels=kernels).close()
    except NativeUnavailable:
        pytest.skip("no C++ compiler")
    assert len(said) == (kernels == "torch")


def test_memory_does_not_grow_with_requests_served(generator):
    rng = random.Random(5)
    for _ in range(5):
        generator.generate(random_prompts(rng, 30, 10), max_new_tokens=2)
    assert not generator.loop._submissions and len(generator.engine._inbox) == 0
    assert generator.engine.scheduler.num_waiting == 0
    assert len(generator.engine.scheduler.policy._heap) == 0


@pytest.mark.parametrize(
    "text, expected",
    [(5, 5), ("2GiB", 2**31), ("512 MiB", 2**29), ("1.5GB", 1_500_000_000), ("10kb", 10_000), ("7", 7)],
)
def test_parse_bytes(text, expected):
    assert parse_bytes(text) == expected


@pytest.mark.parametrize("text", ["", "GiB", "-1GB", "2 gigs", None, True, 1.5])
def test_parse_bytes_refuses(text):
    with pytest.raises(ValueError, match="cache_memory"):
        parse_bytes(text)


def test_priority_and_use_prefix_cache_are_per_prompt(demo_stock):
    prompt = list(range(10, 60))
    with ContinuousBatchingGenerator(demo_stock, cache_memory="32MiB", block_size=8, max_sequences=1) as generator:
        greedy = {"do_sample": False, "max_new_tokens": 3}
        generator.generate([prompt], **greedy)
        on, off = generator.generate([prompt, prompt], use_prefix_cache=[True, False], **greedy)
        assert (on.metrics.num_cached_tokens, off.metrics.num_cached_tokens) == (48, 0)
        assert on.token_ids == off.token_ids
        order = [e.index for e in generator.stream([prompt] * 4, priority=[0, 3, -1, 3], **greedy) if e.finished]
        assert order == [1, 3, 0, 2]
        for kwargs, message in (
            ({"priority": [1]}, "priority has 1 entries for 2 prompts"),
            ({"use_prefix_cache": [True] * 3}, "use_prefix_cache has 3 entries for 2 prompts"),
            ({"priority": "high"}, "priority must be"),
        ):
            with pytest.raises((TypeError, ValueError), match=message):
                generator.generate([prompt, prompt], **kwargs, **greedy)


def test_submit_takes_options_as_lists_of_one(demo_stock):
    with ContinuousBatchingGenerator(demo_stock, cache_memory="32MiB") as generator:
        handles = [generator.submit([5, 6, 7], max_new_tokens=[n], priority=[n]) for n in (2, 4)]
        assert [len(handle.result(60).token_ids) for handle in handles] == [2, 4]
