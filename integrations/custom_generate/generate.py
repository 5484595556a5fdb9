"""`model.generate(..., custom_generate="<this repository>/integrations", trust_remote_code=True)` runs the engine.

Takes what stock `generate()` takes, and lists of prompts of any lengths besides; `generator_kwargs={...}` goes to
`ContinuousBatchingGenerator`.
"""

from lfm2_cb import ContinuousBatchingGenerator

#: stock's own arguments that the engine has no use for: refused if given, dropped if not
UNUSED = ("synced_gpus", "negative_prompt_ids", "negative_prompt_attention_mask")


def generate(model, inputs=None, tokenizer=None, generator_kwargs=None, **kwargs):
    """Answers in stock's shape for a tensor, `RequestOutput`s for a list."""
    for name in UNUSED:
        if kwargs.pop(name, None) is not None:
            raise ValueError(f"{name} is not supported by lfm2_cb")
    kwargs.pop("custom_generate", None)
    prompts = kwargs.pop("input_ids", None) if inputs is None else inputs
    if prompts is None:
        raise ValueError("give generate() the prompts as `inputs` or `input_ids`")
    with ContinuousBatchingGenerator(model, tokenizer, **(generator_kwargs or {})) as generator:
        return generator.generate(prompts, **kwargs)
