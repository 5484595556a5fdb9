"""Our network beside stock's `Lfm2ForCausalLM`, in fp32, on random configs."""

import pytest
import torch
from helpers import ids, ours, random_config, random_stock, stock_greedy, taken_gradients

SEEDS = range(20)
LEFT = torch.tensor([[0, 0, 0, 1, 1, 1, 1, 1, 1], [1] * 9, [0] + [1] * 8])
RIGHT = torch.tensor([[1, 1, 1, 1, 1, 1, 0, 0, 0], [1] * 9, [1] * 8 + [0]])
MASKS = [None, LEFT, RIGHT]
EVERY_MASK = pytest.mark.parametrize("mask", MASKS, ids=["unpadded", "left", "right"])
GREEDY = {"max_new_tokens": 6, "do_sample": False, "eos_token_id": None}


def assert_equal(got: torch.Tensor, expected: torch.Tensor) -> None:
    torch.testing.assert_close(got, expected, atol=1e-4, rtol=0)


def assert_same_gradients(model, expected: dict[str, torch.Tensor]) -> None:
    found = {name: p.grad for name, p in model.named_parameters()}
    assert found.keys() == expected.keys()
    for name, gradient in found.items():
        torch.testing.assert_close(gradient, expected[name], atol=1e-4, rtol=0, msg=name)


def test_the_random_configs_cover_the_family():
    configs = [random_config(seed) for seed in SEEDS]
    assert {c.conv_L_cache for c in configs if "conv" in c.layer_types} == {2, 3, 4, 5}
    for switch in ("conv_bias", "tie_word_embeddings", "block_auto_adjust_ff_dim"):
        assert {getattr(c, switch) for c in configs} == {True, False}, switch
    assert {c.num_attention_heads // c.num_key_value_heads for c in configs} == {1, 2, 3}
    assert {c.num_attention_heads % 2 for c in configs} == {0, 1}
    stated = [hasattr(c, "head_dim") for c in configs]
    assert any(stated) and not all(stated)


# One forward


@EVERY_MASK
@pytest.mark.parametrize("seed", SEEDS)
def test_logits_loss_and_gradients_equal_stock(seed, mask):
    stock = random_stock(seed)
    model = ours(stock)
    labels = ids(seed).clone()
    labels[0, :4] = -100
    expected = stock(ids(seed), attention_mask=mask, labels=labels)
    got = model(ids(seed), attention_mask=mask, labels=labels)
    assert_equal(got.logits, expected.logits)
    torch.testing.assert_close(got.loss, expected.loss, atol=1e-5, rtol=0)
    expected.loss.backward()
    gradients = taken_gradients(stock)
    got.loss.backward()
    assert_same_gradients(model, gradients)


@EVERY_MASK
@pytest.mark.parametrize("implementation", ["eager", "sdpa"])
@pytest.mark.parametrize("seed", [4, 6, 9, 18])
@torch.no_grad()
def test_hidden_states_and_attentions_equal_stock(seed, implementation, mask):
    stock = random_stock(seed)
    model = ours(stock)
    for either in (stock, model):
        either.set_attn_implementation(implementation)
        assert either.model.config._attn_implementation == implementation
    kwargs = {"attention_mask": mask, "output_hidden_states": True, "output_attentions": implementation == "eager"}
    for a, b in ((stock, model), (stock.model, model.model)):
        expected, got = a(ids(seed), **kwargs), b(ids(seed), **kwargs)
        assert_equal(got[0], expected[0])
        for name in ("hidden_states", "attentions") if implementation == "eager" else ("hidden_states",):
            assert len(got[name]) == len(expected[name]) > 0
            for one, other in zip(got[name], expected[name], strict=True):
                assert_equal(one, other)


CAUSAL_BUT_THE_SECOND = torch.ones(9, 9).tril().bool().index_fill(1, torch.tensor([1]), False).expand(3, 1, 9, 9)


@pytest.mark.parametrize(
    "kwargs",
    [
        {"logits_to_keep": 1},
        {"logits_to_keep": 4},
        {"logits_to_keep": torch.tensor([0, 3, 5])},
        {"position_ids": torch.arange(4, 13).unsqueeze(0)},
        {"position_ids": torch.arange(27).view(3, 9), "attention_mask": LEFT},
        {"attention_mask": CAUSAL_BUT_THE_SECOND},
        {"labels": ids(1), "num_items_in_batch": 7},
        {"labels": ids(1).masked_fill(LEFT == 0, -100), "attention_mask": LEFT},
        {"use_cache": False},
        {"use_cache": True, "return_dict": False},
        {"use_cache": False, "return_dict": False, "labels": ids(1)},
    ],
    ids=lambda kwargs: " ".join(kwargs),
)
@pytest.mark.parametrize("seed", [1, 3])
@torch.no_grad()
def test_every_way_to_call_it_equals_stock(seed, kwargs):
    stock = random_stock(seed)
    model = ours(stock)
    expected, got = stock(ids(seed), **kwargs), model(ids(seed), **kwargs)
    assert type(got) is type(expected) and len(got) == len(expected)
    if isinstance(got, tuple):
        assert_equal(got[0], expected[0])
        return
    assert got.keys() == expected.keys()
    assert_equal(got.logits, expected.logits)
    if expected.loss is not None:
        assert_equal(got.loss, expected.loss)


@torch.no_grad()
def test_embeddings_in_place_of_tokens():
    stock = random_stock(3)
    model = ours(stock)
    embeds = model.get_input_embeddings()(ids(3))
    got = model(inputs_embeds=embeds, attention_mask=LEFT).logits
    assert_equal(got, stock(inputs_embeds=embeds, attention_mask=LEFT).logits)
    assert torch.equal(got, model(ids(3), attention_mask=LEFT).logits)
    with pytest.raises(ValueError, match="exactly one"):
        model(input_ids=ids(3), inputs_embeds=embeds)
    with pytest.raises(ValueError, match="exactly one"):
        model()


@pytest.mark.parametrize(
    "rope",
    [
        {"rope_type": "default", "rope_theta": 777.0},
        {"rope_type": "linear", "rope_theta": 1e4, "factor": 2.0},
        {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0},
        {"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0, "original_max_position_embeddings": 64},
        {
            "rope_type": "llama3",
            "rope_theta": 1e4,
            "factor": 8.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 64,
        },
    ],
    ids=lambda rope: rope["rope_type"],
)
@torch.no_grad()
def test_rope_variants_equal_stock(rope):
    stock = random_stock(5, rope_parameters=rope, max_position_embeddings=8)
    model = ours(stock)
    plain = random_stock(5, max_position_embeddings=8)
    assert (stock(ids(5)).logits - plain(ids(5)).logits).abs().max() > 1e-2  # the variant changes something
    for length in (9, 30, 4):  # "dynamic" stretches with the longest sequence seen, and goes back
        assert_equal(model(ids(5, length=length)).logits, stock(ids(5, length=length)).logits)


@torch.no_grad()
def test_bf16_error_is_no_larger_than_stocks():
    ours_error = stock_error = 0.0
    for seed in range(8):
        stock = random_stock(seed)
        reference = stock(ids(seed)).logits
        stock = stock.to(torch.bfloat16)
        stock_error += (stock(ids(seed)).logits.float() - reference).abs().mean().item()
        ours_error += (ours(stock)(ids(seed)).logits.float() - reference).abs().mean().item()
    assert 0 < ours_error <= stock_error * 1.05  # both round at every layer: equal up to chance


# With a cache


@pytest.mark.parametrize("seed", SEEDS)
@torch.no_grad()
def test_cached_continuation_equals_stock(seed):
    """A prompt, then token by token; chunks of several tokens; all at once. Padding reaches across the chunks.

    Every convolution kernel meets every mask.
    """
    stock, mask = random_stock(seed, conv_L_cache=2 + seed % 4), MASKS[seed % 3]
    model = ours(stock)
    whole = stock(ids(seed)).logits
    for cut in ([5, 1, 1, 1, 1], [1, 1, 7], [9], [2, 2, 5]):
        caches, start = [None, None], 0
        for end in torch.tensor(cut).cumsum(0).tolist():
            chunk = ids(seed)[:, start:end]
            kwargs = {"use_cache": True, "attention_mask": None if mask is None else mask[:, :end]}
            expected = stock(chunk, past_key_values=caches[0], **kwargs)
            got = model(chunk, past_key_values=caches[1], **kwargs)
            caches = [expected.past_key_values, got.past_key_values]
            assert_equal(got.logits, expected.logits)
            if mask is None:
                assert_equal(got.logits, whole[:, start:end])
            start = end
        assert caches[1].get_seq_length() == 9


@pytest.mark.parametrize("seed", [0, 3, 5, 12])
@torch.no_grad()
def test_a_cache_that_stock_filled_is_continued_by_ours_and_back(seed):
    stock = random_stock(seed)
    model = ours(stock)
    whole, cache, start = stock(ids(seed)).logits, None, 0
    for turn, end in enumerate((3, 4, 7, 9)):
        either = (stock, model)[turn % 2]
        out = either(ids(seed)[:, start:end], past_key_values=cache, use_cache=True)
        assert_equal(out.logits, whole[:, start:end])
        cache, start = out.past_key_values, end


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"num_beams": 3},
        {"do_sample": True, "temperature": 0.8, "num_return_sequences": 2},
        {"cache_implementation": "static"},
        {"use_cache": False},
    ],
    ids=str,
)
@pytest.mark.parametrize("seed", [0, 9, 12])
@torch.no_grad()
def test_stock_generate_runs_on_our_model(seed, options):
    stock = random_stock(seed)
    kwargs = {"attention_mask": LEFT, **GREEDY, **options}
    answers = []
    for model in (stock, ours(stock)):
        torch.manual_seed(seed)
        answers.append(model.generate(ids(seed), **kwargs))
    assert torch.equal(*answers) and answers[0].shape[1] == 15


@pytest.mark.parametrize("seed", [0, 9, 12])
@torch.no_grad()
def test_generate_goes_on_from_a_returned_cache(seed):
    stock = random_stock(seed)
    conversations = []
    for model in (stock, ours(stock)):
        turn = model.generate(ids(seed, batch=1), **GREEDY, return_dict_in_generate=True)
        prompt = torch.cat([turn.sequences, ids(seed + 1, batch=1, length=4)], dim=1)
        conversations.append(model.generate(prompt, past_key_values=turn.past_key_values, **GREEDY))
    assert torch.equal(*conversations)
    assert conversations[0][0, -6:].tolist() == stock_greedy(stock, conversations[0][0, :-6].tolist(), 6)


# Training


@pytest.mark.parametrize("use_reentrant", [True, False])
@pytest.mark.parametrize("seed", [0, 1, 10])
def test_gradient_checkpointing_gives_stocks_gradients(seed, use_reentrant):
    stock = random_stock(seed)
    model = ours(stock).train()
    model.activation_checkpointing_enable({"use_reentrant": use_reentrant})
    replayed = []
    model.model.layers[0].operator_norm.register_forward_hook(lambda *_: replayed.append(1))
    stock.train()(ids(seed), attention_mask=LEFT, labels=ids(seed)).loss.backward()
    gradients = taken_gradients(stock)
    model(ids(seed), attention_mask=LEFT, labels=ids(seed)).loss.backward()
    assert len(replayed) == 2
    assert_same_gradients(model, gradients)


@pytest.mark.parametrize("seed", [2, 10])
def test_training_steps_lower_the_loss_as_stocks_do(seed):
    curves = []
    for model in (random_stock(seed).train(), ours(random_stock(seed)).train()):
        optimizer = torch.optim.SGD(model.parameters(), lr=3e-3)
        losses = []
        for _ in range(6):
            loss = model(ids(seed), labels=ids(seed)).loss
            losses.append(loss.item())
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        curves.append(losses)
    assert curves[1] == pytest.approx(curves[0], abs=1e-3)
    assert curves[1][-1] < curves[1][0] - 0.05
