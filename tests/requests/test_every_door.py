"""Every option of a request, at every door that takes prompts: the same effect behind each as in `generate()`."""

import itertools

import pytest
import torch
from transformers import GenerationConfig, WatermarkingConfig, pipeline

from lfm2_cb import ContinuousBatchingGenerator
from lfm2_cb.cli.job import Job
from lfm2_cb.cli.progress import NoProgress
from lfm2_cb.cli.rows import Source
from lfm2_cb.cli.writer import RowSet
from lfm2_cb.engine.engine import Engine
from lfm2_cb.requests.options import HONOURED, CallOptions
from lfm2_cb.requests.prompts import PromptError

TEXT = "It was the best of all that she had said to him, and it was the best of all that"
BASE = {"do_sample": False, "max_new_tokens": 12, "eos_token_id": None}
SAMPLED = {"do_sample": True, "seed": 5, "temperature": 2.0}


def suppress_best(input_ids, scores):
    return scores.index_fill(1, scores.argmax(-1), -torch.inf)


def ends_at_five_more(input_ids, scores, **kwargs):
    return input_ids.shape[1] % 5 == 0


def first_letters(batch_id, input_ids):
    return list(range(10, 20))


#: what is tried → (options beside it, the option). Each changes the tokens of the demonstration model.
CASES = {
    "max_new_tokens": ({}, {"max_new_tokens": 5}),
    "max_length": ({"max_new_tokens": None}, {"max_length": 28}),
    "min_new_tokens": ({"eos_token_id": list(range(3, 400))}, {"min_new_tokens": 4}),
    "min_length": ({"eos_token_id": list(range(3, 400))}, {"min_length": 30}),
    "eos_token_id": ({}, {"eos_token_id": list(range(3, 400))}),
    "stop_strings": ({}, {"stop_strings": ["e", "a"]}),
    "repetition_penalty": ({}, {"repetition_penalty": 5.0}),
    "encoder_repetition_penalty": ({}, {"encoder_repetition_penalty": 5.0}),
    "no_repeat_ngram_size": ({}, {"no_repeat_ngram_size": 1}),
    "encoder_no_repeat_ngram_size": ({}, {"encoder_no_repeat_ngram_size": 1}),
    "bad_words_ids": ({}, {"bad_words_ids": [[t] for t in range(3, 300)]}),
    "sequence_bias": ({}, {"sequence_bias": [[[40], 99.0]]}),
    "suppress_tokens": ({}, {"suppress_tokens": list(range(3, 300))}),
    "begin_suppress_tokens": ({}, {"begin_suppress_tokens": list(range(3, 400))}),
    "forced_eos_token_id": ({}, {"forced_eos_token_id": 40}),
    "exponential_decay_length_penalty": ({"eos_token_id": 40}, {"exponential_decay_length_penalty": (2, 30.0)}),
    "watermarking_config": ({}, {"watermarking_config": WatermarkingConfig(bias=20.0)}),
    "do_sample": ({}, {"do_sample": True, "seed": 5, "temperature": 1.0}),  # stock's pipeline takes 0.7
    "seed": (SAMPLED, {"seed": 6}),
    "temperature": (SAMPLED, {"temperature": 9.0}),
    "top_k": (SAMPLED, {"top_k": 1}),
    "top_p": (SAMPLED, {"top_p": 0.01}),
    "min_p": (SAMPLED, {"min_p": 0.99}),
    "typical_p": (SAMPLED, {"typical_p": 0.01}),
    "top_h": (SAMPLED, {"top_h": 0.01}),
    "epsilon_cutoff": (SAMPLED, {"epsilon_cutoff": 0.3}),
    "eta_cutoff": (SAMPLED, {"eta_cutoff": 0.5}),
    "logits_processor": ({}, {"logits_processor": [suppress_best]}),
    "stopping_criteria": ({}, {"stopping_criteria": [ends_at_five_more]}),
    "structured": ({}, {"structured": {"type": "array", "items": {"type": "integer"}, "minItems": 3}}),
    "prefix_allowed_tokens_fn": ({}, {"prefix_allowed_tokens_fn": first_letters}),
}

#: options that leave the tokens as they are, and where in a request they show
MARKS = {
    "priority": (5, lambda request: request.priority == 5),
    "use_prefix_cache": (False, lambda request: not request.use_prefix_cache),
    "chunks": (" of all", lambda request: len(request.segments) == 3 and request.recompute == 0.15),
    "sparse_prefill": (0.5, lambda request: request.sparse_prefill == 0.5),
    "logprobs": (2, lambda request: request.params.trace.num_logprobs == 2),
    "prompt_lookup_num_tokens": (4, lambda request: request.draft_tracker.max_tokens == 4),
    "assistant_model": (None, lambda request: type(request.draft_tracker.drafter).__name__ == "AssistantModel"),
}

#: options that have tests of their own, with what they return, or are no request's
ELSEWHERE = {"num_return_sequences", "return_dict_in_generate", "output_scores", "output_logits", "max_time"}
ELSEWHERE |= {"pad_token_id", "bos_token_id", "forced_bos_token_id", "max_matching_ngram_size", "num_assistant_tokens"}
ELSEWHERE |= {"adapter", "renormalize_logits", "remove_invalid_values", "tokenizer", "on_error", "recompute"}


class Doors:
    """Each method runs one text with options, and gives its new tokens."""

    def __init__(self, model, tokenizer):
        self.tokenizer, self.ids = tokenizer, tokenizer(TEXT)["input_ids"]
        sizes = {"cache_memory": "8MiB", "max_sequences": 4}
        self.generator = ContinuousBatchingGenerator(model, tokenizer, **sizes)
        self.model = self.generator.model
        self.pipe = pipeline(
            "text-generation", model=self.model, tokenizer=tokenizer, generator="cb", generator_kwargs=sizes
        )
        self.protocol = self.model.init_continuous_batching(GenerationConfig())
        self.protocol.start()

    def close(self):
        self.protocol.stop()
        self.generator.close()

    def generate(self, **options):
        return self.generator.generate([TEXT], **options)[0].token_ids

    def generate_tensor(self, **options):
        return self.generator.generate(torch.tensor([self.ids]), **options)[0, len(self.ids) :].tolist()

    def generate_config(self, **options):
        ours = {field for field in CallOptions.__dataclass_fields__ if field in options}
        config = GenerationConfig(**{name: value for name, value in options.items() if name not in ours})
        return self.generator.generate([TEXT], config, **{name: options[name] for name in ours})[0].token_ids

    def stream(self, **options):
        return [token for event in self.generator.stream([TEXT], **options) for token in event.token_ids]

    def submit(self, **options):
        self.generator._num_submitted = itertools.count()  # each counts as a prompt of one long call
        return self.generator.submit(TEXT, **options).result(60).token_ids

    def pipeline(self, **options):
        return self.pipe(TEXT, return_tensors=True, **options)[0]["generated_token_ids"][len(self.ids) :]

    def pipeline_lazily(self, **options):
        results = self.pipe((text for text in [TEXT]), return_tensors=True, **options)
        return next(iter(results))[0]["generated_token_ids"][len(self.ids) :]

    def add_request(self, **options):
        name = self.protocol.add_request(self.ids, tokenizer=self.tokenizer, **options)
        return self.protocol.get_result(name).generated_tokens

    def add_requests(self, **options):
        (name,) = self.protocol.add_requests([self.ids], tokenizer=self.tokenizer, streaming=True, **options)
        *_, last = self.protocol.request_id_iter(name)
        return last.generated_tokens

    def generate_batch(self, **options):
        outputs = self.model.generate_batch([self.ids], tokenizer=self.tokenizer, warmup=False, **options)
        return next(iter(outputs.values())).generated_tokens

    def job(self, **options):
        class Files:
            done, num_errors = RowSet(), 0

            def write(self, record, is_error=False, **_):
                assert not is_error, record
                self.text = record["text"]

        files, source = Files(), Source({}, 1, lambda: iter([(0, {"prompt": TEXT})]))
        Job(self.generator, self.generator.resolve(None, options)).run(source, files, NoProgress())
        return files.text


@pytest.fixture(scope="module")
def doors(demo_stock, demo_tokenizer):
    doors = Doors(demo_stock, demo_tokenizer)
    yield doors
    doors.close()


DOORS = [name for name in vars(Doors) if not name.startswith("_") and name not in ("close", "generate")]


def answer(doors, door, options):
    given = {**BASE, **options}
    return getattr(doors, door)(**{name: value for name, value in given.items() if value is not None})


@pytest.fixture(scope="module")
def expected(doors):
    """What `generate()` says with each option, having said something else without."""
    known = {}
    for name, (beside, option) in CASES.items():
        known[name] = answer(doors, "generate", {**beside, **option})
        assert known[name] != answer(doors, "generate", beside), name
    return known


@pytest.mark.parametrize("door", DOORS)
@pytest.mark.parametrize("name", CASES)
def test_an_option_has_its_effect_behind_every_door(doors, expected, door, name):
    beside, option = CASES[name]
    said = answer(doors, door, {**beside, **option})
    wanted = expected[name]
    assert said == (doors.tokenizer.decode(wanted, skip_special_tokens=True) if isinstance(said, str) else wanted)


@pytest.mark.parametrize("door", ["generate", *DOORS])
@pytest.mark.parametrize("name", MARKS)
def test_an_option_that_changes_no_token_reaches_the_request(doors, door, name, monkeypatch):
    value, is_set = MARKS[name]
    seen, add_all = [], Engine.add_all
    monkeypatch.setattr(Engine, "add_all", lambda self, requests: (seen.extend(requests), add_all(self, requests))[1])
    answer(doors, door, {})
    assert seen and not any(is_set_safely(is_set, request) for request in seen)
    seen.clear()
    answer(doors, door, {name: doors.model if name == "assistant_model" else value})
    assert any(is_set_safely(is_set, request) for request in seen)  # segments of `chunks` are requests too


def is_set_safely(is_set, request):
    try:
        return is_set(request)
    except AttributeError:  # there is no trace, no drafting
        return False


def test_no_option_is_forgotten():
    options = HONOURED | set(CallOptions.__dataclass_fields__)
    assert options == CASES.keys() | MARKS.keys() | ELSEWHERE


# on_error="return"


def bad_and_good(doors):
    return [[], doors.ids, [10**6], [5] * 10**4, [float]]


def test_a_bad_prompt_gives_its_error_and_the_others_run(doors):
    options = {**BASE, "on_error": "return"}
    prompts, good = bad_and_good(doors), answer(doors, "generate", {})
    outputs = doors.generator.generate(prompts, **options)
    assert [output.finish_reason for output in outputs] == ["error", "length", "error", "error", "error"]
    assert outputs[1].token_ids == good and all(isinstance(outputs[i].error, PromptError) for i in (0, 2, 3, 4))
    messages = [str(output.error) for output in outputs]
    assert "prompt 0 is empty" in messages[0] and "prompt 2" in messages[2] and "prompt 3" in messages[3]

    events = list(doors.generator.stream(prompts, **options))
    ends = {event.index: event for event in events if event.finished}
    assert [str(ends[i].error) for i in range(5)] == messages
    assert [t for event in events if event.index == 1 for t in event.token_ids] == good

    handle = doors.generator.submit([], **options)
    assert handle.done() and "empty" in str(handle.result().error)

    batch = doors.model.generate_batch(prompts, warmup=False, **options)
    assert [output.error for output in batch.values()] == [m if i != 1 else None for i, m in enumerate(messages)]
    assert list(batch.values())[1].generated_tokens == good


def test_a_request_too_large_for_the_cache_gives_its_error(demo_stock):
    with ContinuousBatchingGenerator(demo_stock, cache_memory="300KB", block_size=16, max_sequences=2) as generator:
        there = generator.engine.plan.num_blocks * 16
        outputs = generator.generate([[5] * there, [6]], max_new_tokens=9, on_error="return", num_return_sequences=1)
        assert outputs[0].finish_reason == "error" and "cache_memory" in str(outputs[0].error)
        assert len(outputs[1].token_ids) > 0


def test_each_returned_sequence_of_a_bad_prompt_has_its_error(doors):
    options = {**BASE, "do_sample": True, "num_return_sequences": 2, "on_error": "return"}
    outputs = doors.generator.generate([[], doors.ids], **options)
    assert [output.finish_reason for output in outputs] == ["error", "error", "length", "length"]


def test_what_stock_has_to_run_can_return_errors_too(doors):
    options = {"max_new_tokens": 3, "num_beams": 2, "do_sample": False}
    outputs = doors.generator.generate([[], doors.ids], on_error="return", **options)
    assert outputs[0].finish_reason == "error" and len(outputs[1].token_ids) == 3
    with pytest.raises(PromptError, match="prompt 0 is empty"):
        doors.generator.generate([[], doors.ids], **options)


def test_the_pipeline_can_return_errors(doors):
    options = {**BASE, "on_error": "return", "return_full_text": False}
    good = doors.tokenizer.decode(answer(doors, "generate", {}), skip_special_tokens=True)
    for inputs in ([TEXT, "\ud800", TEXT], (text for text in [TEXT, "\ud800", TEXT])):
        first, bad, last = doors.pipe(inputs, **options)
        assert first == last == [{"generated_text": good}]
        assert bad[0]["generated_text"] is None and "surrogate" in bad[0]["error"]


def test_on_error_is_checked_and_a_tensor_has_no_place_for_errors(doors):
    with pytest.raises(ValueError, match="on_error"):
        doors.generator.generate([TEXT], on_error="ignore")
    with pytest.raises(ValueError, match="on_error"):
        doors.generator.generate(torch.tensor([doors.ids]), on_error="return")


@pytest.mark.parametrize(
    "option",
    [
        {"do_sample": True, "temperature": 0.0},
        {"stop_strings": ["x"]},
        {"sequence_bias": [[[10**6], 1.0]]},
        {"sequence_bias": {(3, 10**6): 1.0}},
        {"bad_words_ids": [[3], [4, 10**6]]},
        {"repetition_penalty": -1.0},
    ],
    ids=lambda option: list(option)[-1],
)
def test_a_bad_option_is_nobodys_prompts_fault(demo_stock, option):
    """It raises once, before any prompt is looked at, also where prompts' errors are returned."""
    name = {"repetition_penalty": "penalty"}.get(list(option)[-1], list(option)[-1])  # as stock calls it
    with (
        ContinuousBatchingGenerator(demo_stock, cache_memory="8MiB") as generator,
        pytest.raises(ValueError) as caught,
    ):
        generator.resolve(None, {**option, "on_error": "return"})
    assert name in str(caught.value) or (name == "stop_strings" and "tokenizer" in str(caught.value))
