"""Parquet out: the rows of the JSON lines, typed, in order, whole or not there."""

import datetime
import decimal
import io
import json
import sys
from types import SimpleNamespace

import pyarrow as pa
import pytest
from helpers import demo_prompts
from pyarrow import parquet

import lfm2_cb
from lfm2_cb.cli.main import main
from lfm2_cb.cli.parquet_output import write_parquet
from lfm2_cb.cli.rows import Source
from lfm2_cb.cli.writer import OutputError

MODEL = lfm2_cb.demo_model_path()
FAST = ["--max-new-tokens", "3", "--no-do-sample", "--dtype", "float32", "--cache-memory", "16MiB", "--quiet"]
TYPED = {
    "day": pa.array([datetime.date(2026, 1, 1 + i % 9) for i in range(40)]),
    "price": pa.array([decimal.Decimal(i) for i in range(40)], pa.decimal128(9, 2)),
    "raw": pa.array([bytes([i]) for i in range(40)]),
    "label": pa.array(["a" if i % 2 else None for i in range(40)]).dictionary_encode(),
    "nested": pa.array([[{"x": i}] for i in range(40)]),
    "half": pa.array([float("nan")] * 40, pa.float32()),
}


@pytest.fixture(autouse=True)
def folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    prompts = [text if i % 7 else None for i, text in enumerate(demo_prompts(40))]
    parquet.write_table(pa.table({"prompt": prompts, "id": range(40), **TYPED}), "in.parquet", row_group_size=9)
    return tmp_path


def run(*flags, source="in.parquet", output="out.parquet"):
    return main(["generate", MODEL, "--input", source, "--output", output, *FAST, *flags])


def lines(path):
    return [json.loads(line) for line in path.read_text("utf-8").splitlines()]


def names(folder):
    return sorted(path.name for path in folder.glob("out*"))


def test_parquet_out_of_parquet_is_the_json_lines_in_order_with_the_inputs_types(folder, monkeypatch):
    monkeypatch.setattr("lfm2_cb.cli.parquet_output.BATCH_ROWS", 10)
    kept = ["id", "day", "price", "raw", "label", "nested"]
    assert run("--keep", *kept) == 3
    found, given = parquet.read_table("out.parquet"), parquet.read_table("in.parquet")
    records = sorted(lines(folder / "out.jsonl"), key=lambda record: record["index"])
    errors = lines(folder / "out.errors.jsonl")
    assert [e["index"] for e in errors] == [i for i in range(40) if i % 7 == 0] and len(records) == 34
    for name in ("index", "text", "finish_reason", "prompt_tokens", "output_tokens"):
        assert found[name].to_pylist() == [record[name] for record in records]
    good = given.filter(pa.array([i % 7 != 0 for i in range(40)]))
    for name in kept:
        assert found[name].type == given[name].type and found[name].to_pylist() == good[name].to_pylist()
    assert names(folder) == ["out.errors.jsonl", "out.job.json", "out.jsonl", "out.parquet"]


def test_run_again_it_goes_on_and_is_made_again(folder, capsys):
    assert run("--keep", "id") == 3
    whole, first = (folder / "out.jsonl").read_bytes(), parquet.read_table("out.parquet")
    for _ in range(2):  # nothing to do; killed before it was made
        assert run("--keep", "id") == 3
        assert "0 rows (40 were done before)" in capsys.readouterr().err
        assert parquet.read_table("out.parquet") == first
        (folder / "out.parquet").unlink()
    (folder / "out.jsonl").write_bytes(b"".join(whole.splitlines(keepends=True)[:9]) + b'{"index": 3')
    (folder / "out.parquet.tmp").write_bytes(b"PAR1 half of it")  # killed while it was made
    assert run("--keep", "id") == 3
    assert parquet.read_table("out.parquet") == first and "out.parquet.tmp" not in names(folder)
    assert run("--keep", "id", "--retry-errors") == 3
    assert parquet.read_table("out.parquet") == first


def test_others_files_stay(folder, capsys):
    (folder / "out.parquet").write_bytes(b"precious")
    assert run() == 2
    assert (folder / "out.parquet").read_bytes() == b"precious" and "--overwrite" in capsys.readouterr().err
    assert run("--overwrite") == 3
    assert run(output="out.jsonl") == 2  # the file beside it is of the job that makes Parquet
    assert run(output="in.parquet") == 2 and parquet.read_table("in.parquet").num_rows == 40
    (folder / "new.jsonl").write_text('{"prompt": "It was"}\n')
    assert run(source="new.jsonl", output="new.parquet") == 2
    assert "new.jsonl is the input" in capsys.readouterr().err


def test_many_sequences_are_lists(folder):
    assert run("--do-sample", "--num-return-sequences", "3", "--seed", "1") == 3
    found = parquet.read_table("out.parquet")
    assert found["text"].type == pa.list_(pa.string()) and {len(texts) for texts in found["text"].to_pylist()} == {3}


def test_no_answers_are_a_table_without_rows(folder):
    parquet.write_table(pa.table({"prompt": [[10**9], [10**8]], "day": [1, 2]}), "in.parquet")
    assert run("--keep", "day") == 3
    found = parquet.read_table("out.parquet")
    assert found.num_rows == 0 and found["day"].type == pa.int64() and found["text"].type == pa.string()


def test_parquet_out_of_standard_input(folder, monkeypatch):
    for _ in range(2):
        given = b'{"prompt": "It was", "x": 1}\n{"prompt": "Emma could", "x": 2.5}\n'
        monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(given)))
        assert run("--keep", "x", source="-") == 0
        found = parquet.read_table("out.parquet")
        assert found["x"].to_pylist() == [1.0, 2.5] and "row_digest" not in found.column_names


@pytest.mark.parametrize(
    "values, expected",
    [
        ([1, None, 2], [1, None, 2]),
        ([1, 2.5, None], [1.0, 2.5, None]),
        ([None, None, None], [None, None, None]),
        ([1, "two", [3]], ["1", '"two"', "[3]"]),
        ([{"a": 1}, {"b": "x"}, None], [{"a": 1, "b": None}, {"a": None, "b": "x"}, None]),
        ([{}, {}, None], ["{}", "{}", None]),
        ([[{}], [], None], ["[{}]", "[]", None]),
        ([10**30, 1, 2], [str(10**30), "1", "2"]),
        (["\ud800", "b", "c"], ['"\\ud800"', '"b"', '"c"']),
        ([True, False, None], [True, False, None]),
    ],
)
@pytest.mark.parametrize("batch", [1, 1000])
def test_kept_json_has_a_type_or_stays_json(folder, monkeypatch, batch, values, expected):
    monkeypatch.setattr("lfm2_cb.cli.parquet_output.BATCH_ROWS", batch)
    answer = {"text": "a", "finish_reason": "length", "prompt_tokens": 2, "output_tokens": 1}
    records = [{"index": i, **answer, "k": value} for i, value in enumerate(values)]
    (folder / "j.jsonl").write_text("".join(json.dumps(record) + "\n" for record in reversed(records)))
    write_parquet(folder / "j.jsonl", folder / "j.parquet", Source({}, None, lambda: iter(())), ["k"])
    assert parquet.read_table("j.parquet")["k"].to_pylist() == expected


def test_a_full_disk_leaves_what_was_there(folder, monkeypatch, capsys):
    assert run() == 3
    before = (folder / "out.parquet").read_bytes()
    monkeypatch.setattr("lfm2_cb.cli.parquet_output.os", SimpleNamespace(fsync=_full))
    assert run() == 1
    assert "goes on from here" in capsys.readouterr().err
    assert (folder / "out.parquet").read_bytes() == before and "out.parquet.tmp" not in names(folder)
    with pytest.raises(OutputError):
        write_parquet(folder / "out.jsonl", folder / "no" / "such.parquet", Source({}, None, lambda: iter(())), [])


def _full(_):
    raise OSError("No space left on device")


def test_answers_held_to_a_schema_have_a_typed_column(folder):
    pytest.importorskip("llguidance")
    shape = {
        "type": "object",
        "properties": {"age": {"type": "integer", "minimum": 0, "maximum": 9}, "is_in": {"type": "boolean"}},
        "required": ["age", "is_in"],
        "additionalProperties": False,
    }
    (folder / "schema.json").write_text(json.dumps(shape))
    flags = ["--json-schema", "schema.json", "--max-new-tokens", "40"]
    assert run(*flags, "--keep", "day") == 3
    found = parquet.read_table("out.parquet")
    assert found["json"].type == pa.struct({"age": pa.int64(), "is_in": pa.bool_()})
    assert found["json"].to_pylist() == [json.loads(text) for text in found["text"].to_pylist()]
    assert found.column_names[-2:] == ["json", "day"]
    several = ["--do-sample", "--num-return-sequences", "2", "--overwrite"]
    assert run(*flags, *several) == 3
    found = parquet.read_table("out.parquet")
    assert found["json"].to_pylist() == [[*map(json.loads, texts)] for texts in found["text"].to_pylist()]
    assert run(*flags, "--max-new-tokens", "3", "--overwrite") == 3
    assert {*parquet.read_table("out.parquet")["json"].to_pylist()} == {None}
    assert run(*flags, "--keep", "json") == 2
    assert run("--keep", "day", "--overwrite") == 3 and "json" not in parquet.read_table("out.parquet").column_names
