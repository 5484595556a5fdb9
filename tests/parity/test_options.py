"""generate()'s options beside stock, one prompt at a time: greedy tokens exact, processed scores equal."""

import random
import time
from pathlib import Path

import pytest
import torch
import transformers
from helpers import demo_prompts, random_prompts, random_stock
from transformers import GenerationConfig, LogitsProcessor, StoppingCriteria, SynthIDTextWatermarkingConfig
from transformers import WatermarkingConfig as Watermark

from lfm2_cb import ContinuousBatchingGenerator
from lfm2_cb.engine.assistant import AssistantModel
from lfm2_cb.requests.options import UnsupportedOptionError

#: greedy: each option alone, and some together
GREEDY = [
    {},
    {"repetition_penalty": 1.3},
    {"repetition_penalty": 0.8},
    {"encoder_repetition_penalty": 1.5},
    {"encoder_repetition_penalty": 0.7},
    {"no_repeat_ngram_size": 2},
    {"no_repeat_ngram_size": 3},
    {"encoder_no_repeat_ngram_size": 2},
    {"bad_words_ids": [[11], [12, 13], [14, 15, 16]]},
    {"sequence_bias": {(20,): 4.0, (21, 22): -3.0}},
    {"suppress_tokens": [10, 11, 12, 17, 30]},
    {"begin_suppress_tokens": [5, 17, 23, 30, 41]},
    {"forced_bos_token_id": 5},
    {"forced_eos_token_id": 9},
    {"forced_eos_token_id": [9, 10]},
    {"exponential_decay_length_penalty": (3, 1.7), "eos_token_id": 7},
    {"renormalize_logits": True},
    {"remove_invalid_values": True},
    {"min_new_tokens": 6, "eos_token_id": [7, 8, 9, 10, 11, 12, 13, 14, 15, 16, 17, 18, 19, 20]},
    {"min_length": 14, "eos_token_id": [7, 8, 9, 10, 11, 12, 13, 14, 15, 16, 17, 18, 19, 20]},
    {"eos_token_id": [17, 23, 30, 41]},
    {"eos_token_id": 17},
    {"max_new_tokens": 1},
    {"max_new_tokens": None, "max_length": 70},
    {"max_length": 20, "max_new_tokens": 5},
    {"watermarking_config": Watermark(bias=2.5, seeding_scheme="selfhash", context_width=2)},
    {"watermarking_config": Watermark(bias=2.5)},
    {"repetition_penalty": 1.2, "no_repeat_ngram_size": 2, "min_new_tokens": 4, "eos_token_id": [17, 23]},
    {"bad_words_ids": [[11]], "suppress_tokens": [12], "sequence_bias": {(20,): 2.0}, "renormalize_logits": True},
    {"encoder_repetition_penalty": 1.2, "repetition_penalty": 1.1, "encoder_no_repeat_ngram_size": 3},
    {"forced_bos_token_id": 6, "begin_suppress_tokens": [9], "forced_eos_token_id": 5},
    {"use_cache": False},
]
#: sampling: what the draw is made from must be what stock would draw from
SAMPLING = [
    {},
    {"temperature": 0.5},
    {"temperature": 1.7},
    {"top_k": 0},
    {"top_k": 1},
    {"top_k": 5},
    {"top_k": 10_000},
    {"top_p": 0.9},
    {"top_p": 0.3, "top_k": 0},
    {"top_p": 0.0},
    {"min_p": 0.1},
    {"min_p": 0.05, "top_k": 0},
    {"typical_p": 0.5},
    {"typical_p": 0.9, "top_k": 0},
    {"top_h": 0.4},
    {"epsilon_cutoff": 0.01},
    {"eta_cutoff": 0.02},
    {"temperature": 0.7, "top_k": 20, "top_p": 0.95},
    {"temperature": 0.7, "top_k": 20, "top_p": 0.95, "min_p": 0.02},
    {"temperature": 1.3, "top_k": 30, "typical_p": 0.8},
    {"repetition_penalty": 1.2, "top_p": 0.9},
    {"repetition_penalty": 1.2, "temperature": 0.8, "top_k": 12, "top_p": 0.9},
    {"no_repeat_ngram_size": 2, "top_p": 0.9},
    {"bad_words_ids": [[11]], "top_k": 7},
    {"suppress_tokens": [10, 11], "min_p": 0.03},
    {"renormalize_logits": True, "top_p": 0.9},
    {"epsilon_cutoff": 0.01, "eta_cutoff": 0.01, "typical_p": 0.9},
    {"min_new_tokens": 5, "eos_token_id": [17, 23], "top_k": 9},
    {"encoder_repetition_penalty": 1.3, "temperature": 0.9},
    {"watermarking_config": Watermark(bias=2.0), "top_k": 25},
]


@pytest.fixture(scope="module", params=["tiny", "random"])
def case(request, demo_stock, demo_tokenizer):
    """A stock model, a generator over it, and 32 ragged prompts."""
    if request.param == "tiny":
        stock = demo_stock
        prompts = [demo_tokenizer(text)["input_ids"][:60] for text in demo_prompts(32)]
    else:
        stock = random_stock(51, conv_bias=False, vocab_size=150)
        prompts = random_prompts(random.Random(0), 32, 50)
    with ContinuousBatchingGenerator(stock, cache_memory="64MiB", block_size=8) as generator:
        yield stock, generator, prompts


def arguments(options: dict, **more) -> dict:
    return {"max_new_tokens": 9, "eos_token_id": None, "pad_token_id": 0, **more, **options}


def stock_tokens(stock, prompt, **kwargs) -> list[int]:
    ids = torch.tensor([prompt])
    return stock.generate(ids, attention_mask=torch.ones_like(ids), **kwargs)[0, len(prompt) :].tolist()


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("options", GREEDY, ids=str)
@pytest.mark.parametrize("case", ["random"], indirect=True)
def test_greedy_tokens_equal_stock(case, options):
    stock, generator, prompts = case
    kwargs = arguments(options, do_sample=False)
    chosen = prompts[:2]
    outputs = generator.generate(chosen, **kwargs)
    for prompt, output in zip(chosen, outputs, strict=True):
        assert output.token_ids == stock_tokens(stock, prompt, **kwargs)
    assert generator.generate(chosen[1:], **kwargs)[0].token_ids == outputs[1].token_ids


@pytest.mark.filterwarnings("ignore")
def test_all_greedy_options_mixed_in_one_ragged_batch(case):
    stock, generator, prompts = case
    assert len(GREEDY) + len(SAMPLING) >= 60
    configs = [GenerationConfig(**arguments(options, do_sample=False)) for options in GREEDY[:32]]
    outputs = generator.generate(prompts[: len(configs)], generation_config=configs)
    for prompt, options, output in zip(prompts, GREEDY, outputs, strict=False):
        config = GenerationConfig(**arguments(options, do_sample=False))  # whose None is the model's own, as in stock
        assert output.token_ids == stock_tokens(stock, prompt, generation_config=config), options


@torch.no_grad()
def check_scores(stock, output, kwargs):
    """Every step's processed scores are those that stock's processors make of stock's logits, given our history."""
    config, _ = stock._prepare_generation_config(None, **kwargs)
    stock._prepare_special_tokens(config, True)
    prompt = output.prompt_token_ids
    config.max_length = len(prompt) + 9
    processors = stock._get_logits_processor(
        config, len(prompt), torch.tensor([prompt]), None, transformers.LogitsProcessorList(), device="cpu"
    )
    logits = stock(torch.tensor([prompt + output.token_ids])).logits[:, len(prompt) - 1 :].float()
    for step, token in enumerate(output.token_ids):
        history = torch.tensor([prompt + output.token_ids[:step]])
        expected = processors(history, logits[:, step])[0]
        got = output.scores[step]
        assert torch.equal(got.isinf(), expected.isinf()), "another choice of candidates"
        torch.testing.assert_close(got, expected, atol=1e-3, rtol=1e-4)
        assert got[token] > -float("inf")


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("options", SAMPLING, ids=str)
def test_sampling_draws_from_what_stock_would(case, options):
    stock, generator, prompts = case
    kwargs = arguments(options, do_sample=True)
    outputs = generator.generate(prompts[:3], **kwargs, seed=3, return_dict_in_generate=True, output_scores=True)
    for output in outputs:
        assert output.error is None
        check_scores(stock, output, kwargs)


@pytest.mark.filterwarnings("ignore")
def test_all_sampling_options_mixed_give_each_its_own_tokens(case):
    """Alone or in a batch of 30 different ones, a request draws the same tokens."""
    _, generator, prompts = case
    configs = [GenerationConfig(**arguments(options, do_sample=True)) for options in SAMPLING]
    mixed = generator.generate(prompts[: len(configs)], generation_config=configs, seed=5)
    # The place in the call is part of the seed, so the one alone stands behind fillers of the same number.
    for i in (0, 5, 8, 13, 17, 21, 29):
        kept = [GenerationConfig(max_new_tokens=1, do_sample=False)] * i + [configs[i]]
        alone = generator.generate(prompts[: i + 1], generation_config=kept, seed=5)
        assert alone[i].token_ids == mixed[i].token_ids, SAMPLING[i]


def test_draws_follow_the_distribution():
    """Chi-square over many seeds against stock's warped probabilities."""
    stock = random_stock(52, vocab_size=60, initializer_range=0.1)
    prompt, n = [5, 9, 13], 4000
    kwargs = {"do_sample": True, "temperature": 1.2, "top_k": 20, "top_p": 0.95, "max_new_tokens": 1}
    with ContinuousBatchingGenerator(stock, cache_memory="8MiB") as generator:
        outputs = generator.generate([prompt] * n, **kwargs, eos_token_id=None, seed=0)
    result = stock.generate(
        torch.tensor([prompt]), **kwargs, eos_token_id=None, return_dict_in_generate=True, output_scores=True
    )
    p = result.scores[0][0].softmax(-1).double()
    counts = torch.bincount(torch.tensor([o.token_ids[0] for o in outputs]), minlength=len(p)).double()
    assert counts[p == 0].sum() == 0
    p, counts = p[p > 0], counts[p > 0]
    statistic = ((counts - n * p) ** 2 / (n * p)).sum().item()
    freedom = len(p) - 1
    assert freedom >= 5 and statistic < freedom + 5 * (2 * freedom) ** 0.5  # five standard deviations


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_rows_together_equal_rows_alone(dtype):
    """The batched warpers beside stock's classes row by row, with ties as bf16 logits have them."""
    from lfm2_cb.engine.warpers import can_batch, process_rows

    rng, vocab = random.Random(0), 700
    torch.manual_seed(0)
    for _ in range(20):
        kinds = rng.choice([("temperature", "top_k", "top_p"), ("penalty", "top_k", "min_p"), ("top_p",), ("top_k",)])
        make = {
            "temperature": lambda: transformers.TemperatureLogitsWarper(rng.choice([0.3, 0.7, 1.5])),
            "top_k": lambda: transformers.TopKLogitsWarper(rng.choice([1, 3, 50, 5000])),
            "top_p": lambda: transformers.TopPLogitsWarper(rng.choice([0.2, 0.9, 0.99])),
            "min_p": lambda: transformers.MinPLogitsWarper(rng.choice([0.01, 0.2])),
            "penalty": lambda: transformers.RepetitionPenaltyLogitsProcessor(rng.choice([0.8, 1.3])),
        }
        rows = [[make[kind]() for kind in kinds] for _ in range(6)]
        assert all(can_batch(row) for row in rows)
        histories = [[rng.randrange(vocab) for _ in range(rng.randint(1, 30))] for _ in rows]
        scores = (torch.randn(6, vocab) * 3).to(dtype).float()
        got = process_rows(rows, histories, scores).full(vocab)
        for i, row in enumerate(rows):
            expected = scores[i : i + 1]
            for processor in row:
                expected = processor(torch.tensor([histories[i]]), expected)
            assert torch.equal(got[i].isinf(), expected[0].isinf())
            torch.testing.assert_close(got[i], expected[0])


# Users' own processors and criteria


class Forbid(LogitsProcessor):
    """Forbids the token that came last, and remembers what it was shown."""

    def __init__(self):
        self.shapes = []

    def __call__(self, input_ids, scores):
        self.shapes.append((tuple(input_ids.shape), tuple(scores.shape)))
        scores = scores.clone()
        scores[0, input_ids[0, -1]] = -float("inf")
        return scores


class EndsOn(StoppingCriteria):
    def __init__(self, tokens):
        self.tokens = tokens

    def __call__(self, input_ids, scores, **kwargs):
        return torch.tensor([row[-1].item() in self.tokens for row in input_ids])


def test_user_processors_and_criteria_equal_stock(case):
    stock, generator, prompts = case
    kwargs = arguments({}, do_sample=False)
    mine = Forbid()
    outputs = generator.generate(prompts[:5], **kwargs, logits_processor=[mine])
    expected = [stock_tokens(stock, p, **kwargs, logits_processor=[Forbid()]) for p in prompts[:5]]
    assert [o.token_ids for o in outputs] == expected
    assert all(ids[0] == 1 and scores[0] == 1 for ids, scores in mine.shapes) and len(mine.shapes) == 45

    stop = EndsOn({tokens[3] for tokens in expected})
    outputs = generator.generate(prompts[:5], **kwargs, logits_processor=[Forbid()], stopping_criteria=[stop])
    for prompt, output in zip(prompts, outputs, strict=False):
        assert output.finish_reason == "stop"
        criteria = transformers.StoppingCriteriaList([stop])
        assert output.token_ids == stock_tokens(
            stock, prompt, **kwargs, logits_processor=[Forbid()], stopping_criteria=criteria
        )


def test_prefix_allowed_tokens_fn_is_told_the_prompts_number(case):
    _, generator, prompts = case
    outputs = generator.generate(
        prompts[:3], **arguments({}, do_sample=False), prefix_allowed_tokens_fn=lambda i, ids: [40 + i, 50 + i]
    )
    for i, output in enumerate(outputs):
        assert set(output.token_ids) <= {40 + i, 50 + i}


@pytest.mark.parametrize("where", ["logits_processor", "stopping_criteria"])
def test_an_exception_in_a_callback_fails_its_request_alone(case, where):
    _, generator, prompts = case

    def broken(input_ids, scores, **kwargs):
        if input_ids[0, : len(prompts[1])].tolist() == prompts[1]:
            raise KeyError("mine")
        return scores if where == "logits_processor" else torch.tensor([False])

    fine = generator.generate(prompts[:3], **arguments({}, do_sample=False))
    outputs = generator.generate(prompts[:3], **arguments({}, do_sample=False), **{where: [broken]})
    assert [o.finish_reason for o in outputs] == ["length", "error", "length"]
    assert isinstance(outputs[1].error, KeyError)
    assert [outputs[0].token_ids, outputs[2].token_ids] == [fine[0].token_ids, fine[2].token_ids]


@pytest.mark.parametrize("stop", ["the", " a", ["you", "ing"], "e w", [", and"]], ids=str)
def test_stop_strings_equal_stock(demo_stock, demo_tokenizer, stop):
    texts = demo_prompts(8)
    kwargs = {"do_sample": False, "max_new_tokens": 16, "stop_strings": stop}
    with ContinuousBatchingGenerator(demo_stock, demo_tokenizer, cache_memory="64MiB") as generator:
        outputs = generator.generate(texts, **kwargs)
    for text, output in zip(texts, outputs, strict=True):
        ids = demo_tokenizer(text, return_tensors="pt")["input_ids"]
        expected = demo_stock.generate(ids, **kwargs, tokenizer=demo_tokenizer)[0, ids.shape[1] :].tolist()
        assert output.token_ids == expected
    assert {o.finish_reason for o in outputs} >= {"stop"}


def test_stop_strings_need_a_tokenizer(case):
    _, generator, prompts = case
    with pytest.raises(ValueError, match="tokenizer"):
        generator.generate(prompts[:1], stop_strings="a")


def test_max_time_ends_a_request(case):
    _, generator, prompts = case
    start = time.monotonic()
    (output,) = generator.generate([prompts[0]], max_new_tokens=3000, max_time=0.3, do_sample=False, eos_token_id=None)
    assert output.finish_reason == "stop" and 0 < len(output.token_ids) < 3000
    assert time.monotonic() - start >= 0.3


# Outputs in stock's shapes


def test_return_dict_has_stocks_scores_and_logits(case):
    stock, generator, prompts = case
    ids = torch.tensor([p[:4] for p in prompts if len(p) >= 4][:5])
    kwargs = arguments({"repetition_penalty": 1.3}, do_sample=False) | {
        "return_dict_in_generate": True,
        "output_scores": True,
        "output_logits": True,
    }
    expected, got = stock.generate(ids, **kwargs), generator.generate(ids, **kwargs)
    assert type(got) is type(expected) and torch.equal(got.sequences, expected.sequences)
    for name in ("scores", "logits"):
        assert len(got[name]) == len(expected[name])
        for a, b in zip(got[name], expected[name], strict=True):
            torch.testing.assert_close(a, b, atol=1e-3, rtol=1e-4)


def test_logprobs_are_the_models_own(case):
    stock, generator, prompts = case
    (output,) = generator.generate([prompts[0]], **arguments({}, do_sample=False), logprobs=3)
    assert len(output.logprobs) == len(output.token_ids)
    logits = stock(torch.tensor([prompts[0] + output.token_ids])).logits[0, len(prompts[0]) - 1 :]
    for entry, token, row in zip(output.logprobs, output.token_ids, logits, strict=False):
        assert entry.token_id == token == entry.top[0][0] and len(entry.top) == 3
        assert entry.logprob == pytest.approx(row.log_softmax(-1)[token].item(), abs=1e-4)
    with pytest.raises(ValueError, match="logprobs"):
        generator.generate([prompts[0]], logprobs=-1)


# Handed over, or refused


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(
    "options",
    [
        {"num_beams": 3},
        {"num_beams": 3, "num_return_sequences": 2, "length_penalty": 0.5, "early_stopping": True},
        {"guidance_scale": 1.5},
    ],
    ids=str,
)
def test_what_only_stock_can_do_is_handed_over_exactly(case, options):
    stock, generator, prompts = case
    kwargs = arguments(options, do_sample=False)
    n = options.get("num_return_sequences", 1)
    outputs = generator.generate(prompts[:2], **kwargs)
    for i, prompt in enumerate(prompts[:2]):
        ids = torch.tensor([prompt])
        expected = stock.generate(ids, attention_mask=torch.ones_like(ids), **kwargs)[:, len(prompt) :].tolist()
        assert [o.token_ids for o in outputs[i * n : (i + 1) * n]] == expected
    ids = torch.tensor([p[:3] for p in prompts[:3] if len(p) >= 3])
    assert torch.equal(generator.generate(ids, **kwargs), stock.generate(ids, **kwargs))
    with pytest.raises(UnsupportedOptionError, match=next(iter(options))):
        next(iter(generator.stream(prompts[:1], **kwargs)))
    with pytest.raises(UnsupportedOptionError, match=next(iter(options))):
        generator.submit(prompts[0], **kwargs)


@pytest.mark.parametrize(
    "option",
    [
        {"num_beams": {}},
        {"num_beams": 2, "length_penalty": "long"},
        {"num_beams": 2, "early_stopping": 3},
        {"guidance_scale": [1.5]},
        {"output_hidden_states": (None,)},
        {"output_attentions": 1},
    ],
    ids=str,
)
def test_what_is_handed_over_is_of_the_right_kind_or_refused_by_name(case, option):
    _, generator, prompts = case
    with pytest.raises(ValueError, match=list(option)[-1]):
        generator.generate(prompts[:1], **arguments(option, do_sample=False))


def test_attentions_and_hidden_states_are_handed_over(case):
    _, generator, prompts = case
    ids = torch.tensor([prompts[0]])
    kwargs = arguments({}, do_sample=False) | {"return_dict_in_generate": True, "output_hidden_states": True}
    assert generator.generate(ids, **kwargs).hidden_states is not None


@pytest.mark.parametrize(
    "options",
    [
        {"penalty_alpha": 0.6},
        {"dola_layers": "low"},
        {"assistant_early_exit": 3},
        {"force_words_ids": [[5]]},
        {"constraints": [object()]},
        {"token_healing": True},
        {"cache_implementation": "quantized"},
        {"prefill_chunk_size": 4},
        {"num_beam_groups": 2},
        {"diversity_penalty": 0.5},
        {"assistant_tokenizer": object()},
        {"negative_prompt_ids": torch.ones(1, 1)},
        {"position_ids": torch.ones(1, 1)},
        {"inputs_embeds": torch.ones(1, 1, 1)},
        {"temprature": 0.5},
    ],
    ids=lambda options: next(iter(options)),
)
@pytest.mark.filterwarnings("ignore")
def test_what_cannot_be_honoured_is_refused_by_name(case, options):
    _, generator, prompts = case
    with pytest.raises(UnsupportedOptionError, match=next(iter(options))):
        generator.generate(prompts[:1], **options)


def test_every_field_of_generation_config_has_been_thought_of():
    from lfm2_cb.requests.options import HONOURED, INERT, LEFT_TO_STOCK

    fields = {name for name in vars(GenerationConfig()) if not name.startswith("_")}
    assert fields >= HONOURED | LEFT_TO_STOCK | INERT - {"transformers_version"}
    assert not (HONOURED & LEFT_TO_STOCK or HONOURED & INERT or LEFT_TO_STOCK & INERT)


def test_synthid_watermarks_equal_stock(case):
    stock, generator, prompts = case
    config = SynthIDTextWatermarkingConfig(ngram_len=3, keys=[11, 22, 33])
    kwargs = arguments({"watermarking_config": config}, do_sample=False)
    outputs = generator.generate(prompts[:3], **kwargs)
    assert [o.token_ids for o in outputs] == [stock_tokens(stock, p, **kwargs) for p in prompts[:3]]


def test_custom_generate_runs_the_engine(demo_stock):
    folder = str(Path(__file__).parents[2] / "integrations")
    ids = torch.tensor([[1, 50, 60, 70]])
    kwargs = {"max_new_tokens": 6, "do_sample": False}
    door = {"custom_generate": folder, "trust_remote_code": True}
    assert torch.equal(demo_stock.generate(ids, **door, **kwargs), demo_stock.generate(ids, **kwargs))
    outputs = demo_stock.generate([[1, 50], [1, 60, 70, 80]], **door, **kwargs, generator_kwargs={"max_sequences": 2})
    assert [o.token_ids for o in outputs] == [
        stock_tokens(demo_stock, p, **kwargs) for p in ([1, 50], [1, 60, 70, 80])
    ]
    with pytest.raises(ValueError, match="negative_prompt_ids"):
        demo_stock.generate(ids, **door, negative_prompt_ids=ids, **kwargs)


def test_custom_generate_takes_an_assistant(demo_stock, monkeypatch):
    drafted, propose = [], AssistantModel.propose
    monkeypatch.setattr(AssistantModel, "propose", lambda *args: (drafted.append(1), propose(*args))[1])
    ids = torch.tensor([[5, 6, 7, 8]])
    options = {"do_sample": False, "max_new_tokens": 12}
    folder = str(Path(__file__).parents[2] / "integrations")
    door = {"custom_generate": folder, "trust_remote_code": True}
    answer = demo_stock.generate(ids, assistant_model=demo_stock, **door, **options)
    assert torch.equal(answer, demo_stock.generate(ids, **options)) and drafted
