"""Flags: made from EngineConfig, the same for every command; what is wrong is one line."""

import dataclasses

import pytest
import torch

import lfm2_cb
from lfm2_cb.cli import flags
from lfm2_cb.cli.flags import Parser, UsageError, add_engine_flags, add_model_flags, engine_options, load_from
from lfm2_cb.cli.main import main, make_parser
from lfm2_cb.engine.config import EngineConfig

MODEL = lfm2_cb.demo_model_path()
OTHERS = {
    "max_batch_tokens": "100",
    "max_sequences": "3",
    "cache_memory": "12MiB",
    "block_size": "16",
    "prefix_caching": False,
    "policy": "batch",
    "drafting": "auto",
    "kernels": "torch",
    "max_step_seconds": "0.5",
    "cache_dtype": "int8",
    "trace": "t.json",
    "adapter_memory": "64MiB",
    "sparse_prefill": "0.95",
}
COMMANDS = {"generate": ["--input", "i", "--output", "o"], "bench": [], "info": []}


def flag_of(name):
    return f"--{name.replace('_', '-')}"


@pytest.mark.parametrize("command", COMMANDS)
def test_every_option_of_the_engine_is_a_flag_with_its_default(command):
    given = [command, MODEL, *COMMANDS[command]]
    assert engine_options(make_parser().parse_args(given)) == dataclasses.asdict(EngineConfig())
    assert OTHERS.keys() == {option.name for option in dataclasses.fields(EngineConfig)}
    for name, value in OTHERS.items():
        said = [flag_of(name), value] if isinstance(value, str) else [f"--no-{name.replace('_', '-')}"]
        options = engine_options(make_parser().parse_args([*given, *said]))
        changed = {name for name, value in options.items() if value != getattr(EngineConfig(), name)}
        assert changed == {name} and str(options[name]) == str(value)


@pytest.mark.parametrize("command", COMMANDS)
def test_help_says_the_defaults(command, capsys):
    with pytest.raises(SystemExit, match="0"):
        main([command, "--help"])
    said = " ".join(capsys.readouterr().out.split())
    for option in dataclasses.fields(EngineConfig):
        default = "" if option.default is None else f" (default: {option.default})"
        assert f"--{option.name.replace('_', '-')}" in said and option.metadata["help"] + default in said
    assert "the checkpoint's own (default: auto)" in said


@pytest.mark.parametrize(
    "said, message",
    [
        (["--max-sequences", "many"], "argument --max-sequences: invalid int value: 'many'"),
        (["--max-sequences", "0"], "max_sequences must be a positive integer, got 0"),
        (["--max-batch-tokens", "-3"], "max_batch_tokens must be"),
        (["--block-size", "0"], "block_size must be"),
        (["--block-size", "1.5"], "argument --block-size"),
        (["--cache-memory", "lots"], "cache_memory must be bytes"),
        (["--cache-memory", "0"], "cache_memory must be a positive"),
        (["--policy", "luck"], "argument --policy: invalid choice: 'luck'"),
        (["--drafting", "yes"], "argument --drafting"),
        (["--kernels", "cuda"], "argument --kernels"),
        (["--cache-dtype", "int3"], "argument --cache-dtype"),
        (["--max-step-seconds", "0"], "max_step_seconds must be"),
        (["--max-step-seconds", "nan"], "max_step_seconds must be"),
        (["--dtype", "int8"], "argument --dtype"),
        (["--weights", "int2"], "argument --weights"),
        (["--device", "abacus"], "--device abacus"),
        (["--no-such-flag"], "unrecognized arguments: --no-such-flag"),
    ],
)
@pytest.mark.parametrize("command", COMMANDS)
def test_what_is_wrong_is_said_before_a_model_is_loaded(tmp_path, monkeypatch, capsys, command, said, message):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "i").write_text('{"prompt": "It was"}\n')
    monkeypatch.setattr(flags, "load_model", lambda *_: pytest.fail("the model was loaded"))
    files = [name if name != "o" else "o.jsonl" for name in COMMANDS[command]]
    assert main([command, MODEL, *files, *said]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("lfm2-cb: error: ") and message in line


@pytest.mark.parametrize("value", ["0", "-1", "many", "1.5", ""])
@pytest.mark.parametrize("flag", ["--prompts", "--prompt-tokens", "--max-new-tokens"])
def test_a_count_is_one_or_more(monkeypatch, capsys, flag, value):
    monkeypatch.setattr(flags, "load_model", lambda *_: pytest.fail("the model was loaded"))
    assert main(["bench", MODEL, flag, value]) == 2
    assert f"argument {flag}: must be an integer, 1 or more, got {value!r}" in capsys.readouterr().err


@pytest.mark.parametrize("said", [[], ["nothing"], ["generate"], ["generate", MODEL], ["info"]])
def test_a_command_that_lacks_something_is_one_line(capsys, said):
    assert main(said) == 2
    assert len(capsys.readouterr().err.splitlines()) == 1


def test_a_command_of_its_own_takes_the_same_flags():
    """What `lfm2-cb serve` does."""
    parser = Parser("mine")
    add_model_flags(parser)
    add_engine_flags(parser)
    args = parser.parse_args([MODEL, "--dtype", "float32", "--weights", "int8", "--max-sequences", "2"])
    model, tokenizer = load_from(args)
    assert model.dtype == torch.float32 and tokenizer("It was")["input_ids"]
    with lfm2_cb.ContinuousBatchingGenerator(model, tokenizer, **engine_options(args)) as generator:
        assert generator.engine.config.max_sequences == 2
    with pytest.raises(UsageError, match="mine --help"):
        parser.parse_args([])
