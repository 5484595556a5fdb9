"""The `lfm2-cb` command: exit statuses, messages, files, pipes."""

import copy
import importlib.metadata
import inspect
import io
import json
import os
import re
import signal
import subprocess
import sys
import time

import pytest
import torch
import transformers
from helpers import demo_prompts
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import lfm2_cb
from lfm2_cb.cli.main import main
from lfm2_cb.engine.engine import Engine
from lfm2_cb.ops.native import library as native

MODEL = lfm2_cb.demo_model_path()
FAST = ["--max-new-tokens", "4", "--no-do-sample", "--dtype", "float32", "--cache-memory", "16MiB", "--quiet"]


@pytest.fixture(autouse=True)
def folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    rows = [{"prompt": text, "id": i} for i, text in enumerate(demo_prompts(12))]
    (tmp_path / "in.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return tmp_path


def generate(*flags):
    return main(["generate", MODEL, "--input", "in.jsonl", *FAST, *flags])


def lines(path):
    return [json.loads(line) for line in path.read_bytes().splitlines()]


def test_a_json_schema_in_a_file(folder, capsys):
    pytest.importorskip("llguidance")
    schema = {"type": "array", "items": {"type": "boolean"}, "minItems": 1, "maxItems": 1}
    (folder / "schema.json").write_text(json.dumps(schema))
    assert generate("--output", "out.jsonl", "--json-schema", "schema.json", "--max-new-tokens", "12") == 0
    assert all(json.loads(r["text"]) in ([True], [False]) for r in lines(folder / "out.jsonl"))
    (folder / "schema.json").write_text(json.dumps({"not": schema}))
    capsys.readouterr()
    assert generate("--output", "other.jsonl", "--json-schema", "schema.json") == 2
    assert "cannot be enforced" in capsys.readouterr().err and not (folder / "other.jsonl").exists()


def test_generate_then_the_same_again_then_another(folder, capsys):
    assert generate("--output", "out.jsonl", "--ordered", "--keep", "id") == 0
    assert "12 rows" in capsys.readouterr().err
    first = (folder / "out.jsonl").read_bytes()
    assert [r["index"] for r in lines(folder / "out.jsonl")] == [r["id"] for r in lines(folder / "out.jsonl")]
    assert generate("--output", "out.jsonl", "--ordered", "--keep", "id") == 0
    assert "0 rows (12 were done before)" in capsys.readouterr().err
    assert (folder / "out.jsonl").read_bytes() == first
    assert generate("--output", "out.jsonl", "--ordered", "--keep", "id", "--max-sequences", "2") == 0  # same answers
    assert generate("--output", "out.jsonl", "--ordered", "--keep", "id", "--top-k", "5") == 2
    assert "belongs to another job: options was" in capsys.readouterr().err
    assert generate("--output", "out.jsonl", "--top-k", "5", "--overwrite") == 0
    assert len(lines(folder / "out.jsonl")) == 12 and (folder / "out.jsonl").read_bytes() != first


def test_a_generation_config_file_and_flags_before_it(folder):
    (folder / "gc.json").write_text(json.dumps({"max_new_tokens": 9, "do_sample": False, "eos_token_id": 4095}))
    base = [
        "generate",
        MODEL,
        "--input",
        "in.jsonl",
        "--generation-config",
        "gc.json",
        "--dtype",
        "float32",
        "--quiet",
    ]
    assert main([*base, "--output", "nine.jsonl"]) == 0
    assert {r["output_tokens"] for r in lines(folder / "nine.jsonl")} == {9}
    assert main([*base, "--output", "two.jsonl", "--set", "max_new_tokens=2", "min_new_tokens=1"]) == 0
    assert {r["output_tokens"] for r in lines(folder / "two.jsonl")} == {2}


def test_segments_by_a_separator_and_sparse_prefill(folder, capsys, monkeypatch):
    seen, add_all = [], Engine.add_all
    monkeypatch.setattr(Engine, "add_all", lambda self, requests: (seen.extend(requests), add_all(self, requests))[1])
    rows = [
        {"prompt": f"{'It was a truth ' * 30}###{'She had been ' * 30}###What {word}?"} for word in ("then", "now")
    ]
    (folder / "in.jsonl").write_text("".join(json.dumps(row) + "\n" for row in [*rows, {"prompt": "It was"}]))
    flags = ["--chunks", "###", "--recompute", "0.5", "--sparse-prefill", "0.7"]
    assert generate("--output", "out.jsonl", "--ordered", *flags) == 3
    marked = [request for request in seen if len(request.segments) == 3]
    assert len(marked) == 2
    assert all((request.recompute, request.sparse_prefill) == (0.5, 0.7) for request in marked)
    options = {"max_new_tokens": 4, "do_sample": False, "chunks": "###", "recompute": 0.5, "sparse_prefill": 0.7}
    with lfm2_cb.ContinuousBatchingGenerator(MODEL, cache_memory="16MiB", dtype="float32") as generator:
        expected = [output.text for output in generator.generate([row["prompt"] for row in rows], **options)]
    assert [record["text"] for record in lines(folder / "out.jsonl")] == expected
    (error,) = lines(folder / "out.errors.jsonl")
    assert error["index"] == 2 and "the prompt has no separator (chunks: '###')" in error["error"]
    capsys.readouterr()
    assert generate("--output", "other.jsonl", "--chunks", "###", "--recompute", "2") == 2
    assert "recompute must be a number from 0 to 1" in capsys.readouterr().err


def test_errors_are_kept_and_can_be_run_again(folder, capsys):
    (folder / "in.jsonl").write_text('{"prompt": "It was"}\n{"prompt": 5}\n')
    assert generate("--output", "out.jsonl") == 3
    assert "1 rows could not be run: out.errors.jsonl" in capsys.readouterr().err
    (error,) = lines(folder / "out.errors.jsonl")
    assert error["index"] == 1 and "BadRow" in error["error"]
    assert generate("--output", "out.jsonl", "--retry-errors") == 3
    assert "1 rows (1 were done before)" in capsys.readouterr().err
    assert lines(folder / "out.errors.jsonl") == [error]


@pytest.mark.parametrize(
    "flags, message",
    [
        (["--output", "nowhere/out.jsonl"], "no folder nowhere"),
        (["--output", "out.txt"], "ends in .jsonl or .parquet"),
        (["--output", "in.jsonl"], "is the input"),
        (["--output", "-", "--overwrite"], "need a file as --output"),
        (["--output", "o.jsonl", "--keep", "text"], "--keep text"),
        (["--output", "o.jsonl", "--input", "no.jsonl"], "no such file: no.jsonl"),
        (["--output", "o.jsonl", "--split", "train"], "only a dataset has splits"),
        (["--output", "o.jsonl", "--set", "temperature"], "NAME=JSON"),
        (["--output", "o.jsonl", "--set", "temperature=hot"], "not JSON"),
        (["--output", "o.jsonl", "--set", 'temperature="hot"'], "temperature must be a number, 0 or more, got 'hot'"),
        (["--output", "o.jsonl", "--set", "tempreature=1"], "tempreature"),
        (["--output", "o.jsonl", "--set", "num_beams=4"], "num_beams: not in lfm2-cb generate"),
        (["--output", "o.jsonl", "--max-new-tokens", "0"], "max_new_tokens must be"),
        (["--output", "o.jsonl", "--generation-config", "none.json"], "none.json"),
        (["--output", "o.jsonl", "--generation-config", "in.jsonl"], "not JSON"),
        (["--output", "o.jsonl", "--cache-memory", "lots"], "cache_memory must be bytes"),
        (["--output", "o.jsonl", "--cache-memory", "10KB"], "too small"),
        (["--output", "o.jsonl", "--policy", "luck"], "argument --policy: invalid choice: 'luck'"),
        (["--output", "o.jsonl", "--max-sequences", "-1"], "max_sequences must be"),
        (["--output", "o.jsonl", "--max-step-seconds", "0"], "max_step_seconds must be"),
        (["--output", "o.jsonl", "--device", "abacus"], "--device abacus"),
        (["--output", "o.jsonl", "--kernels", "native", "--dtype", "float16"], "kernels='native'"),
    ],
)
def test_what_is_wrong_is_said_in_one_line(folder, capsys, flags, message):
    before = (folder / "in.jsonl").read_bytes()
    assert generate(*flags) == 2
    said = capsys.readouterr().err.strip().splitlines()
    assert message in said[-1] and said[-1].startswith("lfm2-cb: error: ")
    assert (folder / "in.jsonl").read_bytes() == before and not (folder / "o.jsonl").exists()


def test_another_model_or_none_is_refused(folder, capsys):
    config = transformers.LlamaConfig(vocab_size=9, hidden_size=8, num_hidden_layers=1, num_attention_heads=1)
    config.save_pretrained(folder / "llama")
    for model, message in (("llama", "holds 'llama'"), ("no/where/at/all", "error")):
        assert main(["info", model]) == 2
        assert message in capsys.readouterr().err


def test_every_option_of_the_generator_has_a_flag(monkeypatch):
    taken = {}

    def note(model, tokenizer, **options):
        taken.update(options)
        raise ValueError("enough")

    monkeypatch.setattr("lfm2_cb.cli.main.ContinuousBatchingGenerator", note)
    assert main(["info", MODEL, "--max-step-seconds", "0.25", "--no-prefix-caching", "--max-sequences", "7"]) == 2
    assert (taken["max_step_seconds"], taken["prefix_caching"], taken["max_sequences"]) == (0.25, False, 7)
    options = set(inspect.signature(lfm2_cb.ContinuousBatchingGenerator).parameters)
    assert options - taken.keys() == {
        "model",
        "tokenizer",
        "dtype",
        "device",
        "weights",
        "seed",
    }  # of loading, and of each row


def expected_kernels():
    try:
        loaded = native.load()
        return f"native, {loaded.isa}, {'prebuilt' if loaded.prebuilt else 'built here'}\n"
    except native.NativeUnavailable:
        return "torch\n"


def test_info_and_bench(capsys):
    assert main(["info", MODEL, "--dtype", "float32", "--cache-memory", "64MiB"]) == 0
    said = capsys.readouterr().out
    for part in ("Lfm2CbForCausalLM", "torch.float32, cpu", "blocks of 64 tokens", "4 short convolution", "kernels"):
        assert part in said
    assert f"kernels        {expected_kernels()}" in said and "longest prompt 4,095 tokens, with one" in said
    small = ["info", MODEL, "--dtype", "float32", "--cache-memory", "2MiB", "--max-sequences", "4"]
    assert main(small) == 0  # the cache is what limits it
    (blocks,) = re.findall(r"= ([\d,]+) blocks of 64 tokens \(([\d,]+) tokens", said := capsys.readouterr().out)
    assert f"longest prompt {blocks[1]} tokens" in said
    assert main(["info", MODEL, "--cache-memory", "64MiB", "--kernels", "torch", "--cache-dtype", "int8"]) == 0
    said = capsys.readouterr().out
    assert "kernels        torch\n" in said and "tokens in int8)" in said
    size = ["--prompts", "4", "--prompt-tokens", "8", "--max-new-tokens", "4", "--stock"]
    assert main(["bench", MODEL, "--dtype", "float32", "--cache-memory", "64MiB", *size]) == 0
    said = capsys.readouterr().out
    assert said.startswith("ours ") and "stock " in said and "ratio" in said
    assert main(["bench", MODEL, "--prompts", "0"]) == 2


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_checkpoint_runs_in_its_own_dtype(folder, capsys, demo_stock, demo_tokenizer, dtype):
    copy.deepcopy(demo_stock).to(dtype).save_pretrained("mine")
    demo_tokenizer.save_pretrained("mine")
    for said, expected in ([], dtype), (["--dtype", "auto"], dtype), (["--dtype", "float16"], torch.float16):
        assert main(["info", "mine", "--cache-memory", "16MiB", *said]) == 0
        assert f"dtype, device  {expected}, cpu" in capsys.readouterr().out


def test_version(capsys):
    with pytest.raises(SystemExit, match="0"):
        main(["--version"])
    assert capsys.readouterr().out == f"lfm2-cb {lfm2_cb.__version__}\n"
    assert importlib.metadata.version("lfm2-cb") == lfm2_cb.__version__


def test_serve_says_which_extra_is_missing(capsys, monkeypatch):
    monkeypatch.setitem(sys.modules, "lfm2_cb.integrations.serve", None)
    assert main(["serve", MODEL, "--port", "8000"]) == 2
    assert "pip install 'lfm2-cb[serve]'" in capsys.readouterr().err


def test_a_closed_pipe_ends_it_cleanly(folder, capsys):
    read, write = os.pipe()
    os.close(read)
    stdout = os.dup(1)
    try:
        os.dup2(write, 1)
        assert generate("--output", "-") == 1
    finally:
        os.dup2(stdout, 1)
        os.close(stdout)
        os.close(write)
    assert capsys.readouterr().err.strip().endswith("stopped: the output cannot be written: Broken pipe")


def test_stdin_to_stdout(folder, capfd, monkeypatch):
    given = io.TextIOWrapper(io.BytesIO(b'{"prompt": "It was"}\n{"prompt": 1}\n'))
    monkeypatch.setattr(sys, "stdin", given)
    assert main(["generate", MODEL, "--input", "-", "--output", "-", *FAST]) == 3
    said = capfd.readouterr()
    assert [json.loads(line)["index"] for line in said.out.splitlines()] == [0]
    assert "1 rows could not be run" in said.err


# In a process of its own: a signal


def test_ctrl_c_stops_it_and_it_goes_on(folder):
    (folder / "in.jsonl").write_text((folder / "in.jsonl").read_text() * 400)
    command = [sys.executable, "-m", "lfm2_cb", "generate", MODEL, "--input", "in.jsonl", "--output", "out.jsonl"]
    process = subprocess.Popen([*command, "--ordered", *FAST], stderr=subprocess.PIPE, text=True)
    output = folder / "out.jsonl"
    deadline = time.monotonic() + 120
    while not (output.exists() and output.stat().st_size) and time.monotonic() < deadline:
        time.sleep(0.01)
    os.kill(process.pid, signal.SIGINT)
    _, said = process.communicate(timeout=120)
    assert process.returncode == 130 and "goes on from here" in said and "Traceback" not in said
    done = output.read_bytes()
    assert done.endswith(b"\n") and 0 < done.count(b"\n") < 4800
    assert [json.loads(line)["index"] for line in done.splitlines()] == list(range(done.count(b"\n")))
    (folder / "in.jsonl").write_text("")
    assert generate("--output", "out.jsonl", "--ordered") == 2  # the input is another


# Fuzz: flags out of hypothesis never end in a traceback

words = st.sampled_from(
    ["-1", "0", "1", "3", "nan", "1e9", "x", "", "true", "[1]", '{"a": 1}', "in.jsonl", "out.jsonl"]
)
flags = st.one_of(
    st.tuples(
        st.sampled_from(
            [
                *("--max-new-tokens", "--temperature", "--top-k", "--top-p", "--min-p", "--repetition-penalty"),
                *("--num-return-sequences", "--seed", "--stop", "--column", "--keep", "--split", "--cache-memory"),
                *("--block-size", "--max-sequences", "--max-batch-tokens", "--policy", "--generation-config"),
            ]
        ),
        words,
    ).map(list),
    st.tuples(
        st.sampled_from(["eos_token_id", "top_k", "bad_words_ids", "sequence_bias", "max_time", "no"]), words
    ).map(lambda pair: ["--set", f"{pair[0]}={pair[1]}"]),
    st.sampled_from([["--do-sample"], ["--ordered"], ["--overwrite"], ["--retry-errors"]]),
)


@settings(
    max_examples=int(os.environ.get("LFM2_CB_FUZZ_EXAMPLES", 30)),
    deadline=None,
    suppress_health_check=list(HealthCheck),
)
@given(chosen=st.lists(flags, max_size=3))
def test_fuzzed_flags_end_with_a_status(folder, chosen):
    for path in folder.glob("out.*"):
        path.unlink()
    (folder / "in.jsonl").write_text('{"prompt": "It was"}\n')
    try:
        status = generate("--output", "out.jsonl", *(word for flag in chosen for word in flag))
    except SystemExit as error:  # argparse
        status = error.code
    assert status in (0, 2, 3)
