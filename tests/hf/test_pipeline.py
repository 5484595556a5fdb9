"""pipeline(..., generator="cb") beside the stock pipeline, greedy."""

import copy
import pickle

import pytest
import torch
from datasets import Dataset
from helpers import demo_prompts
from transformers import GenerationConfig, TextGenerationPipeline, pipeline
from transformers.pipelines.pt_utils import KeyDataset

import lfm2_cb
from lfm2_cb.hf.pipeline import ContinuousBatchingPipeline

GREEDY = {"do_sample": False, "max_new_tokens": 8}
CHAT = [{"role": "user", "content": "Continue the story.\nIt was"}]
PREFILL = [*CHAT, {"role": "assistant", "content": "a truth"}]


@pytest.fixture(scope="module")
def stock(demo_stock, demo_tokenizer):
    return pipeline("text-generation", model=demo_stock, tokenizer=demo_tokenizer)


@pytest.fixture(scope="module")
def cb(demo_stock, demo_tokenizer):
    return pipeline(
        "text-generation",
        model=demo_stock,
        tokenizer=demo_tokenizer,
        generator="cb",
        generator_kwargs={"cache_memory": "64MiB", "max_sequences": 4},
    )


@pytest.mark.parametrize(
    "inputs",
    [
        demo_prompts(9),
        demo_prompts(1),
        demo_prompts(2)[1],
        CHAT,
        [CHAT, PREFILL],
        PREFILL,
    ],
    ids=["list", "list of one", "str", "chat", "chats", "prefill"],
)
def test_equals_stock(stock, cb, inputs):
    assert cb(inputs, **GREEDY) == stock(inputs, **GREEDY)


@pytest.mark.parametrize(
    "options",
    [
        {"return_full_text": False},
        {"return_tensors": True},
        {"batch_size": 2},
        {"generation_config": GenerationConfig(do_sample=False, max_new_tokens=5)},
        {"prefix": "Emma "},
        {"prefix": "Emma ", "max_length": 120, "max_new_tokens": None},
        {"add_special_tokens": False},
        {"do_sample": True, "top_k": 1, "num_return_sequences": 3},
        {"skip_special_tokens": False},
    ],
    ids=lambda options: next(iter(options)),
)
def test_options_equal_stock(stock, cb, options):
    prompts = demo_prompts(4)
    kwargs = options if "generation_config" in options else {**GREEDY, **options}
    assert cb(prompts, **kwargs) == stock(prompts, **kwargs)


def test_an_empty_prompt_starts_from_bos_as_stock(stock, cb):
    kwargs = {**GREEDY, "add_special_tokens": False}
    assert cb("", **kwargs) == stock("", **kwargs)


def test_lazy_inputs_stay_lazy_and_in_order(stock, cb):
    prompts = demo_prompts(20)
    expected = stock(prompts, **GREEDY)
    taken = []

    def source():
        for prompt in prompts:
            taken.append(prompt)
            yield prompt

    results = iter(cb(source(), **GREEDY))
    first = next(results)
    assert len(taken) <= 1 + 1 + 2 * 4  # stock peeks at one; the window is twice max_sequences
    assert [first, *results] == expected


def test_datasets(stock, cb):
    prompts = demo_prompts(12)
    expected = stock(prompts, **GREEDY)
    dataset = Dataset.from_dict({"text": prompts, "label": list(range(12))})
    keyed = cb(KeyDataset(dataset, "text"), **GREEDY)
    assert len(keyed) == 12 and list(keyed) == expected
    assert cb(dataset["text"], **GREEDY) == expected
    assert list(cb(dataset, **GREEDY)) == expected
    with pytest.raises(ValueError, match="which of the columns"):
        cb(Dataset.from_dict({"a": ["x"], "b": ["y"]}))


def test_without_generator_it_is_stocks_own(demo_stock, demo_tokenizer):
    pipe = pipeline("text-generation", model=demo_stock, tokenizer=demo_tokenizer)
    assert type(pipe) is TextGenerationPipeline
    with pytest.raises(ValueError, match="generator"):
        pipeline("text-generation", model=demo_stock, tokenizer=demo_tokenizer, generator="fast")
    with pytest.raises(ValueError, match="generator_kwargs"):
        pipeline("text-generation", model=demo_stock, tokenizer=demo_tokenizer, generator_kwargs={})


def test_named_by_class_too(demo_stock, demo_tokenizer, stock):
    pipe = pipeline(
        "text-generation",
        model=demo_stock,
        tokenizer=demo_tokenizer,
        pipeline_class=ContinuousBatchingPipeline,
        generator="cb",
        generator_kwargs={"cache_memory": "64MiB"},
    )
    assert pipe(demo_prompts(3), **GREEDY) == stock(demo_prompts(3), **GREEDY)


def test_a_path_while_enabled_loads_our_class(stock):
    lfm2_cb.enable()
    try:
        pipe = pipeline(
            "text-generation",
            model=lfm2_cb.demo_model_path(),
            dtype=torch.float32,
            generator="cb",
            generator_kwargs={"cache_memory": "64MiB"},
        )
    finally:
        lfm2_cb.disable()
    assert isinstance(pipe.model, lfm2_cb.Lfm2CbForCausalLM)
    assert pipe(demo_prompts(3), **GREEDY) == stock(demo_prompts(3), **GREEDY)


def test_the_progress_bar_honours_the_switch(cb, capfd):
    from transformers.utils import logging

    cb(demo_prompts(40), do_sample=False, max_new_tokens=1)
    assert "seq/s" not in capfd.readouterr().err  # switched off in conftest
    logging.enable_progress_bar()
    try:
        cb(demo_prompts(40), do_sample=False, max_new_tokens=1)
    finally:
        logging.disable_progress_bar()
    assert "seq/s" in capfd.readouterr().err


def test_stocks_assisted_decoding_options_are_honoured(demo_stock, demo_tokenizer):
    """Stock refuses them for LFM2 ("stateful"); here they change no answer."""
    prompts, options = demo_prompts(5), {"max_new_tokens": 20, "do_sample": False}
    expected = pipeline("text-generation", model=demo_stock, tokenizer=demo_tokenizer)(prompts, **options)
    ours = pipeline("text-generation", model=demo_stock, tokenizer=demo_tokenizer, generator="cb")
    assert ours(prompts, prompt_lookup_num_tokens=4, **options) == expected
    assisted = pipeline(
        "text-generation",
        model=demo_stock,
        tokenizer=demo_tokenizer,
        generator="cb",
        assistant_model=lfm2_cb.demo_model_path(),
    )
    assert assisted(prompts, **options) == expected
    assert assisted.generator.engine.speculation.num_drafted > 0


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda pipe: pickle.loads(pickle.dumps(pipe))])
def test_a_copy_makes_its_own_engine(cb, copied):
    expected = cb(demo_prompts(3), **GREEDY)  # the engine has run, and holds what no copy could have
    other = copied(cb)
    assert type(other) is ContinuousBatchingPipeline and other._generator is None
    assert other(demo_prompts(3), **GREEDY) == expected
    assert other.generator is not cb.generator and other.generator.engine.config == cb.generator.engine.config


def test_each_text_is_decoded_once(demo_stock, demo_tokenizer, monkeypatch):
    pipe = pipeline("text-generation", model=demo_stock, tokenizer=demo_tokenizer, generator="cb")
    decoded, decode = [], type(demo_tokenizer).decode
    monkeypatch.setattr(
        type(demo_tokenizer), "decode", lambda self, ids, *a, **k: (decoded.append(1), decode(self, ids, *a, **k))[1]
    )
    pipe(demo_prompts(3), **GREEDY)
    ours, decoded[:] = len(decoded), []
    pipeline("text-generation", model=demo_stock, tokenizer=demo_tokenizer)(demo_prompts(3), **GREEDY)
    assert 0 < ours <= len(decoded)


def test_options_may_have_one_entry_a_prompt(cb, stock):
    prompts = demo_prompts(3)
    answers = cb(prompts, do_sample=False, max_new_tokens=[2, 9, 4], priority=[1, 2, 3])
    expected = [stock(p, do_sample=False, max_new_tokens=n) for p, n in zip(prompts, [2, 9, 4], strict=True)]
    assert answers == expected
