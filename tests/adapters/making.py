"""Random adapters that PEFT itself has made and saved, and PEFT's answers with them."""

from __future__ import annotations

import copy
import warnings

import peft
import torch

ALL = ["q_proj", "k_proj", "v_proj", "out_proj", "in_proj", "w1", "w2", "w3"]


def save_adapter(stock, folder, seed=0, change=None, std=0.15, **config):
    """An adapter over a copy of a stock model, with weights of ordinary scale in all its tensors. Returns: its path.

    change: called with the PeftModel before it is saved.
    """
    torch.manual_seed(seed)
    fields = {"r": 4, "lora_alpha": 8, "target_modules": ALL, "init_lora_weights": False, **config}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model = peft.get_peft_model(copy.deepcopy(stock), peft.LoraConfig(**fields))
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                if "lora_A" in name or "lora_B" in name:
                    parameter.normal_(std=std)
                elif "magnitude" in name:
                    parameter.mul_(1 + 0.3 * torch.randn_like(parameter))
        if change is not None:
            with torch.no_grad():
                change(model)
        model.save_pretrained(str(folder))
    return str(folder)


class Peft:
    """PEFT's own answers: one prompt at a time, with one adapter."""

    def __init__(self, stock):
        self.stock, self._models = stock, {}

    @torch.no_grad()
    def greedy(self, path, prompt, max_new_tokens, **kwargs):
        """New tokens; path None: of the base."""
        if path not in self._models:
            model = copy.deepcopy(self.stock)
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                self._models[path] = model if path is None else peft.PeftModel.from_pretrained(model, path).eval()
        options = {"do_sample": False, "eos_token_id": None, "max_new_tokens": max_new_tokens, **kwargs}
        output = self._models[path].generate(input_ids=torch.tensor([prompt]), **options)
        return output[0, len(prompt) :].tolist()

    def forget(self, path):
        self._models.pop(path, None)
