"""EngineConfig: the one place of the engine's options, which every face takes by these names and defaults."""

import dataclasses
import inspect

import pytest

import lfm2_cb
from lfm2_cb.engine.config import EngineConfig
from lfm2_cb.hf.manager_config import OURS, Lfm2CbBatchingConfig

DEFAULTS = {field.name: field.default for field in dataclasses.fields(EngineConfig)}


def test_the_generator_takes_every_option_with_its_default():
    signature = inspect.signature(lfm2_cb.ContinuousBatchingGenerator)
    keywords = {name: p.default for name, p in signature.parameters.items() if p.kind is p.KEYWORD_ONLY}
    assert {name: keywords[name] for name in DEFAULTS} == DEFAULTS


def test_an_unknown_option_is_named():
    with pytest.raises(TypeError, match="max_batch_token'"):
        lfm2_cb.ContinuousBatchingGenerator(lfm2_cb.demo_model_path(), max_batch_token=5)


def test_the_managers_options_have_these_defaults():
    config = Lfm2CbBatchingConfig()
    assert {name: getattr(config, name) for name in OURS} == {name: DEFAULTS[name] for name in OURS}


@pytest.mark.parametrize("field", dataclasses.fields(EngineConfig), ids=lambda field: field.name)
def test_a_field_says_what_a_flag_needs(field):
    kind, choices = field.metadata["type"], field.metadata["choices"]
    assert field.metadata["help"] and "\n" not in field.metadata["help"]
    assert field.default is None or isinstance(field.default, kind)
    assert not choices or field.default is None or field.default in choices
    for choice in choices:
        EngineConfig(**{field.name: choice})


def test_a_server_has_defaults_of_its_own_where_nothing_else_is_said():
    changed = dataclasses.asdict(EngineConfig.for_server()).items() - dataclasses.asdict(EngineConfig()).items()
    assert changed == {("max_step_seconds", 0.2), ("max_batch_tokens", 2048)}
    config = EngineConfig.for_server(max_step_seconds=None, max_batch_tokens=4096, max_sequences=3)
    assert config == EngineConfig(max_sequences=3)


def test_cache_memory_may_be_text():
    assert EngineConfig(cache_memory="512MiB").cache_bytes == EngineConfig(cache_memory=2**29).cache_bytes == 2**29


@pytest.mark.parametrize(
    "name, value",
    [
        ("max_batch_tokens", 0),
        ("max_sequences", True),
        ("block_size", 2.5),
        ("cache_memory", "0"),
        ("cache_memory", "much"),
        ("prefix_caching", 1),
        ("policy", 3),
        ("drafting", "yes"),
        ("max_step_seconds", -1),
        ("cache_dtype", "int3"),
    ],
)
def test_a_bad_value_is_named(name, value):
    with pytest.raises(ValueError, match=name):
        EngineConfig(**{name: value})
