"""Whatever users call prompts: arrays, what tokenizers return, padding in lists, and text that is none."""

import numpy as np
import pytest
import torch

from lfm2_cb import ContinuousBatchingGenerator, demo_model_path
from lfm2_cb.requests.prompts import PromptError, tokenize

TEXTS = ["It was the", "She said that he had never been"]
OPTIONS = {"do_sample": False, "max_new_tokens": 6}


@pytest.fixture(scope="module")
def generator(demo_stock):
    # a tokenizer by its path
    with ContinuousBatchingGenerator(demo_stock, demo_model_path(), cache_memory="8MiB") as generator:
        yield generator


@pytest.fixture(scope="module")
def expected(generator):
    return [output.token_ids for output in generator.generate(TEXTS, **OPTIONS)]


def tokens(outputs):
    return [output.token_ids for output in outputs]


@pytest.mark.parametrize("dtype", [np.int64, np.int32, np.uint16])
def test_arrays_of_ids(generator, expected, dtype):
    ids = [np.array(generator.tokenizer(text)["input_ids"], dtype=dtype) for text in TEXTS]
    assert tokens(generator.generate(ids, **OPTIONS)) == expected
    assert tokens(generator.generate(ids[0], **OPTIONS)) == expected[:1]
    assert tokens(generator.generate([list(ids[1])], **OPTIONS)) == expected[1:]  # a list of numpy's own integers
    with pytest.raises(PromptError, match="prompt 0 must be"):
        generator.generate([ids[0].astype(float)], **OPTIONS)


@pytest.mark.parametrize("padding", [False, True])
def test_what_a_tokenizer_returns(generator, expected, padding):
    encoded = generator.tokenizer(TEXTS, padding=padding)
    assert tokens(generator.generate(**encoded, **OPTIONS)) == expected
    assert tokens(generator.generate(encoded, **OPTIONS)) == expected
    assert [t for event in generator.stream(encoded, **OPTIONS) if event.index == 1 for t in event.token_ids] == (
        expected[1]
    )
    assert tokens(generator.generate(**generator.tokenizer(TEXTS[0]), **OPTIONS)) == expected[:1]


@pytest.mark.parametrize("kind", ["pt", "np"])
def test_what_a_tokenizer_returns_in_arrays(generator, expected, kind):
    encoded = generator.tokenizer(TEXTS, padding=True, return_tensors=kind)
    answers = generator.generate(**encoded, **OPTIONS)
    width = encoded["input_ids"].shape[1]
    assert isinstance(answers, torch.Tensor) and answers[:, width:].tolist() == expected
    events = list(generator.stream(encoded, **OPTIONS))
    assert [t for event in events if event.index == 0 for t in event.token_ids] == expected[0]


def test_padding_on_the_right_is_refused_by_name(generator):
    encoded = generator.tokenizer(TEXTS, padding=True, padding_side="right")
    with pytest.raises(PromptError, match="prompt 0 is padded on the right"):
        generator.generate(**encoded, **OPTIONS)


def test_prompts_are_given_once(generator):
    for wrong in ({}, {"prompts": TEXTS, "input_ids": [[5]]}):
        with pytest.raises(PromptError, match="input_ids"):
            generator.generate(**wrong)
    with pytest.raises(PromptError, match="attention_mask has 1 rows for 2"):
        generator.generate([[5], [6]], attention_mask=[[1]])
    with pytest.raises(PromptError, match="prompt 1 has 1 tokens"):
        generator.generate([[5], [6]], attention_mask=[[1], [1, 1]])


@pytest.mark.parametrize(
    "prompt", ["half \ud83d of a pair", [{"role": "user", "content": "\udc00"}]], ids=["text", "chat"]
)
def test_a_lone_surrogate_is_no_text(demo_tokenizer, prompt):
    with pytest.raises(PromptError, match="prompt 1 is not valid text: a lone surrogate"):
        tokenize(["fine", prompt], demo_tokenizer)


def test_a_path_is_no_tokenizer_of_a_call(generator):
    with pytest.raises(ValueError, match="tokenizer must be"):
        generator.generate(TEXTS, tokenizer=demo_model_path(), **OPTIONS)


def test_text_without_a_tokenizer_is_named_wherever_it_stands(demo_stock):
    with ContinuousBatchingGenerator(demo_stock, cache_memory="4MiB") as generator:
        for prompts in ([None, ""], [[5], "text"], [[5], [{"role": "user", "content": "text"}]], "text"):
            with pytest.raises(PromptError, match=r"prompt 0 must be|is text: give"):
                generator.generate(prompts)
        outputs = generator.generate([[5], "text"], on_error="return", max_new_tokens=2)
    assert outputs[0].error is None and "is text" in str(outputs[1].error)
