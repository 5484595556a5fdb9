"""What the world throws at the engine: each fault has one stated outcome, and the generator is usable after."""

import copy
import os
import pickle
import random
import signal
import subprocess
import sys
import textwrap
import threading
import time
from typing import NamedTuple

import pytest
import torch
from helpers import random_prompts, random_stock, stock_greedy
from transformers import GenerationConfig

from lfm2_cb import ContinuousBatchingGenerator
from lfm2_cb.engine.loop import BrokenError, ForkedError
from lfm2_cb.hf.manager_config import Lfm2CbBatchingConfig
from lfm2_cb.hf.methods import init_continuous_batching
from lfm2_cb.loading import as_lfm2_cb

GREEDY = {"do_sample": False, "eos_token_id": None}
SECONDS = 60  # that nothing here takes: a wait this long is a hang


@pytest.fixture(scope="module")
def stock():
    return random_stock(41, conv_bias=False)


@pytest.fixture
def generator(stock):
    with ContinuousBatchingGenerator(stock, cache_memory="4MiB", block_size=8) as generator:
        yield generator
        assert not generator.engine.has_unfinished and not generator.loop._submissions
        generator.engine.scheduler.cache.check_integrity([])


class Said(NamedTuple):
    """What either face says of a prompt."""

    token_ids: list[int]
    finish_reason: str
    error: str


class GeneratorFace:
    name = "generator"

    def __init__(self, model, **options):
        self.generator = ContinuousBatchingGenerator(model, **options)
        self.model, self.engine, self.loop = self.generator.model, self.generator.engine, self.generator.loop

    def generate(self, prompts, **options):
        outputs = self.generator.generate(prompts, **options)
        return [Said(o.token_ids, o.finish_reason, "" if o.error is None else str(o.error)) for o in outputs]

    def wait(self):
        self.loop.wait(bool)

    def close(self):
        self.generator.close()


class ManagerFace:
    """Stock's protocol: a thread of its own drives."""

    name = "manager"

    def __init__(self, model, **options):
        self.model = as_lfm2_cb(model)
        self.manager = init_continuous_batching(self.model, GenerationConfig(), Lfm2CbBatchingConfig(**options))
        self.manager.start()
        self.engine, self.loop = self.manager._generator.engine, self.manager._generator.loop

    def generate(self, prompts, **options):
        if options.get("eos_token_id", 0) is None:  # here None is as if not given, as in stock
            options["eos_token_id"] = -1
        names = self.manager.add_requests(prompts, **options)
        outputs = [self.manager.get_result(name, SECONDS) for name in names]
        return [Said(o.generated_tokens, o.finish_reason, o.error or "") for o in outputs]

    def wait(self):
        self.manager.get_result()

    def close(self):
        self.manager.stop()


FACES = {face.name: face for face in (GeneratorFace, ManagerFace)}


@pytest.fixture(params=FACES)
def make_face(stock, request):
    """Makes the generator, or the manager, over a model."""
    made = []

    def make(model=stock, **options):
        made.append(FACES[request.param](model, **{"cache_memory": "4MiB", "block_size": 8, **options}))
        return made[-1]

    make.name = request.param
    yield make
    for face in made:
        face.close()


@pytest.fixture
def face(make_face):
    face = make_face()
    yield face
    assert not face.engine.has_unfinished and not face.loop._submissions
    face.engine.scheduler.cache.check_integrity([])


def assert_usable(face, stock, seed=0):
    prompts = random_prompts(random.Random(seed), 4, 20)
    outputs = face.generate(prompts, max_new_tokens=6, **GREEDY)
    assert [o.token_ids for o in outputs] == [stock_greedy(stock, p, 6) for p in prompts]


class FailsAt:
    """A forward hook that does something in one of the network's forwards."""

    def __init__(self, generator, call, action):
        self.calls, self.call, self.action = 0, call, action
        self._hook = generator.model.model.layers[1].register_forward_pre_hook(self)

    def __call__(self, module, args):
        self.calls += 1
        if self.calls == self.call:
            self.action()

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self._hook.remove()


def raise_(error):
    raise error


# A step that fails


@pytest.mark.parametrize("call", [1, 2, 5])
def test_an_exception_in_the_forward_ends_the_steps_requests(stock, face, call):
    prompts = random_prompts(random.Random(call), 6, 20)
    with FailsAt(face, call, lambda: raise_(ZeroDivisionError("in a layer"))):
        outputs = face.generate(prompts, max_new_tokens=8, **GREEDY)
    assert {o.finish_reason for o in outputs} == {"error"} and len(outputs[0].token_ids) == call - 1
    assert {o.error for o in outputs} == {"in a layer"}
    for prompt, output in zip(prompts, outputs, strict=True):  # what was said before stays true
        assert output.token_ids == stock_greedy(stock, prompt, 8)[: call - 1]
    outputs = face.generate(prompts, max_new_tokens=8, **GREEDY)  # of which the cache may hold something by now
    assert [o.token_ids for o in outputs] == [stock_greedy(stock, p, 8) for p in prompts]


def test_out_of_memory_in_a_step_ends_its_requests(stock, face):
    with FailsAt(face, 3, lambda: torch.empty(2**55)):
        (output,) = face.generate([[5, 6, 7]], max_new_tokens=8, **GREEDY)
    assert output.finish_reason == "error" and "allocate" in output.error
    assert_usable(face, stock)


def test_a_cache_that_cannot_be_allocated_is_refused(stock):
    with pytest.raises(MemoryError, match=r"cache_memory='200000TiB' cannot be allocated"):
        ContinuousBatchingGenerator(stock, cache_memory="200000TiB", max_sequences=4, block_size=2**42)


def test_a_poisoned_weight_errs_and_nothing_stays_of_it(stock, make_face):
    own = random_stock(41, conv_bias=False)
    weight = own.model.layers[0].feed_forward.w2.weight
    face = make_face(own)
    saved = weight.detach().clone()
    with torch.no_grad():
        weight.fill_(float("nan"))
    outputs = face.generate([[5, 6], [7]], max_new_tokens=4, **GREEDY)
    assert [o.finish_reason for o in outputs] == ["error", "error"] and "logits" in outputs[0].error
    with torch.no_grad():
        weight.copy_(saved)
    assert_usable(face, stock)


def test_a_failure_outside_the_network_ends_those_running_and_not_those_waiting(stock, make_face):
    limit = {"generator": "max_sequences", "manager": "max_requests_per_batch"}
    face = make_face(**{limit[make_face.name]: 3})
    on_computed, failures = face.engine.scheduler.on_computed, [MemoryError("in the bookkeeping")]

    def failing(row, tokens):
        on_computed(row, tokens)
        if row.request.num_output_tokens == 3 and failures:
            raise failures.pop()

    face.engine.scheduler.on_computed = failing
    prompts = random_prompts(random.Random(8), 9, 20)
    outputs = face.generate(prompts, max_new_tokens=5, **GREEDY)
    failed = [o for o in outputs if o.finish_reason == "error"]
    assert 1 <= len(failed) <= 3 and {o.error for o in failed} == {"in the bookkeeping"}
    for prompt, output in zip(prompts, outputs, strict=True):
        assert output in failed or output.token_ids == stock_greedy(stock, prompt, 5)
    face.engine.scheduler.cache.check_integrity([])
    assert_usable(face, stock)


def test_a_scheduler_that_fails_always_ends_everything_and_says_so(make_face):
    face = make_face()
    face.engine.scheduler.schedule = lambda: raise_(KeyError("lost"))
    (output,) = face.generate([[5, 6]], max_new_tokens=4)
    assert (output.finish_reason, output.error) == ("error", "'lost'")
    with pytest.raises(RuntimeError) as caught:
        face.generate([[5, 6]])
    if make_face.name == "generator":
        assert isinstance(caught.value, BrokenError) and caught.match(r"KeyError\('lost'\).*make a new one")
    else:
        assert isinstance(caught.value.__cause__, KeyError) and caught.match("died with a fatal error")


def test_a_leaked_block_after_a_failure_makes_it_say_so(make_face):
    face = make_face()

    def lose_a_block(row, tokens):
        row.request.block_table.clear()
        raise KeyError("lost")

    face.engine.scheduler.on_computed = lose_a_block
    (output,) = face.generate([[5, 6]], max_new_tokens=4)
    assert output.finish_reason == "error"
    with pytest.raises(RuntimeError) as caught:
        face.generate([[5, 6]])
    assert "references" in f"{caught.value} {caught.value.__cause__}"


# A user's code inside a step


def test_a_criterion_that_calls_back_is_refused_and_does_not_hang(stock, face):
    def nosy(ids, scores):
        face.generate([[5]], max_new_tokens=1)

    (bad,) = face.generate([[5, 6]], stopping_criteria=[nosy], max_new_tokens=3, **GREEDY)
    assert bad.finish_reason == "error" and "inside a step" in bad.error
    (waiting,) = face.generate([[5, 6]], stopping_criteria=[lambda *_: face.wait()], max_new_tokens=3, **GREEDY)
    assert waiting.finish_reason == "error" and "inside a step" in waiting.error
    assert_usable(face, stock)


@pytest.mark.parametrize("error", [SystemExit, KeyboardInterrupt])
def test_a_callback_that_exits_is_obeyed(stock, generator, error):
    with pytest.raises(error):
        generator.generate([[5, 6]], logits_processor=[lambda *_: raise_(error)], **GREEDY)
    assert_usable(generator, stock)


# Ctrl-C


def test_ctrl_c_in_generate_cancels_the_call(stock, generator):
    with FailsAt(generator, 3, lambda: signal.raise_signal(signal.SIGINT)) as hook, pytest.raises(KeyboardInterrupt):
        generator.generate(random_prompts(random.Random(1), 5, 20), max_new_tokens=2000, **GREEDY)
    assert hook.calls == 3 and not generator.engine.has_unfinished
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    assert_usable(generator, stock)


def test_a_second_ctrl_c_interrupts_the_step(stock, generator):
    def twice():
        signal.raise_signal(signal.SIGINT)
        signal.raise_signal(signal.SIGINT)

    handle = generator.submit([5, 6, 7], max_new_tokens=5, **GREEDY)
    handle.result(SECONDS)
    with FailsAt(generator, 3, twice), pytest.raises(KeyboardInterrupt):
        generator.generate([[5, 6, 7], [8]], max_new_tokens=2000, **GREEDY)
    assert_usable(generator, stock)


def test_ctrl_c_while_another_thread_drives(stock, generator):
    endless = threading.Thread(target=lambda: generator.generate([[5, 6]], max_new_tokens=3000, **GREEDY))
    endless.start()
    while not generator.engine.scheduler.running:
        time.sleep(0.001)
    timer = threading.Timer(0.05, os.kill, (os.getpid(), signal.SIGINT))
    timer.start()
    with pytest.raises(KeyboardInterrupt):
        generator.generate([[7, 8]], max_new_tokens=3000, **GREEDY)
        raise AssertionError("it was not interrupted")
    running = list(generator.engine.scheduler.running)
    assert len(running) == 1 and running[0].prompt_token_ids == [5, 6]  # the other's call goes on
    generator.loop.cancel(running)
    endless.join(SECONDS)
    assert not endless.is_alive()
    assert_usable(generator, stock)


# Threads and processes


def test_two_generators_on_one_model_at_once(stock):
    results = {}
    with (
        ContinuousBatchingGenerator(stock, cache_memory="2MiB", block_size=8) as one,
        ContinuousBatchingGenerator(stock, cache_memory="2MiB", block_size=4) as two,
    ):
        assert one.model is two.model
        prompts = random_prompts(random.Random(3), 12, 20)

        def call(name, generator):
            results[name] = [o.token_ids for o in generator.generate(prompts, max_new_tokens=9, **GREEDY)]

        threads = [threading.Thread(target=call, args=pair) for pair in (("one", one), ("two", two))]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(SECONDS)
    assert results["one"] == results["two"] == [stock_greedy(stock, p, 9) for p in prompts]


def test_a_slow_reader_of_a_stream_holds_nobody_up(stock, generator):
    prompts = random_prompts(random.Random(5), 3, 20)
    stream = generator.stream(prompts, max_new_tokens=30, **GREEDY)
    events = [next(stream)]
    assert_usable(generator, stock)  # while the reader does something else
    assert len(generator.generate([[5, 6]], max_new_tokens=40, **GREEDY)[0].token_ids) == 40
    events += stream
    tokens = [[t for e in events if e.index == i for t in e.token_ids] for i in range(3)]
    assert tokens == [stock_greedy(stock, p, 30) for p in prompts]


def test_cancelling_what_has_just_finished_leaves_no_work(stock, generator):
    handle = generator.submit([5, 6], max_new_tokens=2, **GREEDY)
    handle.result(SECONDS)
    handle.cancel()
    assert not generator.engine.has_unfinished
    generator.engine.cancel(handle._submission.requests[0])  # as when it finishes between the look and the cancel
    generator.loop.run_in_background()
    thread = generator.loop._background
    if thread is not None:
        thread.join(SECONDS)
        assert not thread.is_alive()


@pytest.mark.parametrize("copied", [copy.copy, copy.deepcopy, pickle.dumps])
def test_copying_and_pickling_are_refused_by_name(generator, copied):
    with pytest.raises(TypeError, match="ContinuousBatchingGenerator cannot be pickled or copied"):
        copied(generator)
    assert len(generator.generate([[5, 6]], max_new_tokens=2, **GREEDY)[0].token_ids) == 2


def test_a_forked_child_is_refused_at_once(stock, generator):
    stream = generator.stream([[5, 6]], max_new_tokens=30, **GREEDY)
    next(stream)
    with generator.loop._changed:  # a fork may find the lock taken, by a thread that the child does not have
        read, write = os.pipe()
        child = os.fork()
        if child == 0:
            said = []
            for call in (lambda: generator.generate([[5, 6]]), lambda: generator.submit([5]), lambda: next(stream)):
                try:
                    call()
                except ForkedError as error:
                    said.append(str(error))
            generator.close()
            os.write(write, f"{len(said)} {said[0] if said else ''}".encode())
            os._exit(0)
    os.close(write)
    deadline = time.monotonic() + SECONDS
    while os.waitpid(child, os.WNOHANG)[0] == 0:
        if time.monotonic() > deadline:
            os.kill(child, signal.SIGKILL)
        time.sleep(0.01)
    with os.fdopen(read, "rb") as pipe:
        told = pipe.read().decode()
    assert told.startswith("3 ") and "spawn" in told
    stream.close()
    assert_usable(generator, stock)


@pytest.mark.parametrize(
    "end", [pytest.param("", marks=pytest.mark.slow, id="end"), pytest.param("raise ValueError('mine')", id="error")]
)
def test_the_interpreter_exits_while_a_background_thread_runs(end):
    script = f"""
        import sys, threading, lfm2_cb
        generator = lfm2_cb.ContinuousBatchingGenerator(lfm2_cb.demo_model_path(), cache_memory="64MiB")
        handles = [generator.submit("It was", max_new_tokens=3000, eos_token_id=None) for _ in range(4)]
        call = lambda: generator.generate(["He"], max_new_tokens=3000, eos_token_id=None)
        threading.Thread(target=call, daemon=True).start()
        while not generator.engine.scheduler.running: pass
        print("started", flush=True)
        {end}
    """
    run = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(script)], capture_output=True, text=True, timeout=2 * SECONDS
    )
    assert run.stdout == "started\n" and run.returncode == bool(end), run.stderr
    assert "Fatal" not in run.stderr and "terminate" not in run.stderr
