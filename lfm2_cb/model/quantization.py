"""Models with low-bit weights: which layers are replaced, and how transformers loads and saves them.

`config.json` of a quantised checkpoint has `"quantization_config": {"quant_method": "lfm2_cb", "weights": "int8"}`, by
which transformers finds the quantizer here; the weights lie in its safetensors as our layers hold them. A checkpoint
in full precision is quantised while it is loaded, one matrix after another, so that no full copy is ever in memory.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel
from transformers.core_model_loading import ConversionOps, WeightConverter, WeightRenaming
from transformers.quantizers.base import HfQuantizer
from transformers.utils.quantization_config import QuantizationConfigMixin

from ..ops.experts import Experts, QuantizedExperts
from ..ops.linear.quantized import QuantizedEmbedding, QuantizedLinear, QuantizedStack
from ..ops.memory import return_free_memory
from .experts import Lfm2CbSparseMLP
from .foreign_code import foreign_code
from .layers import FusedLinear
from .modeling import Lfm2CbForCausalLM, Lfm2CbPreTrainedModel, class_for

QUANT_METHOD = "lfm2_cb"
#: what `weights=` may be → bits of the layers' matrices. (Embedding and head have 8 in both: one matrix, where tied.)
WEIGHTS = {"int8": 8, "int4": 4}

#: the modules that hold quantised matrices
QUANTIZED = (QuantizedLinear, QuantizedEmbedding, QuantizedStack)

#: where torch's own quantised layers are defined
TORCH_QUANTIZED = ("torch.ao.nn.quantized", "torch.ao.nn.intrinsic.quantized")

#: end of the message that refuses models that another library has quantised
OTHERS_REFUSED = 'which lfm2_cb does not run: load it in full precision, and pass weights="int8" or "int4"'


class Lfm2CbQuantizationConfig(QuantizationConfigMixin):
    """What `from_pretrained(..., quantization_config=)` takes, and what a checkpoint's `config.json` says.

    Args: weights: "int8" (a scale a channel) or "int4" (a scale for every 32 inputs; embedding and head in 8 bits).
    Raises: ValueError: anything else.
    """

    def __init__(self, weights: str = "int8", quant_method: str = QUANT_METHOD) -> None:
        check_weights(weights)
        if quant_method != QUANT_METHOD:
            raise ValueError(f"quant_method must be {QUANT_METHOD!r}, got {quant_method!r}")
        self.weights, self.quant_method = weights, quant_method  # type: ignore[assignment]  # no enum takes ours


def check_weights(weights: str) -> None:
    """Raises: ValueError: not one of `WEIGHTS`."""
    if weights not in WEIGHTS:
        raise ValueError(f"weights must be one of {', '.join(map(repr, WEIGHTS))} or None, got {weights!r}")


def check_device(weights: str | None, device: torch.device) -> None:
    """Raises: ValueError: low-bit weights that no kernel multiplies there. (torch's own, `_weight_int8pack_mm` and
    `_weight_int4pack_mm`, take other layouts and leave inputs unrounded, so their results would differ.)"""
    if weights is not None and device.type not in ("cpu", "meta"):
        raise ValueError(
            f'weights={weights!r} runs on CPUs only, and not on {device}: load in full precision ("bfloat16"); '
            'cache_dtype="int8" saves memory there'
        )


class Lfm2CbQuantizer(HfQuantizer):
    """Puts quantised layers into a model that transformers is about to load, and quantises what goes into them."""

    quantization_config: Lfm2CbQuantizationConfig  # type: ignore[assignment]  # as in transformers' own quantizers

    def param_needs_quantization(self, model: PreTrainedModel, param_name: str, **kwargs: Any) -> bool:
        owner, _, leaf = param_name.rpartition(".")
        is_quantized = isinstance(model.get_submodule(owner), QUANTIZED)
        return leaf == "weight" and is_quantized and not self.pre_quantized

    def update_weight_conversions(self, weight_conversions: list[Any], model: PreTrainedModel) -> list[Any]:
        """Experts go where `QuantizedExperts` has them."""
        conversions = [_to_quantized_experts(conversion) for conversion in weight_conversions]
        if not self.pre_quantized:  # experts that are stacked in the checkpoint already
            stacks = (f"experts.{name}" for name in ("gate_up_proj", "down_proj"))
            conversions += [WeightRenaming(stack, f"{stack}.weight") for stack in stacks]
        return conversions

    def get_quantize_ops(self) -> ConversionOps:
        return QuantizeOnLoad()

    def _process_model_before_weight_loading(self, model: PreTrainedModel, **_: Any) -> PreTrainedModel:
        if not isinstance(model, Lfm2CbPreTrainedModel):
            raise TypeError(
                f"quant_method {QUANT_METHOD!r} is for lfm2_cb's own classes, not {type(model).__name__}: load with "
                "Lfm2CbForCausalLM, or AutoModelForCausalLM after lfm2_cb.enable()"
            )
        replace_layers(model, self.quantization_config.weights)
        return model

    def _process_model_after_weight_loading(self, model: PreTrainedModel, **_: Any) -> PreTrainedModel:
        for module in model.modules():
            if isinstance(module, QUANTIZED):
                for name in module.named(module.weights):
                    getattr(module, name).requires_grad_(False)  # the loader makes floating-point parameters trainable
        return model

    def is_serializable(self) -> bool:
        return True

    @property
    def is_trainable(self) -> bool:
        return False


class ExpertsConverter(WeightConverter):
    """Quantises the experts of a layer one after another: each is read when its turn has come."""

    collected_tensors: dict[str, list[Any]]  # the base class's, which is not typed

    def materialize_tensors(self) -> dict[str, list[Any]]:
        """What reads the tensors, rather than the tensors."""
        collected, self.collected_tensors = dict(self.collected_tensors), {}
        return collected


class ReadExperts(ConversionOps):
    """The matrices of each expert, stacked; they are read when they are asked for, one expert after another."""

    def convert(
        self, input_dict: dict[str, Any], *, source_patterns: list[str], target_patterns: list[str], **_: Any
    ) -> dict[str, Iterator[torch.Tensor]]:
        by_expert = zip(*(input_dict[pattern] for pattern in source_patterns), strict=True)
        return {target_patterns[0]: (torch.cat([read() for read in parts]) for parts in by_expert)}


def _to_quantized_experts(conversion: Any) -> Any:
    if not isinstance(conversion, WeightConverter) or ".experts." not in conversion.target_patterns[0]:
        return conversion
    targets = [f"{target}.weight" for target in conversion.target_patterns]
    new = ExpertsConverter(conversion.source_patterns, targets, [ReadExperts()])
    new.scope_prefix, new.base_model_prefix = conversion.scope_prefix, conversion.base_model_prefix
    return new


class QuantizeOnLoad(ConversionOps):
    """The loader's step for one matrix (already fused): weight → what the layer holds of it."""

    @torch.no_grad()
    def convert(self, input_dict: dict[str, Any], *, model: PreTrainedModel, **_: Any) -> dict[str, torch.Tensor]:
        ((name, found),) = input_dict.items()
        weight = found[0] if isinstance(found, list) else found
        owner = name.rpartition(".")[0]
        layer = model.get_submodule(owner)
        weights = layer.quantize(weight)
        del weight, found
        input_dict.clear()
        return_free_memory()
        return {f"{owner}.{leaf}": tensor for leaf, tensor in layer.named(weights).items()}


def replace_layers(model: PreTrainedModel, weights: str) -> None:
    """Put quantised layers in the place of a model's linears, experts and embedding, on the meta device.

    Routers stay as they are: they are small, and what they choose must not change.
    """
    routers = {module.gate for module in model.modules() if isinstance(module, Lfm2CbSparseMLP)}
    for name, module in list(model.named_modules()):
        if module in routers:
            continue
        new: nn.Module
        with torch.device("meta"):
            if isinstance(module, nn.Linear):
                bits = 8 if name == "lm_head" else WEIGHTS[weights]
                new = QuantizedLinear(module.in_features, module.out_features, module.bias is not None, bits)
            elif isinstance(module, Experts):
                num_experts, hidden, width = module.down_proj.shape
                new = QuantizedExperts(num_experts, hidden, width, WEIGHTS[weights])
            elif isinstance(module, nn.Embedding):
                new = QuantizedEmbedding(module.num_embeddings, module.embedding_dim)
            else:
                continue
        for parameter in new.parameters():
            if parameter.dtype == torch.float32:
                parameter.data = parameter.data.to(model.dtype)
        model.set_submodule(name, new)
    if isinstance(model, Lfm2CbForCausalLM) and model.config.tie_word_embeddings:
        for leaf in ("weight_scale", "weight_sums"):
            model.all_tied_weights_keys[f"lm_head.{leaf}"] = f"model.embed_tokens.{leaf}"


@torch.no_grad()
def quantize(model: PreTrainedModel, weights: str) -> Lfm2CbForCausalLM:
    """A new model with low-bit weights; the given one is left as it is, and shares nothing with it.

    Args: model: one of ours or a stock one, in full precision; weights: "int8" or "int4".
    Raises: ValueError: another `weights`; weights that are not finite. TypeError: adapters, hooks, patched modules.
    """
    for name, module in model.named_modules():
        if code := foreign_code(module):
            raise TypeError(f"{name or 'the model'} has {code}, which a quantised copy would not have: remove it")
    fields = {k: v for k, v in model.config.to_dict().items() if k != "model_type"}
    model_class = class_for(model.config)
    config = model_class.config_class(**fields, quantization_config=Lfm2CbQuantizationConfig(weights))
    config._attn_implementation = model.config._attn_implementation
    with torch.device("meta"):
        new = model_class(config).to(model.dtype)
    plain = {name for name, _ in new.named_parameters(remove_duplicate=False)}
    parts = {name: list(module.parts) for name, module in new.named_modules() if isinstance(module, FusedLinear)}
    replace_layers(new, weights)
    source = dict(model.named_parameters(remove_duplicate=False))
    if isinstance(model, Lfm2CbForCausalLM) and (surplus := source.keys() - plain):
        raise TypeError(
            f"{min(surplus)} is not a parameter of a plain model: merge adapters before asking for {weights!r}"
        )
    for name, module in new.named_modules():
        for leaf, empty in list(module.named_parameters(recurse=False)):
            full_name = f"{name}.{leaf}"
            if full_name in new.all_tied_weights_keys or leaf.startswith("weight_"):
                continue
            if isinstance(module, QUANTIZED) and leaf == "weight":
                parent = name.rpartition(".")[0]
                known = [n for n in (full_name, name) if n in source]  # (stacked experts are a parameter of that name)
                names = known or [f"{parent}.{part}.weight" for part in parts[name]]
                module.put(module.quantize(torch.cat([source[n] for n in names])))
            else:
                setattr(module, leaf, nn.Parameter(source[full_name].clone(), empty.requires_grad))
    new.tie_weights(recompute_mapping=False)
    for name, buffer in model.named_buffers():
        owner, _, leaf = name.replace("model.pos_emb.", "model.rotary_emb.").rpartition(".")
        setattr(new.get_submodule(owner), leaf, buffer.clone())
    new.generation_config = copy.deepcopy(model.generation_config)
    quantizer = Lfm2CbQuantizer(config.quantization_config, pre_quantized=True)
    quantizer.postprocess_model(new)
    new.hf_quantizer, new.is_quantized, new.quantization_method = quantizer, True, QUANT_METHOD
    return new.train(model.training)


def weights_of(model: PreTrainedModel) -> str | None:
    """ "int8" or "int4" of a model that was quantised here; None: full precision.

    Raises: TypeError: it was quantised by something else, by its name.
    """
    quantizer = getattr(model, "hf_quantizer", None)
    if isinstance(quantizer, Lfm2CbQuantizer):
        return quantizer.quantization_config.weights
    if quantizer is not None:
        method = quantizer.quantization_config.quant_method
        raise TypeError(f"the model is quantised by {getattr(method, 'value', method)!r}, {OTHERS_REFUSED}")
    for name, parameter in model.named_parameters():  # torchao swaps the data, bitsandbytes and GGUF the class
        kind = type(parameter.data) if type(parameter) is nn.Parameter else type(parameter)
        if kind is not torch.Tensor:
            raise TypeError(f"{name} is a {kind.__name__}, {OTHERS_REFUSED}")
    for name, module in model.named_modules():  # torch's own hold no parameters
        if type(module).__module__.startswith(TORCH_QUANTIZED):
            raise TypeError(f"{name} is a {type(module).__module__}.{type(module).__name__}, {OTHERS_REFUSED}")
    return None


def num_weights(model: PreTrainedModel) -> int:
    """Parameters of a model, those of a quantised matrix counted as the matrix has them in full precision."""
    count, seen = 0, set()
    for module in model.modules():
        matrix = module if isinstance(module, QUANTIZED) else None
        for name, parameter in module.named_parameters(recurse=False):
            if id(parameter) not in seen and (matrix is None or not name.startswith("weight_")):
                count += _size_of(matrix) if matrix and name == "weight" else parameter.numel()
            seen.add(id(parameter))
    return count


def _size_of(matrix: QuantizedLinear | QuantizedEmbedding | QuantizedStack) -> int:
    num_matrices = matrix.num_matrices if isinstance(matrix, QuantizedStack) else 1
    return num_matrices * matrix.out_features * matrix.in_features
