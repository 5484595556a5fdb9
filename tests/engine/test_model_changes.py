"""A model that is changed after it was passed to an engine: its answers follow, or the change is refused by name."""

import random

import pytest
import torch
from helpers import ours, random_prompts, random_stock, stock_greedy
from torch import nn
from torch.nn.utils import parametrize, prune

from lfm2_cb import ContinuousBatchingGenerator
from lfm2_cb.model.changes import ModelChanged
from lfm2_cb.model.quantization import quantize

KINDS = {"layer_types": ["conv", "full_attention", "conv"], "num_hidden_layers": 3}
GREEDY = {"do_sample": False, "eos_token_id": None, "max_new_tokens": 12}
PROMPT = [7, 8, 9, 10, 11, 12, 13, 14, 15, 16]


class Negated(nn.Module):
    """An adapter around a layer."""

    def __init__(self, inner):
        super().__init__()
        self.inner = inner

    def forward(self, *args):
        return -self.inner(*args)


class Minus(nn.Module):
    """A parametrisation."""

    def forward(self, weight):
        return -weight


def change(path, how):
    """A change of the module at a path."""
    return lambda model: how(model.get_submodule(path))


def wrap(path):
    return lambda model: model.set_submodule(path, Negated(model.get_submodule(path)))


def replace_weight(module):
    module.weight = nn.Parameter(-module.weight.detach())


def replace_data(module):
    module.weight.data = -module.weight.data


def write_in_place(module):
    with torch.no_grad():
        module.weight.neg_()


def patch_forward(module):
    inner = module.forward
    module.forward = lambda *args, **kwargs: negative(inner(*args, **kwargs))


def negative(out):
    return (-out[0], *out[1:]) if isinstance(out, tuple) else -out


def hook(module):
    module.register_forward_hook(lambda _, args, out: negative(out))


def pre_hook(module):
    module.register_forward_pre_hook(lambda _, args: (-args[0], *args[1:]))


def set_constant(name, value):
    return lambda module: setattr(module, name, value)


FOLLOWED = {
    "replaced weight of w1": change("model.layers.0.feed_forward.w1", replace_weight),
    "replaced weight of w2": change("model.layers.0.feed_forward.w2", replace_weight),
    "replaced weight of v": change("model.layers.1.self_attn.v_proj", replace_weight),
    "replaced weight of a norm": change("model.layers.1.ffn_norm", replace_weight),
    "replaced weight of the convolution": change("model.layers.0.conv.conv", replace_weight),
    "replaced data of w3": change("model.layers.2.feed_forward.w3", replace_data),
    "replaced data of the embedding": change("model.embed_tokens", replace_data),
    "in place, w1": change("model.layers.0.feed_forward.w1", write_in_place),
    "in place, in_proj": change("model.layers.0.conv.in_proj", write_in_place),
    "state dict": lambda model: model.load_state_dict({k: 0.7 * v for k, v in model.state_dict().items()}),
    "assigned state dict": lambda model: model.load_state_dict(
        {k: 0.7 * v for k, v in model.state_dict().items()}, assign=True
    ),
    "another linear": lambda model: model.set_submodule(
        "model.layers.0.feed_forward.w2",
        nn.Linear(*reversed(model.model.layers[0].feed_forward.w2.weight.shape), bias=False),
    ),
    "untied head": change("lm_head", replace_weight),
    "epsilon": change("model.layers.1.ffn_norm", set_constant("variance_epsilon", 3.0)),
    "scaling": change("model.layers.1.self_attn", set_constant("scaling", 3.0)),
    "frequencies": change(
        "model.rotary_emb", lambda module: setattr(module, "inv_freq", module.inv_freq.flip(0).contiguous())
    ),
}
#: change → what the error says; on a stock model
REFUSED = {
    "wrapped w2": (wrap("model.layers.0.feed_forward.w2"), r"layers\.0\.feed_forward\.w2 is a Negated"),
    "wrapped layer": (wrap("model.layers.1"), r"model\.layers\.1 is a Negated"),
    "wrapped convolution": (wrap("model.layers.0.conv.conv"), r"conv\.conv is a Negated"),
    "hook on q": (change("model.layers.1.self_attn.q_proj", hook), r"self_attn\.q_proj has a forward hook"),
    "hook on a norm": (change("model.layers.1.ffn_norm", hook), "ffn_norm has a forward hook"),
    "hook on the convolution": (change("model.layers.0.conv.conv", hook), r"conv\.conv has a forward hook"),
    "hook on the model": (change("", hook), "the model has a forward hook"),
    "pre-hook": (change("model.layers.2", pre_hook), r"layers\.2 has a forward pre-hook"),
    "patched forward": (change("model.layers.2.feed_forward", patch_forward), "feed_forward has a patched forward"),
    "parametrised": (
        change("lm_head", lambda module: parametrize.register_parametrization(module, "weight", Minus())),
        "lm_head is a ParametrizedLinear",
    ),
    "pruned": (
        change("model.layers.0.feed_forward.w2", lambda module: prune.l1_unstructured(module, "weight", 0.5)),
        "w2 has a forward pre-hook",
    ),
    "compiled part": (
        lambda model: model.set_submodule("model.layers.0", torch.compile(model.model.layers[0])),
        r"layers\.0 is a OptimizedModule",
    ),
    "dtype": (lambda model: model.to(torch.bfloat16), "is torch.bfloat16, but was torch.float32.*new Continuous"),
    "half": (lambda model: model.half(), "is torch.float16, but was torch.float32"),
    "dtype of a part": (lambda model: model.model.layers[1].double(), r"layers\.1.* is torch.float64"),
    "device": (lambda model: model.to("meta"), "is on meta, but was on cpu"),
    "vocabulary": (lambda model: model.resize_token_embeddings(500), "vocabulary of .* now has 500"),
}


@pytest.fixture(params=["auto", "torch"])
def kernels(request):
    return request.param


@pytest.fixture
def generator_of(kernels):
    """Prefix caching is on: what is cached must not outlive the weights it was computed by."""
    made = []

    def make(model):
        made.append(ContinuousBatchingGenerator(model, cache_memory="4MiB", block_size=4, kernels=kernels))
        return made[-1]

    yield make
    for generator in made:
        generator.close()


def answer(generator):
    return [output.token_ids for output in generator.generate([PROMPT, PROMPT[:3]], **GREEDY)]


@pytest.mark.parametrize("change", FOLLOWED.values(), ids=FOLLOWED.keys())
def test_a_changed_stock_model_is_followed(change, generator_of):
    torch.manual_seed(0)
    stock = random_stock(10, tie_word_embeddings=False, **KINDS)
    generator = generator_of(stock)
    answer(generator)
    for _ in range(2):
        change(stock)
        assert answer(generator) == [stock_greedy(stock, prompt, 12) for prompt in (PROMPT, PROMPT[:3])]


@pytest.mark.parametrize("how, message", REFUSED.values(), ids=REFUSED.keys())
def test_what_cannot_be_followed_is_refused_before_the_next_request(how, message, generator_of):
    stock = random_stock(10, **KINDS)
    generator = generator_of(stock)
    answer(generator)
    how(stock)
    for _ in range(2):
        with pytest.raises(ModelChanged, match=message):
            answer(generator)
    assert not generator.engine.has_unfinished


@pytest.mark.parametrize("how, message", REFUSED.values(), ids=REFUSED.keys())
@pytest.mark.parametrize("weights", [None, "int8"])
def test_and_where_it_was_so_before_it_was_handed_over(how, message, weights):
    stock = random_stock(10, **KINDS)
    how(stock)
    if "is torch" in message or "vocabulary" in message:
        return  # an ordinary model of that dtype
    with pytest.raises((TypeError, ValueError)):
        ContinuousBatchingGenerator(stock, weights=weights, cache_memory="4MiB")


def test_a_hook_that_is_removed_is_forgiven(generator_of):
    stock = random_stock(10, **KINDS)
    generator = generator_of(stock)
    expected = answer(generator)
    handle = stock.model.layers[0].register_forward_hook(lambda *_: None)
    with pytest.raises(ModelChanged):
        answer(generator)
    handle.remove()
    assert answer(generator) == expected


@pytest.mark.parametrize(
    "harmless",
    [
        lambda model: model.enable_input_require_grads(),
        lambda model: model(torch.tensor([PROMPT]), output_hidden_states=True, output_attentions=True),
        lambda model: model.gradient_checkpointing_enable(),
        lambda model: model.train(),
        lambda model: model.requires_grad_(False),
        lambda model: model.model.layers[0].compile(),
    ],
    ids=["require grads", "output capturing", "checkpointing", "train", "frozen", "compile in place"],
)
@pytest.mark.parametrize("convert", [lambda model: model, ours], ids=["stock", "ours"])
def test_what_changes_no_value_is_let_pass(harmless, convert, generator_of):
    model = convert(random_stock(10, **KINDS))
    generator = generator_of(model)
    expected = answer(generator)
    harmless(model)
    assert answer(generator) == expected
    steps = generator.engine.runner.captured
    assert steps is None or steps.num_graphs


OURS = {
    **{name: FOLLOWED[name] for name in FOLLOWED if not name.endswith((" w1", " of v", " w3", "of w1", "epsilon"))},
    "epsilon": change("model.layers.1.ffn_norm", set_constant("eps", 3.0)),
    **{
        name: REFUSED[name][0]
        for name in ("wrapped w2", "hook on a norm", "pre-hook", "patched forward", "parametrised", "pruned")
    },
    "wrapped qkv": wrap("model.layers.1.self_attn.qkv_proj"),
    "wrapped embedding": wrap("model.embed_tokens"),
    "hook on the embedding": change("model.embed_tokens", hook),
    "hook on q's norm": change("model.layers.1.self_attn.q_layernorm", hook),
    "hook on the attention": change("model.layers.1.self_attn", hook),
    "hook on the stack": change("model.rotary_emb", lambda module: module.register_forward_hook(shift)),
}


def shift(module, args, out):
    return out[0].flip(-1), out[1]


@pytest.mark.parametrize("change", OURS.values(), ids=OURS.keys())
def test_our_own_model_is_followed(change, generator_of):
    """As a forward of the changed model itself says: `model.generate()`."""
    torch.manual_seed(0)
    model = ours(random_stock(10, tie_word_embeddings=False, **KINDS))
    generator = generator_of(model)
    answer(generator)
    change(model)
    assert answer(generator) == [stock_greedy(model, prompt, 12) for prompt in (PROMPT, PROMPT[:3])]


@pytest.mark.parametrize("name", ["in_proj", "out_proj"])
def test_a_parametrised_bias_is_followed(name, generator_of):
    model = ours(random_stock(10, **{**KINDS, "conv_bias": True}))
    generator = generator_of(model)
    before = answer(generator)
    parametrize.register_parametrization(model.get_submodule(f"model.layers.0.conv.{name}"), "bias", Minus())
    expected = [stock_greedy(model, prompt, 12) for prompt in (PROMPT, PROMPT[:3])]
    assert answer(generator) == expected != before


def test_our_own_model_is_refused_where_it_cannot_follow(generator_of):
    for name in ("wrapped convolution", "hook on the convolution", "hook on the model", "dtype", "half"):
        model = ours(random_stock(10, **KINDS))
        generator = generator_of(model)
        answer(generator)
        REFUSED[name][0](model)
        with pytest.raises(ModelChanged):
            answer(generator)


@pytest.mark.parametrize("convert", [lambda model: model, ours], ids=["stock", "ours"])
def test_an_assistant_is_looked_at_too(convert):
    """A stock one is adopted again, as it is now; one of ours is refused."""
    assistant, stock = convert(random_stock(10, **KINDS)), random_stock(10, **KINDS)
    with ContinuousBatchingGenerator(stock, cache_memory="4MiB") as generator:
        options = {**GREEDY, "assistant_model": assistant}
        expected = generator.generate([PROMPT], **options)[0].token_ids
        assistant.to(torch.bfloat16)
        if convert is ours:
            with pytest.raises(ModelChanged):
                generator.generate([PROMPT], **options)
        else:
            assert generator.generate([PROMPT], **options)[0].token_ids == expected


def test_two_generators_of_one_changed_model_share_its_weights():
    stock = random_stock(10, **KINDS)
    options = {"cache_memory": "4MiB", "block_size": 4}
    with ContinuousBatchingGenerator(stock, **options) as first:
        answer(first)
        replace_weight(stock.model.layers[0].feed_forward.w1)
        with ContinuousBatchingGenerator(stock, **options) as second:
            expected = [stock_greedy(stock, prompt, 12) for prompt in (PROMPT, PROMPT[:3])]
            for _ in range(2):
                assert answer(first) == answer(second) == expected
            places = [g.model.model.layers[0].feed_forward.w13.weight.data_ptr() for g in (first, second)]
            assert places[0] == places[1] == stock.model.layers[0].feed_forward.w1.weight.data_ptr()


def test_weights_that_change_under_a_running_answer_leave_nothing_false_in_the_cache():
    stock, other = random_stock(10, **KINDS), random_prompts(random.Random(0), 1, 9)[0]
    with ContinuousBatchingGenerator(stock, cache_memory="4MiB", block_size=4) as generator:
        for i, _ in enumerate(generator.stream(PROMPT, **{**GREEDY, "max_new_tokens": 30})):
            if i == 5:
                replace_weight(stock.model.layers[0].feed_forward.w1)
                generator.generate([other], **GREEDY)
        assert answer(generator) == [stock_greedy(stock, prompt, 12) for prompt in (PROMPT, PROMPT[:3])]


def test_a_quantised_copy_is_refused_of_a_hooked_model():
    model = ours(random_stock(10, **KINDS))
    hook(model.model.layers[0])
    with pytest.raises(TypeError, match=r"layers\.0 has a forward hook"):
        quantize(model, "int8")
