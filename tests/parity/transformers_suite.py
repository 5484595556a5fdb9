"""transformers' own tests of any model, run on our classes: collected by `test_transformers_suite.py` beside them."""

import unittest

import torch

from lfm2_cb import Lfm2CbConfig, Lfm2CbForCausalLM, Lfm2CbModel

from .test_configuration_common import ConfigTester
from .test_modeling_common import ModelTesterMixin, ids_tensor


class Tester:
    """What the mixin asks of a model's tests: a small config, and inputs."""

    def __init__(self):
        self.batch_size, self.seq_length, self.is_training = 3, 7, True
        self.hidden_size, self.num_hidden_layers, self.num_attention_heads = 32, 2, 4

    def get_config(self):
        return Lfm2CbConfig(
            vocab_size=99,
            hidden_size=self.hidden_size,
            intermediate_size=37,
            num_hidden_layers=self.num_hidden_layers,
            num_attention_heads=self.num_attention_heads,
            num_key_value_heads=2,
            layer_types=["full_attention", "conv"],
            max_position_embeddings=512,
            block_multiple_of=16,
        )

    def prepare_config_and_inputs_for_common(self):
        ids = ids_tensor([self.batch_size, self.seq_length], 99)
        return self.get_config(), {"input_ids": ids, "attention_mask": torch.ones_like(ids).tril()}


class OurModelTest(ModelTesterMixin, unittest.TestCase):
    all_model_classes = (Lfm2CbModel, Lfm2CbForCausalLM)
    _torch_compile_train_cls = Lfm2CbForCausalLM

    def setUp(self):
        self.model_tester = Tester()
        self.config_tester = ConfigTester(self, config_class=Lfm2CbConfig, hidden_size=32)

    def _prepare_for_class(self, inputs_dict, model_class, return_labels=False):
        """The mixin makes labels for the classes that it knows by name."""
        inputs = super()._prepare_for_class(inputs_dict, model_class, return_labels=return_labels)
        if return_labels and model_class is Lfm2CbForCausalLM:
            inputs["labels"] = torch.zeros_like(inputs["input_ids"])
        return inputs

    def check_training_gradient_checkpointing(self, *args, **kwargs):
        self.all_model_classes = (Lfm2CbForCausalLM,)  # the base model has no loss
        super().check_training_gradient_checkpointing(*args, **kwargs)

    def test_training(self):
        self.all_model_classes = (Lfm2CbForCausalLM,)
        super().test_training()

    def test_config(self):
        self.config_tester.run_common_tests()

    def test_reverse_loading_mapping(self, *args, **kwargs):
        kwargs["skip_base_model"] = True  # the base class is also that of mixtures of experts, with their conversions
        super().test_reverse_loading_mapping(*args, **kwargs)

    @unittest.skip("counts an attention a layer: stock's LFM2 replaces it too, and tests/parity has its equal")
    def test_attention_outputs(self):
        pass

    @unittest.skip("its tests are not in the source distribution")
    def test_generation_tester_mixin_inheritance(self):
        pass
