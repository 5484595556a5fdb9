"""Our network beside stock's `Lfm2ForCausalLM`, in fp32, on random configs."""

import pytest
import torch
from helpers import ours, random_stock, stock_greedy

SEEDS = range(20)
LEFT = torch.tensor([[0, 0, 0, 1, 1, 1, 1, 1, 1], [1] * 9, [0] + [1] * 8])
RIGHT = torch.tensor([[1, 1, 1, 1, 1, 1, 0, 0, 0], [1] * 9, [1] * 8 + [0]])


def ids(seed: int, batch: int = 3, length: int = 9) -> torch.Tensor:
    return torch.randint(3, 60, (batch, length), generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("mask", [None, LEFT, RIGHT], ids=["unpadded", "left", "right"])
@pytest.mark.parametrize("seed", SEEDS)
def test_logits_loss_and_gradients_equal_stock(seed, mask):
    stock = random_stock(seed)
    model = ours(stock)
    labels = ids(seed).clone()
    labels[0, :4] = -100
    expected = stock(ids(seed), attention_mask=mask, labels=labels)
    got = model(ids(seed), attention_mask=mask, labels=labels)
    torch.testing.assert_close(got.logits, expected.logits, atol=1e-4, rtol=0)
    torch.testing.assert_close(got.loss, expected.loss, atol=1e-5, rtol=0)

    # The stock parameters are views of ours after adoption, so autograd gives each its own .grad.
    expected.loss.backward()
    expected_grads = {name: p.grad.clone() for name, p in stock.named_parameters()}
    stock.zero_grad()
    got.loss.backward()
    for name, p in model.named_parameters():
        parts = {"qkv_proj": ("q_proj", "k_proj", "v_proj"), "w13": ("w1", "w3")}
        fused = next((key for key in parts if key in name), None)
        if fused:
            wanted = torch.cat([expected_grads[name.replace(fused, part)] for part in parts[fused]])
        else:
            wanted = expected_grads[name]
        torch.testing.assert_close(p.grad, wanted, atol=1e-4, rtol=0, msg=name)


@torch.no_grad()
@pytest.mark.parametrize("seed", SEEDS)
def test_cached_continuation_equals_stock_and_the_full_forward(seed):
    stock = random_stock(seed)
    model = ours(stock)
    whole = ids(seed, 2, 12)
    expected = stock(whole).logits
    for cut in ([5, 1, 1, 1, 4], [1, 1, 10], [12], [2, 2, 8]):
        caches, start = [None, None], 0
        for n in cut:
            chunk = whole[:, start : start + n]
            a = stock(chunk, past_key_values=caches[0], use_cache=True)
            b = model(chunk, past_key_values=caches[1], use_cache=True)
            caches = [a.past_key_values, b.past_key_values]
            torch.testing.assert_close(b.logits, a.logits, atol=1e-4, rtol=0)
            torch.testing.assert_close(b.logits, expected[:, start : start + n], atol=1e-4, rtol=0)
            start += n


@torch.no_grad()
@pytest.mark.parametrize("seed", range(0, 20, 3))
def test_stock_generate_runs_on_our_model(seed):
    stock = random_stock(seed)
    model = ours(stock)
    kwargs = {"attention_mask": LEFT, "max_new_tokens": 6, "do_sample": False, "eos_token_id": None}
    assert torch.equal(model.generate(ids(seed), **kwargs), stock.generate(ids(seed), **kwargs))
    beams = {**kwargs, "num_beams": 3}
    assert torch.equal(model.generate(ids(seed), **beams), stock.generate(ids(seed), **beams))


@pytest.mark.parametrize("seed", [0, 1, 2])
def test_gradient_checkpointing_changes_no_gradient(seed):
    model = ours(random_stock(seed)).train()
    model(ids(seed), labels=ids(seed)).loss.backward()
    plain = {name: p.grad.clone() for name, p in model.named_parameters()}
    model.zero_grad()
    model.gradient_checkpointing_enable()
    model(ids(seed), labels=ids(seed)).loss.backward()
    for name, p in model.named_parameters():
        torch.testing.assert_close(p.grad, plain[name], msg=name)


@torch.no_grad()
@pytest.mark.parametrize("implementation", ["eager", "sdpa"])
def test_attention_backends_hidden_states_and_attentions(implementation):
    stock = random_stock(7)
    stock.set_attn_implementation(implementation)
    model = ours(stock)
    kwargs = {"attention_mask": LEFT, "output_hidden_states": True, "output_attentions": implementation == "eager"}
    expected, got = stock(ids(7), **kwargs), model(ids(7), **kwargs)
    torch.testing.assert_close(got.logits, expected.logits, atol=1e-4, rtol=0)
    assert len(got.hidden_states) == len(expected.hidden_states)
    for a, b in zip(got.hidden_states, expected.hidden_states, strict=True):
        torch.testing.assert_close(a, b, atol=1e-4, rtol=0)
    if implementation == "eager":
        assert len(got.attentions) == len(expected.attentions) > 0
        for a, b in zip(got.attentions, expected.attentions, strict=True):
            torch.testing.assert_close(a, b, atol=1e-4, rtol=0)


@torch.no_grad()
def test_the_other_ways_to_call_it():
    stock = random_stock(3)
    model = ours(stock)
    full = model(ids(3)).logits
    torch.testing.assert_close(model(ids(3), logits_to_keep=2).logits, full[:, -2:])
    embeds = model.get_input_embeddings()(ids(3))
    torch.testing.assert_close(model(inputs_embeds=embeds).logits, full)
    positions = torch.arange(4, 13).unsqueeze(0)
    expected = stock(ids(3), position_ids=positions).logits
    torch.testing.assert_close(model(ids(3), position_ids=positions).logits, expected, atol=1e-4, rtol=0)
    assert model(ids(3), use_cache=False).past_key_values is None
    assert isinstance(model(ids(3), return_dict=False), tuple)
    with pytest.raises(ValueError, match="exactly one"):
        model(input_ids=ids(3), inputs_embeds=embeds)


@pytest.mark.parametrize(
    "rope",
    [
        {"rope_type": "default", "rope_theta": 777.0},
        {"rope_type": "linear", "rope_theta": 1e4, "factor": 2.0},
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
    stock = random_stock(5, rope_parameters=rope)
    model = ours(stock)
    torch.testing.assert_close(model(ids(5)).logits, stock(ids(5)).logits, atol=1e-4, rtol=0)


@torch.no_grad()
def test_bf16_error_is_no_larger_than_stocks():
    torch.manual_seed(0)
    ours_error = stock_error = 0.0
    for seed in range(8):
        stock = random_stock(seed)
        reference = stock(ids(seed)).logits
        stock = stock.to(torch.bfloat16)
        stock_error += (stock(ids(seed)).logits.float() - reference).abs().mean().item()
        ours_error += (ours(stock)(ids(seed)).logits.float() - reference).abs().mean().item()
    assert 0 < ours_error <= stock_error * 1.05  # both round at every layer: equal up to chance


def test_training_a_few_steps_lowers_the_loss():
    model = ours(random_stock(2)).train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    losses = []
    for _ in range(8):
        loss = model(ids(2), labels=ids(2)).loss
        losses.append(loss.item())
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    assert losses[-1] < losses[0] - 0.3


def test_stock_greedy_helper_really_generates():
    assert len(stock_greedy(random_stock(1), [5, 6, 7], 4)) == 4
