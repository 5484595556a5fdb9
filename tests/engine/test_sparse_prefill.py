"""Long prompts: sparse prefill as an option of requests, and memory that does not grow with an exact prompt."""

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from lfm2_cb import ContinuousBatchingGenerator
from lfm2_cb.model.ragged_batch import RaggedBatch
from lfm2_cb.ops.attention import packed
from lfm2_cb.scheduling.request import Request

GREEDY = {"do_sample": False, "eos_token_id": None, "max_new_tokens": 12}
SIZES = {"cache_memory": "64MiB", "max_batch_tokens": 700, "max_sequences": 4}


@pytest.fixture(scope="module")
def prompt(demo_tokenizer):
    generator = torch.Generator().manual_seed(3)
    return torch.randint(10, 4000, (2300,), generator=generator).tolist()


@pytest.fixture(scope="module", params=["torch", "native"])
def generator(request, demo_stock):
    with ContinuousBatchingGenerator(demo_stock, kernels=request.param, **SIZES) as generator:
        yield generator


def answer(generator, prompt, **options):
    (output,) = generator.generate([prompt], **GREEDY, **options)
    return output


def assert_same(output, expected):
    assert output.token_ids == expected.token_ids
    for one, other in zip(output.logprobs, expected.logprobs, strict=True):
        assert one.logprob == pytest.approx(other.logprob, abs=1e-4)


def test_a_share_of_one_is_exact_and_a_smaller_one_is_not(generator, prompt):
    exact = answer(generator, prompt, use_prefix_cache=False, logprobs=0)
    whole = answer(generator, prompt, use_prefix_cache=False, logprobs=0, sparse_prefill=1)
    sparse = answer(generator, prompt, use_prefix_cache=False, logprobs=0, sparse_prefill=0.2)
    assert whole.token_ids == exact.token_ids and whole.logprobs == exact.logprobs
    assert sparse.logprobs != exact.logprobs


def test_the_kernels_attend_as_the_reference_does(demo_stock, prompt):
    said = []
    for kernels in ("torch", "native"):
        with ContinuousBatchingGenerator(demo_stock, kernels=kernels, sparse_prefill=0.5, **SIZES) as generator:
            said.append(answer(generator, prompt).token_ids)
    assert said[0] == said[1]


def test_the_generators_share_holds_where_a_call_says_nothing(demo_stock, prompt):
    with (
        ContinuousBatchingGenerator(demo_stock, sparse_prefill=0.2, prefix_caching=False, **SIZES) as sparse,
        ContinuousBatchingGenerator(demo_stock, prefix_caching=False, **SIZES) as exact,
    ):
        expected = answer(exact, prompt, logprobs=0)
        assert answer(sparse, prompt, sparse_prefill=1, logprobs=0).logprobs == expected.logprobs
        sparsely = answer(sparse, prompt, logprobs=0).logprobs
        assert sparsely == answer(exact, prompt, sparse_prefill=0.2, logprobs=0).logprobs != expected.logprobs
        mixed = exact.generate([prompt, prompt], sparse_prefill=[0.2, None], logprobs=0, **GREEDY)
        assert_same(mixed[1], expected)  # (to rounding: chunks were cut in other places)
        assert mixed[1].logprobs != mixed[0].logprobs


def test_what_was_computed_sparsely_is_for_those_who_ask_for_the_same(generator, prompt):
    generator.engine.forget_cached()
    cached = [answer(generator, prompt, sparse_prefill=share).metrics.num_cached_tokens for share in (0.5, None, 0.9)]
    assert cached == [0, 0, 0]
    for share in (0.5, None, 0.9, 1):
        assert answer(generator, prompt, sparse_prefill=share).metrics.num_cached_tokens > 2000


def test_answers_and_the_prompts_end_attend_to_all(generator, prompt, monkeypatch):
    seen, init = [], RaggedBatch.__init__
    record = lambda self, rows, *args: (seen.extend(rows), init(self, rows, *args))[1]  # noqa: E731
    monkeypatch.setattr(RaggedBatch, "__init__", record)
    answer(generator, prompt, sparse_prefill=0.5, use_prefix_cache=False, prompt_lookup_num_tokens=4)
    prefill = [row for row in seen if row.start < len(prompt)]
    assert [row.sparse.share for row in prefill] == [0.5] * 4
    assert all(row.sparse.exact_from == len(prompt) - 1 for row in prefill)
    assert all(row.sparse is None for row in seen if row.start >= len(prompt))


def test_rows_that_attend_sparsely_run_beside_others_that_share_a_prefix(generator, prompt):
    prompts = [prompt[:1500] + [token] * 30 for token in (50, 60, 70)] + [prompt]
    options = {**GREEDY, "sparse_prefill": [None, None, None, 0.3]}
    alone = [
        answer(generator, p, sparse_prefill=share, use_prefix_cache=False).token_ids
        for p, share in zip(prompts, options["sparse_prefill"], strict=True)
    ]
    for _ in range(2):  # the second time their prefixes are cached
        assert [output.token_ids for output in generator.generate(prompts, **options)] == alone


def test_a_preempted_request_goes_on(generator, prompt):
    options = {"sparse_prefill": 0.5, "use_prefix_cache": False}
    expected = answer(generator, prompt, **options).token_ids
    submission = generator.enqueue([prompt], generator.resolve(None, {**GREEDY, **options}))
    for _ in range(7):
        generator.engine.step()
    (request,) = generator.engine.scheduler.running
    assert 0 < request.num_output_tokens < 12
    generator.engine.scheduler.preempt(request)
    assert generator.run(submission)[0].token_ids == expected


@pytest.mark.parametrize("share", [0, -0.5, 1.01, True, "0.95", float("nan")])
def test_what_is_no_share_is_refused(demo_stock, share):
    with pytest.raises(ValueError, match="sparse_prefill must be a number above 0 and up to 1"):
        ContinuousBatchingGenerator(demo_stock, sparse_prefill=share)
    with (
        ContinuousBatchingGenerator(demo_stock, cache_memory="8MiB") as generator,
        pytest.raises(ValueError, match="sparse_prefill"),
    ):
        generator.generate([[5, 6]], sparse_prefill=share)


def test_lists_have_an_entry_a_prompt_and_stock_cannot_do_it(demo_stock):
    with ContinuousBatchingGenerator(demo_stock, cache_memory="8MiB") as generator:
        with pytest.raises(ValueError, match="sparse_prefill has 1 entries for 2 prompts"):
            generator.generate([[5], [6]], sparse_prefill=[0.5])
        with pytest.raises(ValueError, match="sparse_prefill cannot be combined with"):
            generator.generate([[5]], sparse_prefill=0.5, num_beams=2, max_new_tokens=2)


def test_roots_of_the_prefix_cache():
    roots = [Request(i, [1], 1, sparse_prefill=share).root_content_id for i, share in enumerate((None, 0.5, 0.9, 0.5))]
    assert roots[1] == roots[3] and len(set(roots)) == 3


# Exact prompts, in bounded memory


class LargestTensor(TorchDispatchMode):
    """Notes the values of the largest tensor that an operation returns (and makes, but for views)."""

    values = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        for tensor in result if isinstance(result, (tuple, list)) else [result]:
            if isinstance(tensor, torch.Tensor) and not func.is_view and "embed" not in str(func):
                self.values = max(self.values, tensor.numel())
        return result


def test_a_longer_prompt_makes_no_larger_tensors(demo_stock, monkeypatch):
    monkeypatch.setattr(packed, "MOST_SDPA_KEYS", 512)  # (smaller than it is: the demonstration model has 4,096)
    token_ids = torch.randint(10, 4000, (4000,)).tolist()
    options = {"kernels": "native", "max_batch_tokens": 128, "cache_memory": "64MiB"}
    largest = []
    with ContinuousBatchingGenerator(demo_stock, **options) as generator:
        for length in (500, 1000, 4000):
            with LargestTensor() as mode:
                generator.generate([token_ids[:length]], use_prefix_cache=False, **{**GREEDY, "max_new_tokens": 1})
            largest.append(mode.values)
    assert largest[0] == largest[1] == largest[2] > 0
