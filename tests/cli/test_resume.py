"""Every kind of input: run twice, resumed after a kill, changed in between; and what a job may begin anew."""

import csv
import io
import json
import shutil
import sys

import datasets
import pytest
from helpers import demo_prompts

import lfm2_cb
from lfm2_cb.cli.flags import NO_PLACE
from lfm2_cb.cli.main import main

MODEL = lfm2_cb.demo_model_path()
FAST = ["--max-new-tokens", "3", "--no-do-sample", "--dtype", "float32", "--cache-memory", "16MiB", "--quiet"]
TEXTS = [text.replace("\n", " ") for text in demo_prompts(8)]
#: one prompt is another one of the same length, so that no size tells
CHANGED = [*TEXTS[:5], TEXTS[5].swapcase(), *TEXTS[6:]]


class Input:
    """Prompts as an input of one kind."""

    def __init__(self, kind, monkeypatch):
        self.kind, self.monkeypatch, self.lines = kind, monkeypatch, b""

    @property
    def name(self):
        return {"stdin": "-", "saved": "saved", "folder": "folder"}.get(self.kind, f"in.{self.kind}")

    def write(self, texts):
        data = datasets.Dataset.from_dict({"prompt": texts, "id": list(range(len(texts)))})
        if self.kind in ("jsonl", "stdin"):
            rows = [{"prompt": text, "id": i} for i, text in enumerate(texts)]
            self.lines = "".join(json.dumps(row) + "\n" for row in rows).encode()
            with open("in.jsonl", "wb") as file:
                file.write(self.lines)
        elif self.kind == "txt":
            with open("in.txt", "w", encoding="utf-8") as file:
                file.write("".join(text + "\n" for text in texts))
        elif self.kind == "csv":
            with open("in.csv", "w", newline="", encoding="utf-8") as file:
                csv.writer(file).writerows([["id", "prompt"], *enumerate(texts)])
        elif self.kind == "parquet":
            data.to_parquet("in.parquet")
        elif self.kind == "saved":
            shutil.rmtree("saved", ignore_errors=True)
            data.save_to_disk("saved")
        else:
            shutil.rmtree("folder", ignore_errors=True)
            data.to_parquet("folder/rows.parquet")

    def run(self, *flags):
        if self.kind == "stdin":
            self.monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(self.lines)))
        return main(["generate", MODEL, "--input", self.name, "--output", "out.jsonl", *FAST, *flags])


@pytest.fixture(params=["jsonl", "stdin", "txt", "csv", "parquet", "saved", "folder"])
def source(request, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")
    source = Input(request.param, monkeypatch)
    source.write(TEXTS)
    return source


def answers():
    with open("out.jsonl", encoding="utf-8") as file:
        return {row["index"]: row["text"] for row in map(json.loads, file)}


def test_the_same_input_twice_has_nothing_left_to_do(source, capsys):
    assert source.run() == 0
    first = answers()
    assert sorted(first) == list(range(8))
    source.write(TEXTS)  # anew, with the same in it
    assert source.run() == 0
    assert "0 rows (8 were done before)" in capsys.readouterr().err
    assert answers() == first


def test_killed_in_between_it_goes_on_to_the_same_answers(source, tmp_path):
    assert source.run() == 0
    whole, output = answers(), tmp_path / "out.jsonl"
    lines = output.read_bytes().splitlines(keepends=True)
    output.write_bytes(b"".join(lines[i] for i in (0, 4, 6)) + lines[7][:11])
    assert source.run() == 0
    assert answers() == whole


def test_another_input_is_refused_and_what_is_there_stays(source, tmp_path, capsys):
    assert source.run() == 0
    before = (tmp_path / "out.jsonl").read_bytes()
    for texts in (CHANGED, TEXTS[:6]):
        source.write(texts)
        assert source.run() == 2
        assert "--overwrite" in capsys.readouterr().err.splitlines()[-1]
        assert (tmp_path / "out.jsonl").read_bytes() == before
    source.write(CHANGED)
    assert source.run("--overwrite") == 0 and len(answers()) == 8


def test_a_half_done_job_refuses_another_input(source, tmp_path):
    assert source.run("--ordered") == 0
    output = tmp_path / "out.jsonl"
    half = b"".join(output.read_bytes().splitlines(keepends=True)[:6])
    output.write_bytes(half)
    source.write(CHANGED)
    assert source.run("--ordered") == 2
    assert output.read_bytes() == half


def test_a_column_that_is_not_there_is_found_at_the_start(source, tmp_path, capsys, monkeypatch):
    monkeypatch.setattr("lfm2_cb.cli.flags.load_model", lambda *_: pytest.fail("the model was loaded"))
    assert source.run("--column", "nope") == 2
    line = capsys.readouterr().err.splitlines()[-1]
    assert line.startswith("lfm2-cb: error: ") and "nope" in line and "prompt" in line
    assert not (tmp_path / "out.jsonl").exists()
    monkeypatch.undo()
    monkeypatch.chdir(tmp_path)
    assert source.run() == 0  # nothing of it is in the way


def test_more_rows_on_standard_input_are_run_too(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    source = Input("stdin", monkeypatch)
    source.write(TEXTS[:5])
    assert source.run() == 0
    source.write(TEXTS)
    assert source.run() == 0
    assert "3 rows (5 were done before)" in capsys.readouterr().err
    assert sorted(answers()) == list(range(8))


def test_errors_of_standard_input_can_be_run_again(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    source = Input("stdin", monkeypatch)
    source.write(TEXTS[:3])
    source.lines += b'{"prompt": 5}\n{\n'
    assert source.run() == 3
    for _ in range(2):
        assert source.run("--retry-errors") == 3 and sorted(answers()) == [0, 1, 2]
    source.lines = source.lines.replace(b'{"prompt": 5}', b'{"prompt": [5]}')
    assert source.run() == 2  # the row in the errors file was another
    assert source.run("--retry-errors") == 3 and sorted(answers()) == [0, 1, 2, 3]


def test_a_job_without_answers_may_be_begun_anew_with_other_options(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    rows = [{"prompt": text, "broken": [10**9]} for text in TEXTS]
    (tmp_path / "in.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    source = Input("jsonl", monkeypatch)
    assert source.run("--column", "broken") == 3
    assert "8 rows could not be run: out.errors.jsonl" in capsys.readouterr().err
    assert source.run("--column", "prompt") == 0
    assert len(answers()) == 8 and not (tmp_path / "out.errors.jsonl").exists()
    assert source.run("--column", "broken") == 2  # there are answers now


def test_a_file_that_is_none_of_ours_is_not_begun_anew(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    source = Input("jsonl", monkeypatch)
    source.write(TEXTS)
    (tmp_path / "out.jsonl").write_text("precious\n")
    assert source.run() == 2
    assert (tmp_path / "out.jsonl").read_text() == "precious\n"


# Options that no row could be run with


@pytest.mark.parametrize(
    "flags, message",
    [
        (["--do-sample", "--temperature", "0"], "temperature"),
        (["--do-sample", "--temperature", "-1"], "temperature"),
        (["--temperature", "-1"], "temperature must be a number, 0 or more, got -1"),
        (["--top-p", "1.5"], "top_p must be a number from 0 to 1, got 1.5"),
        (["--do-sample", "--top-p", "1.5"], "top_p must be a number from 0 to 1, got 1.5"),
        (["--min-p", "-0.5"], "min_p must be a number from 0 to 1"),
        (["--do-sample", "--top-p", "-1"], "top_p"),
        (["--do-sample", "--min-p", "2"], "min_p"),
        (["--do-sample", "--set", "typical_p=0"], "typical_p"),
        *((["--set", f"{name}=5"], name) for name in ("typical_p", "top_h", "epsilon_cutoff", "eta_cutoff")),
        (["--repetition-penalty", "-2"], "penalty"),
        (["--num-return-sequences", "0"], "num_return_sequences"),
        (["--top-k", "-1"], "top_k"),
        (["--max-new-tokens", "1000000"], "max_new_tokens=1000000"),
        (["--max-new-tokens", "0"], "max_new_tokens"),
        (["--set", "sequence_bias=[[[99999], 1.0]]"], "vocabulary"),
        (["--set", "bad_words_ids=[[99999]]"], "vocabulary"),
        (["--set", "forced_eos_token_id=99999"], "ForcedEOS"),
        (["--set", "no_repeat_ngram_size=-1"], "no_repeat_ngram_size"),
        (["--set", "prompt_lookup_num_tokens=0"], "prompt_lookup_num_tokens"),
        (["--set", "min_new_tokens=-1"], "min_new_tokens"),
        (["--set", "max_time=soon"], "not JSON"),
        (["--stop", ""], "stop_strings"),
        (["--seed", "1.5"], "--seed"),
        (["--set", "logprobs=-1"], "logprobs"),
        (["--set", "priority=high"], "not JSON"),
        (["--set", 'priority="high"'], "priority"),
        (["--set", 'cache_implementation="static"'], "cache_implementation"),
        (["--num-return-sequences", "2"], "num_return_sequences"),
        *((["--set", f"{name}=1"], f"{name} does not apply to an output file") for name in sorted(NO_PLACE)),
    ],
)
def test_a_bad_option_is_found_once_at_the_start(tmp_path, monkeypatch, capsys, flags, message):
    monkeypatch.chdir(tmp_path)
    source = Input("jsonl", monkeypatch)
    source.write(TEXTS)
    assert source.run(*flags) == 2
    lines = capsys.readouterr().err.splitlines()
    assert lines[-1].startswith("lfm2-cb: error: ") and message in lines[-1]
    assert not (tmp_path / "out.jsonl").exists() and not (tmp_path / "out.job.json").exists()
