"""A thousand answers under every shape, at temperature 1, by checkers that know nothing of the grammars' library."""

import random
import sys
from pathlib import Path

import numpy as np
import pytest

sys.path.insert(0, str(Path(__file__).parent.parent / "requests"))

from test_structured import GBNF, LARK, REGEXES, SCHEMAS, SHAPES, TEXT

from lfm2_cb import ContinuousBatchingGenerator, Structured
from lfm2_cb.requests.structured import GrammarCompiler

pytestmark = pytest.mark.slow

#: what may close something, or stand where something has to: tried first, in turn, to end an answer soon
CLOSERS = ['"', "}", "]", ")", "0", "a", '"}', '"]', ": ", ", ", "1", "-", "A", "c", ".", "l", "e", "2"]


@pytest.fixture(scope="module")
def generator(demo_stock, demo_tokenizer):
    with ContinuousBatchingGenerator(demo_stock, demo_tokenizer, cache_memory="64MiB", max_sequences=64) as generator:
        yield generator


def completed(generator, shape, token_ids, rng):
    """The text of an answer that was cut, gone on with until it may end; None: it does not begin anything."""
    tokenizer, vocab_size = generator.tokenizer, generator.model.config.vocab_size
    grammar = GrammarCompiler(vocab_size, 7).compile(Structured.read(shape), tokenizer)
    matcher, token_ids, words = grammar.start.deep_copy(), list(token_ids), np.zeros(vocab_size // 32, np.int32)
    closers = [tokenizer.convert_tokens_to_ids(tokenizer.tokenize(text)[-1]) for text in CLOSERS]
    if not matcher.consume_tokens(token_ids):
        return None
    for _ in range(400):
        matcher.unsafe_compute_mask_ptr(words.ctypes.data, words.nbytes)
        allowed = np.flatnonzero(np.unpackbits(words.view(np.uint8), bitorder="little"))
        if grammar.end_token_id in allowed:
            return tokenizer.decode(token_ids, skip_special_tokens=True)
        ends = [token for token in closers if token in allowed and rng.random() < 0.7]
        token_ids.append(ends[0] if ends else int(rng.choice(list(allowed))))
        assert matcher.consume_tokens(token_ids[-1:])
    raise AssertionError(f"no end: {tokenizer.decode(token_ids)}")


def test_a_thousand_answers(generator):
    assert (len(SCHEMAS), len(REGEXES), bool(LARK), bool(GBNF)) == (20, 5, True, True)
    shapes, rng = (SHAPES * 40)[:1000], random.Random(0)
    prompts = [f"{TEXT} {i}" for i in range(1000)]
    options = {"do_sample": True, "temperature": 1.0, "top_k": 0, "seed": 1, "max_new_tokens": 48}
    outputs = generator.generate(prompts, structured=[shape for shape, _ in shapes], **options)
    ends = {"stop": 0, "length": 0}
    for output, (shape, is_valid) in zip(outputs, shapes, strict=True):
        ends[output.finish_reason] += 1
        cut = output.finish_reason == "length"
        text = completed(generator, shape, output.token_ids, rng) if cut else output.text
        assert text is not None and text.startswith(output.text.rstrip("\ufffd")), (shape, output.text)
        assert is_valid(text) not in (False, None), (shape, text)
    assert ends["stop"] > 500 and ends["length"] > 20, ends
    print(ends)
