"""The stock continuous-batching protocol: its names and types, stock's tokens, and nothing silent."""

import asyncio
import os
import random
import signal
import threading
import time

import pytest
import torch
import transformers
from helpers import generated_tokens, ours, random_prompts, random_stock, stock_greedy
from transformers import ContinuousBatchingConfig, GenerationConfig
from transformers.generation.continuous_batching import ContinuousBatchingManager, RequestStatus
from transformers.generation.continuous_batching.requests import GenerationOutput

import lfm2_cb
from lfm2_cb.engine.loop import ForkedError
from lfm2_cb.hf.manager import Lfm2CbManager
from lfm2_cb.requests.options import UnsupportedOptionError
from lfm2_cb.requests.prompts import PromptError
from lfm2_cb.scheduling.scheduler import RequestTooLarge

STOCK_CLASS = transformers.Lfm2ForCausalLM
PROMPTS = [[5, 9, 13, 8], [7, 7, 4]]
GREEDY = GenerationConfig(do_sample=False, max_new_tokens=8, eos_token_id=-1)
LONG = [3 + i % 50 for i in range(200)]  # three whole blocks of 64


@pytest.fixture
def manager(model):
    with model.continuous_batching_context_manager(generation_config=GREEDY) as started:
        yield started


@pytest.fixture
def enabled():
    lfm2_cb.enable()
    yield
    lfm2_cb.disable()


# generate_batch


def test_generate_batch_gives_stocks_tokens_in_stocks_types(model, stock):
    prompts = random_prompts(random.Random(0), 9, 90)
    outputs = model.generate_batch(prompts, generation_config=GREEDY, record_timestamps=True)
    assert generated_tokens(outputs) == [stock_greedy(stock, prompt, 8) for prompt in prompts]
    for output, prompt in zip(outputs.values(), prompts, strict=True):
        assert isinstance(output, GenerationOutput) and output.prompt_ids == prompt
        assert output.status is RequestStatus.FINISHED and output.is_finished() and output.error is None
        assert len(output.timestamps) == 8 and output.timestamps == sorted(output.timestamps)
        assert output.created_time <= output.lifespan[0] <= output.timestamps[0] <= output.lifespan[1]
    assert list(outputs) == [output.request_id for output in outputs.values()]


def test_generate_batch_takes_any_option_of_generate(model, stock):
    prompts = random_prompts(random.Random(1), 3, 20)
    outputs = model.generate_batch(prompts, GREEDY, max_new_tokens=[2, 5, 3], repetition_penalty=1.8)
    assert generated_tokens(outputs) == [
        stock_greedy(stock, prompt, limit, repetition_penalty=1.8)
        for prompt, limit in zip(prompts, [2, 5, 3], strict=True)
    ]


def test_generate_batch_raises_where_stock_logs_and_returns_nothing(model):
    assert model.generate_batch([]) == {}
    with pytest.raises(PromptError, match="prompt 1 is empty"):
        model.generate_batch([[5], []], GREEDY)
    with pytest.raises(PromptError, match="outside the vocabulary"):
        model.generate_batch([[5], [10**6]], GREEDY)
    with pytest.raises(UnsupportedOptionError, match="num_beams"):
        model.generate_batch([[5]], GREEDY, num_beams=2)
    with pytest.raises(UnsupportedOptionError, match="temprature"):
        model.generate_batch([[5]], GREEDY, temprature=0.5)
    with pytest.raises(RequestTooLarge):
        model.generate_batch([LONG], GREEDY, ContinuousBatchingConfig(num_blocks=1))


def test_a_request_that_fails_alone_has_its_error(model, stock):
    def fail_on_long(input_ids, scores):
        if input_ids.shape[1] > 10:
            raise ArithmeticError("too long for me")
        return scores

    outputs = model.generate_batch([[5] * 12, [6]], GREEDY, logits_processor=[fail_on_long])
    bad, good = outputs.values()
    assert (bad.status, bad.error) == (RequestStatus.FAILED, "too long for me")
    assert good.generated_tokens == stock_greedy(stock, [6], 8)


def test_returned_sequences_are_children_named_as_in_stock(model):
    config = GenerationConfig(do_sample=True, max_new_tokens=6, num_return_sequences=3, eos_token_id=-1)
    outputs = model.generate_batch([[5, 6], [7]], config, ContinuousBatchingConfig(seed=1))
    assert list(outputs) == [f"req_{i}{child}" for i in (0, 1) for child in ("__child#0", "__child#1", "")]
    assert len({tuple(t) for t in generated_tokens(outputs)}) == 6
    again = model.generate_batch([[5, 6], [7]], config, ContinuousBatchingConfig(seed=1))
    other = model.generate_batch([[5, 6], [7]], config, ContinuousBatchingConfig(seed=2))
    assert generated_tokens(again) == generated_tokens(outputs) != generated_tokens(other)


@torch.no_grad()
def test_logprobs_are_those_of_the_processed_distribution(model, stock):
    config = GenerationConfig(do_sample=True, max_new_tokens=5, temperature=0.7, top_k=10, eos_token_id=-1)
    (output,) = model.generate_batch([LONG[:9]], config, ContinuousBatchingConfig(return_logprobs=True)).values()
    logits = stock(torch.tensor([LONG[:9] + output.generated_tokens])).logits[0, 8:-1] / 0.7
    kept = logits.masked_fill(logits < logits.topk(10).values[:, -1:], -torch.inf).log_softmax(-1)
    expected = kept.gather(1, torch.tensor(output.generated_tokens).unsqueeze(1)).squeeze(1)
    torch.testing.assert_close(torch.tensor(output.logprobs), expected, atol=1e-4, rtol=0)


def test_generate_with_the_paged_cache_comes_here(model, stock):
    prompt = torch.tensor([[5, 6, 7]])
    sequences = model.generate(prompt, generation_config=GREEDY, cache_implementation="paged")
    assert sequences[0, 0, 3:].tolist() == stock_greedy(stock, [5, 6, 7], 8)


# Whose methods


def test_stock_models_get_the_protocol_by_enable_only(enabled):
    live = random_stock(12)
    expected = stock_greedy(live, [5, 6], 8)
    assert type(live) is STOCK_CLASS and generated_tokens(live.generate_batch([[5, 6]], GREEDY)) == [expected]
    with torch.no_grad():  # stock's own weights, changed in place
        live.model.layers[0].feed_forward.w1.weight.mul_(0.3)
        live.model.embed_tokens.weight.mul_(0.7)
    assert generated_tokens(live.generate_batch([[5, 6]], GREEDY)) == [stock_greedy(live, [5, 6], 8)]
    lfm2_cb.disable()
    assert "generate_batch" not in vars(STOCK_CLASS)
    with pytest.raises(ValueError, match="conv"):
        live.init_continuous_batching(generation_config=GREEDY).warmup()


def test_the_manager_is_stocks_in_type_and_surface(manager):
    assert isinstance(manager, ContinuousBatchingManager)
    public = {name for name in vars(ContinuousBatchingManager) if not name.startswith("_")}
    ours = vars(Lfm2CbManager).keys()
    assert public - {"switch_to_cb_friendly_attn"} <= ours  # none of it works by accident
    assert {"__iter__"} <= ours


# Requests and results


def test_streaming_outputs_are_cumulative(manager, stock):
    name = manager.add_request([5, 6], streaming=True, request_id="mine")
    outputs = list(manager.request_id_iter(name))
    expected = stock_greedy(stock, [5, 6], 8)
    assert [output.generated_tokens for output in outputs] == [expected[:i] for i in range(1, 9)]
    assert [output.status for output in outputs] == [RequestStatus.DECODING] * 7 + [RequestStatus.FINISHED]


def test_results_of_one_request_leave_those_of_others_alone(manager, stock):
    first, second, third = manager.add_requests([[5], [6], [7]], max_new_tokens=4)
    assert manager.get_result(third).generated_tokens == stock_greedy(stock, [7], 4)
    assert {manager.get_result(timeout=60).request_id for _ in range(2)} == {first, second}
    assert manager.get_result(timeout=0.01) is None and manager.get_result("nobody") is None


def test_iteration_ends_when_the_manager_is_stopped(model):
    manager = model.init_continuous_batching(generation_config=GREEDY)
    assert manager.get_result() is None and not manager.is_running() and manager.batch_processor is None
    names = manager.add_requests([[5], [6], [7]])  # before the start, as in stock
    manager.start()
    stopper = threading.Thread(target=manager.stop)
    stopper.start()
    assert {output.request_id for output in manager} == set(names)
    stopper.join()


def test_handlers_run_on_their_event_loop(manager, stock):
    async def listen():
        seen, done = [], asyncio.Event()

        def on_output(output):
            assert asyncio.get_running_loop() is loop
            seen.append(output)
            if output.is_finished():
                done.set()

        loop = asyncio.get_running_loop()
        early = manager.add_request([5, 6], streaming=True)
        while not manager.output_router._undelivered:  # some outputs come before anybody listens
            await asyncio.sleep(0.001)
        manager.register_result_handler(early, on_output)
        await asyncio.wait_for(done.wait(), 60)
        return seen

    seen = asyncio.run(listen())
    assert [len(output.generated_tokens) for output in seen] == list(range(1, 9))
    assert seen[-1].generated_tokens == stock_greedy(stock, [5, 6], 8)


def test_a_handler_that_fails_or_is_gone_harms_nobody(manager, stock):
    async def listen():
        failures, seen = [], asyncio.Queue()
        asyncio.get_running_loop().set_exception_handler(lambda _, context: failures.append(context["exception"]))
        bad, good = manager.add_requests([[5], [6]], max_new_tokens=20, streaming=True)
        manager.register_result_handler(bad, lambda output: 1 / 0)
        manager.register_result_handler(good, seen.put_nowait)
        while not (output := await asyncio.wait_for(seen.get(), 60)).is_finished():
            pass
        return failures, output

    failures, output = asyncio.run(listen())
    assert isinstance(failures[0], ZeroDivisionError) and output.generated_tokens == stock_greedy(stock, [6], 20)

    async def leave():
        manager.register_result_handler(manager.add_request([5], streaming=True, max_new_tokens=300), print)

    asyncio.run(leave())  # its event loop is closed while the request runs
    assert manager.get_result(manager.add_request([7])).generated_tokens == stock_greedy(stock, [7], 8)
    assert manager.is_running()


def test_a_cancelled_request_gets_a_last_output_and_gives_back_its_memory(manager, stock):
    name = manager.add_request(LONG, max_new_tokens=2000, streaming=True)
    kept = manager.add_request([5])
    assert manager.get_result(name).status is RequestStatus.DECODING
    assert name in manager.batch_processor.scheduler.active_requests
    manager.cancel_request(name)
    manager.cancel_request("nobody")
    *_, last = manager.request_id_iter(name)
    assert (last.status, last.error, last.finish_reason) == (RequestStatus.FAILED, "cancelled", "cancelled")
    assert 0 < len(last.generated_tokens) < 2000
    assert manager.get_result(kept).generated_tokens == stock_greedy(stock, [5], 8)
    scheduler = manager.batch_processor.engine.scheduler
    assert not manager.batch_processor.scheduler.has_pending_requests() and not scheduler.running
    scheduler.check_integrity()


def test_a_request_id_is_taken_while_its_request_runs(manager):
    manager.add_request([5], request_id="a", max_new_tokens=500)
    with pytest.raises(ValueError, match="a"):
        manager.add_request([6], request_id="a")
    manager.cancel_request("a")
    assert manager.get_result("a").error == "cancelled"
    manager.add_request([6], request_id="a", max_new_tokens=1)
    assert len(manager.get_result("a").generated_tokens) == 1


def test_requests_have_their_own_options(demo_stock, demo_tokenizer):
    model = ours(demo_stock)
    prompt = demo_tokenizer("It was")["input_ids"]
    with model.continuous_batching_context_manager(generation_config=GREEDY) as manager:
        stop = manager.add_request(prompt, max_new_tokens=50, stop_strings=["the"], tokenizer=demo_tokenizer)
        seeds = [manager.add_request(prompt, do_sample=True, seed=seed) for seed in (1, 2, 1)]
        kept = manager.add_request(prompt, logprobs=2)
        assert demo_tokenizer.decode(manager.get_result(stop).generated_tokens).rstrip().endswith("the")
        one, two, same = (manager.get_result(name).generated_tokens for name in seeds)
        assert one == same != two
        assert [len(entry.top) for entry in manager.get_result(kept).top_logprobs] == [2] * 8


# The thread


def test_stop_finishes_what_was_asked_and_hard_stop_fails_it(model, stock):
    manager = model.init_continuous_batching(generation_config=GREEDY)
    for hard in (False, True):
        manager.start()
        assert manager.is_running()
        name = manager.add_request([5], max_new_tokens=1500 if hard else 30)
        manager.stop(hard_stop=hard)
        assert not manager.is_running() and manager.batch_processor is None
        output = manager.get_result(name) or pytest.fail("no last output")
        if hard:
            assert output.status is RequestStatus.FAILED and "stopped" in output.error
        else:
            assert output.generated_tokens == stock_greedy(stock, [5], 30)
    with pytest.raises(RuntimeError, match="stopping"):
        manager.add_request([5])
    manager.destroy()
    manager.destroy()
    with pytest.raises(RuntimeError, match="destroyed"):
        manager.start()


def test_stop_without_waiting_leaves_requests_running_and_cancellable(model, stock):
    manager = model.init_continuous_batching(generation_config=GREEDY)
    manager.start()
    long, short = manager.add_requests([[5], [6]], max_new_tokens=[3000, 4])
    manager.stop(block=False)
    assert manager.get_result(short).generated_tokens == stock_greedy(stock, [6], 4) and manager.is_running()
    manager.cancel_request(long)
    assert manager.get_result(long).error == "cancelled"
    manager.stop()
    assert not manager.is_running() and manager.batch_processor is None


def test_an_exception_in_the_context_does_not_wait_for_the_requests(model):
    with (
        pytest.raises(ZeroDivisionError),
        model.continuous_batching_context_manager(generation_config=GREEDY) as manager,
    ):
        name = manager.add_request([5], max_new_tokens=3000)
        _ = 1 / 0
    assert manager.get_result(name).status is RequestStatus.FAILED


def test_a_fatal_error_is_told_to_everybody(model, monkeypatch):
    with model.continuous_batching_context_manager(generation_config=GREEDY) as manager:
        engine = manager.batch_processor.engine
        monkeypatch.setattr(engine, "step", lambda **_: 1 / 0)
        name = manager.add_request([5])
        assert "division" in manager.get_result(name).error
        assert isinstance(manager.background_thread_status.fatal_error, ZeroDivisionError)
        with pytest.raises(RuntimeError, match="died"):
            manager.add_request([5])
    monkeypatch.undo()
    manager = model.init_continuous_batching(generation_config=GREEDY)
    monkeypatch.setattr("lfm2_cb.engine.engine.Engine.step", lambda self, **_: 1 / 0)
    outputs = model.generate_batch([[5]], GREEDY, warmup=False)
    assert "division" in outputs["req_0"].error


def test_a_persistent_manager_serves_the_next_call(model, stock):
    cb = ContinuousBatchingConfig(max_batch_tokens=64)
    model.generate_batch([[5]], GREEDY, cb, persistent_manager=True)
    kept = model.init_continuous_batching(generation_config=GREEDY, continuous_batching_config=cb)
    engine = kept.batch_processor.engine
    config = GenerationConfig(do_sample=False, max_new_tokens=3, eos_token_id=-1)
    outputs = model.generate_batch([[6]], config, cb, persistent_manager=True)  # its own generation config
    assert generated_tokens(outputs) == [stock_greedy(stock, [6], 3)]
    assert kept.batch_processor.engine is engine and model._cached_continuous_batching_manager is kept
    other = model.init_continuous_batching(GREEDY, ContinuousBatchingConfig(max_batch_tokens=32))
    assert other is not kept and not hasattr(model, "_cached_continuous_batching_manager")
    model.generate_batch([[5]], GREEDY, cb, persistent_manager=True)
    model.destroy_cached_continuous_batching_manager()
    assert not hasattr(model, "_cached_continuous_batching_manager")


def test_the_models_training_mode_is_put_back():
    model = ours(random_stock(13)).train()
    model.model.layers[0].eval()
    before = [module.training for module in model.modules()]
    with model.continuous_batching_context_manager(generation_config=GREEDY) as manager:
        manager.get_result(manager.add_request([5]))
        assert not model.training
    assert [module.training for module in model.modules()] == before and any(before)


# Weights that change in place


def change(stock, through_data: bool = False) -> None:
    """In place, as an optimiser does, or behind autograd's back; `ours(stock)` has the same storage."""
    with torch.no_grad():
        for parameter in stock.parameters():
            (parameter.data if through_data else parameter).add_(0.5 * parameter.roll(1, 0))


def test_new_weights_are_used_and_nothing_computed_with_the_old():
    stock = random_stock(14)
    model = ours(stock)
    model.generate_batch([LONG], GREEDY, persistent_manager=True)
    change(stock, through_data=True)  # between two sessions
    outputs = model.generate_batch([LONG], GREEDY, persistent_manager=True)
    assert generated_tokens(outputs) == [stock_greedy(stock, LONG, 8)]
    model.destroy_cached_continuous_batching_manager()
    with model.continuous_batching_context_manager(generation_config=GREEDY) as manager:
        seen = [manager.get_result(manager.add_request(LONG)).generated_tokens]
        change(model)  # while nothing runs
        seen.append(manager.get_result(manager.add_request(LONG)).generated_tokens)
        assert seen[-1] == stock_greedy(stock, LONG, 8)
        with manager.pause():
            change(stock, through_data=True)
        assert manager.get_result(manager.add_request(LONG)).generated_tokens == stock_greedy(stock, LONG, 8)
        assert seen[0] != seen[1]


def test_pause_holds_requests_under_way_and_loses_none():
    stock = random_stock(15)
    model = ours(stock)
    with model.continuous_batching_context_manager(generation_config=GREEDY) as manager:
        name = manager.add_request(LONG[:40], streaming=True, max_new_tokens=60)
        first = manager.get_result(name)
        with manager.pause(), manager.pause():
            change(stock, through_data=True)
            held = len(list(iter(lambda: manager.get_result(name, timeout=0.2), None)))
            with pytest.raises(RuntimeError, match="pause"):
                manager.stop()
        *_, last = manager.request_id_iter(name)
        assert len(last.generated_tokens) == 60 and len(first.generated_tokens) + held < 60
        whole = LONG[:40] + last.generated_tokens  # partly the old weights': none of it may be taken up again
        output = manager.get_result(manager.add_request(whole))
        assert output.generated_tokens == stock_greedy(stock, whole, 8) and output.num_cached_tokens == 0
    with pytest.raises(RuntimeError, match="no generation loop"), manager.pause():
        pass


# DraftTracker, through every door of the protocol


@pytest.mark.parametrize("door", ["add_request", "generate_batch", "generation_config"])
def test_prompt_lookup_drafts_and_changes_no_token(model, stock, door):
    prompt = [5, 9, 13, 8] * 12
    expected = stock_greedy(stock, prompt, 60)
    drafting = {"prompt_lookup_num_tokens": 8}
    with model.continuous_batching_context_manager(generation_config=GREEDY, persistent_manager=True) as manager:
        speculation = manager.batch_processor.engine.speculation
        if door == "add_request":
            output = manager.get_result(manager.add_request(prompt, max_new_tokens=60, **drafting))
        elif door == "generation_config":
            own = GenerationConfig(do_sample=False, max_new_tokens=60, eos_token_id=-1, **drafting)
            output = manager.get_result(manager.add_request(prompt, generation_config=own))
    if door == "generate_batch":
        (output,) = model.generate_batch(
            [prompt], GREEDY, persistent_manager=True, max_new_tokens=60, **drafting
        ).values()
    model.destroy_cached_continuous_batching_manager()
    assert output.generated_tokens == expected and speculation.num_drafted > 0


def test_prompt_lookup_drafts_as_transformers_serve_asks(model, stock, demo_tokenizer):
    serving = pytest.importorskip("transformers.cli.serving.utils")
    prompt = [5, 9, 13, 8] * 12
    config = GenerationConfig(do_sample=False, max_new_tokens=60, eos_token_id=-1, prompt_lookup_num_tokens=8)
    door = serving.CBGenerateManager()
    door.init_cb(model, config)
    speculation = door._cb.batch_processor.engine.speculation
    call = door.generate_non_streaming(model, demo_tokenizer, {"input_ids": prompt}, config, "one")
    _, _, tokens = asyncio.run(call)
    door.stop()
    assert list(tokens) == stock_greedy(stock, prompt, 60) and speculation.num_drafted > 0


def test_an_assistant_drafts_through_the_protocol(model, stock):
    manager = model.init_continuous_batching(generation_config=GREEDY)
    manager.start()
    speculation = manager.batch_processor.engine.speculation
    output = manager.get_result(manager.add_request([5, 6], max_new_tokens=40, assistant_model=stock))
    manager.stop()
    assert output.generated_tokens == stock_greedy(stock, [5, 6], 40) and speculation.num_accepted > 0


def test_a_criterion_that_waits_for_its_own_manager_is_refused(manager):
    name = manager.add_request([5], stopping_criteria=[lambda *_: manager.get_result() is None])
    assert "inside a step" in manager.get_result(name).error


def test_a_forked_child_is_refused_at_once(manager):
    manager.get_result(manager.add_request([5]))
    with manager._changed:  # a fork may find the lock taken, by a thread that the child does not have
        read, write = os.pipe()
        if (child := os.fork()) == 0:
            said = []
            for call in (lambda: manager.add_request([5]), manager.get_result):
                try:
                    call()
                except ForkedError:
                    said.append("refused")
            os.write(write, " ".join(said).encode())
            os._exit(0)
    os.close(write)
    deadline = time.monotonic() + 60
    while os.waitpid(child, os.WNOHANG)[0] == 0:
        if time.monotonic() > deadline:
            os.kill(child, signal.SIGKILL)
        time.sleep(0.01)
    with os.fdopen(read, "rb") as pipe:
        assert pipe.read() == b"refused refused"


def test_a_model_that_moves_while_the_manager_runs_is_refused():
    model = ours(random_stock(11))
    with model.continuous_batching_context_manager(generation_config=GREEDY) as manager:
        manager.get_result(manager.add_request([5]))
        model.to(torch.bfloat16)
        with pytest.raises(RuntimeError, match="moved or replaced"):
            manager.add_request([5])
        model.to(torch.float32)
