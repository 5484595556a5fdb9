"""What a step reads of the weights, by its number of tokens."""

import pytest
import torch
from helpers import ours, random_moe, random_stock

from lfm2_cb.model.quantization import quantize
from lfm2_cb.model.weight_bytes import WeightBytes
from lfm2_cb.ops.experts import expected_experts


def test_a_dense_model_reads_all_its_weights_whatever_the_tokens():
    model = ours(random_stock(3))
    bytes_read = WeightBytes(model)
    assert bytes_read(1) == bytes_read(500)
    embedding = 0 if model.config.tie_word_embeddings else model.model.embed_tokens.weight.nbytes
    assert bytes_read(1) == sum(p.nbytes for p in model.parameters()) - embedding


@pytest.mark.parametrize("weights", [None, "int4"])
def test_a_token_more_reads_experts_more(weights):
    model = ours(random_moe(1, num_experts=16, num_experts_per_tok=4, num_dense_layers=0, tie_word_embeddings=True))
    model = model if weights is None else quantize(model, weights)
    bytes_read = WeightBytes(model)
    experts = sum(p.nbytes for name, p in model.named_parameters() if ".experts." in name)
    everything = sum(p.nbytes for p in model.parameters())
    assert bytes_read(1) == pytest.approx(everything - experts * 3 / 4)
    assert bytes_read(2) == pytest.approx(everything - experts * 9 / 16)
    assert bytes_read(1000) == pytest.approx(everything)


def test_the_experts_that_tokens_touch():
    torch.manual_seed(0)
    touched = [len(torch.rand(5, 32).topk(4).indices.unique()) for _ in range(2000)]
    assert expected_experts(32, 4, 5) == pytest.approx(sum(touched) / len(touched), rel=0.01)
    assert expected_experts(32, 4, 1) == 4 and expected_experts(8, 8, 3) == 8
