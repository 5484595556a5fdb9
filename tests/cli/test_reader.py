"""Rows from JSONL, Parquet and datasets."""

import json
import os
import threading

import datasets
import pyarrow
import pytest
from pyarrow import parquet

from lfm2_cb.cli import reader
from lfm2_cb.cli.reader import BadRow, InputError, Source, check_first_rows, open_source, take_kept, take_prompt

ROWS = [{"id": i, "prompt": f"text {i}", "extra": [i]} for i in range(600)]


@pytest.fixture(params=["jsonl", "parquet", "saved", "folder", "dict"])
def source(request, tmp_path):
    data = datasets.Dataset.from_list(ROWS)
    if request.param == "jsonl":
        path = tmp_path / "rows.jsonl"
        path.write_text("".join(json.dumps(row) + "\n" for row in ROWS))
        return open_source(str(path), column="prompt", keep=["id"])
    if request.param == "parquet":
        data.to_parquet(tmp_path / "rows.parquet")
        return open_source(str(tmp_path / "rows.parquet"), keep=["id"])
    if request.param == "folder":
        (tmp_path / "data").mkdir()
        data.to_parquet(tmp_path / "data" / "rows.parquet")
        return open_source(str(tmp_path / "data"), keep=["id"])
    if request.param == "dict":
        datasets.DatasetDict({"train": data, "test": data.select(range(3))}).save_to_disk(tmp_path / "saved")
        return open_source(str(tmp_path / "saved"), split="train", keep=["id"])
    data.save_to_disk(tmp_path / "saved")
    return open_source(str(tmp_path / "saved"), keep=["id"])


def test_every_kind_of_input_gives_the_same_rows(source):
    rows = list(source.rows())
    assert [i for i, _ in rows] == list(range(600)) and source.num_rows == 600
    assert [take_prompt(row, None) for _, row in rows] == [row["prompt"] for row in ROWS]
    assert [take_kept(row, ["id"]) for _, row in rows] == [{"id": i} for i in range(600)]
    assert list(source.rows()) == rows  # again from the start


def test_lines_that_are_no_rows(tmp_path, monkeypatch):
    monkeypatch.setattr(reader, "MAX_LINE_BYTES", 50)
    path = tmp_path / "rows.jsonl"
    lines = [b'\xef\xbb\xbf{"prompt": "a"}', b"", b"{", b"[1]", b'{"prompt": "\xff"}', b'{"prompt": NaN}', b"[" * 49]
    lines += [b'{"prompt": "' + b"x" * 200 + b'"}', b'{"prompt": "z"}']
    path.write_bytes(b"\n".join(lines))
    rows = dict(open_source(str(path)).rows())
    assert rows.pop(0) == {"prompt": "a"} and rows.pop(8) == {"prompt": "z"}
    assert list(rows) == [2, 3, 4, 5, 6, 7] and all(isinstance(row, BadRow) for row in rows.values())
    assert "list" in str(rows[3]) and "NaN" in str(rows[5]) and "more than 50 bytes" in str(rows[7])


def test_deep_nesting_is_a_bad_row(tmp_path):
    path = tmp_path / "rows.jsonl"
    path.write_bytes(b"[" * 100_000 + b"\n" + b'{"prompt": "a"}\n')
    rows = dict(open_source(str(path)).rows())
    assert isinstance(rows[0], BadRow) and rows[1] == {"prompt": "a"}


def test_a_named_pipe_is_read_as_jsonl(tmp_path):
    path = tmp_path / "pipe"
    os.mkfifo(path)
    source = open_source(str(path))
    writer = threading.Thread(target=lambda: path.write_text('{"prompt": "a"}\n{"prompt": "b"}\n'))
    writer.start()
    assert [row["prompt"] for _, row in source.rows()] == ["a", "b"]
    writer.join(10)


def test_text_is_a_prompt_a_line(tmp_path):
    path = tmp_path / "rows.txt"
    path.write_bytes(b"\xef\xbb\xbffirst\r\n\n  \n two words \n\xff\nlast, without an end")
    source = open_source(str(path))
    rows = dict(source.rows())
    assert {i: row["prompt"] for i, row in rows.items() if i != 4} == {
        0: "first",
        3: " two words ",
        5: "last, without an end",
    }
    assert isinstance(rows[4], BadRow) and "UTF-8" in str(rows[4])
    assert next(iter(source.rows())) == (0, {"prompt": "first"})


@pytest.mark.parametrize("suffix, between", [(".csv", ","), (".tsv", "\t")])
def test_csv_has_its_columns_names_in_its_first_line(tmp_path, suffix, between):
    path = tmp_path / f"rows{suffix}"
    lines = ["id,prompt,x", '1,"a ""b"", c\nd",', "2,é,0", "3,too,many,fields", "", "4,too few", '5,"torn']
    path.write_text("\r\n".join(lines).replace(",", between), encoding="utf-8-sig", newline="")
    rows = dict(open_source(str(path), keep=["id"]).rows())
    assert rows[0] == {"id": "1", "prompt": 'a "b", c\nd'.replace(",", between)}
    assert rows[1] == {"id": "2", "prompt": "é"}
    assert [str(rows[i])[:7] for i in (2, 3, 4)] == ["it has ", "it has ", "not CSV"] and len(rows) == 5
    path.write_bytes("id,prompt\n1,\udcff\n2,b\n".replace(",", between).encode("utf-8", "surrogateescape"))
    rows = dict(open_source(str(path)).rows())
    assert str(rows[0]) == "not UTF-8" and rows[1] == {"prompt": "b"}


def test_long_fields_and_lines_are_bad_rows(tmp_path, monkeypatch):
    monkeypatch.setattr(reader, "MAX_LINE_BYTES", 50)
    for name, first in (("rows.csv", "prompt\n"), ("rows.txt", "")):
        (tmp_path / name).write_text(first + "short\n" + "x" * 60 + "\nlast\n")
        rows = [row for _, row in open_source(str(tmp_path / name)).rows()]
        assert rows[0] == {"prompt": "short"} and rows[-1] == {"prompt": "last"}
        assert all(isinstance(row, BadRow) for row in rows[1:-1]) and len(rows) >= 3


def test_messages_that_are_text_are_no_chat():
    with pytest.raises(BadRow, match="--column messages"):
        take_prompt({"messages": "[]"}, None)
    assert take_prompt({"messages": "[]"}, "messages") == "[]"


def test_first_rows_are_looked_at(tmp_path, caplog):
    rows = [(0, BadRow("broken")), (1, {"text": "a", "id": 1}), (2, {"prompt": "b"})]
    stream = Source({}, None, iter([iter(rows)]).__next__, is_stream=True)  # it can be read once
    assert list(check_first_rows(stream, None, ["id"]).rows()) == rows
    for kept in (rows, rows[:2]):
        source = Source({}, None, lambda kept=kept: iter(kept))
        with pytest.raises(InputError, match=r"none of the first . rows .* row 0: broken"):
            check_first_rows(source, "nope", [])
    assert check_first_rows(Source({}, 0, lambda: iter([])), None, []).num_rows == 0  # nothing to do is no error
    far = [(i, {"id": i}) for i in range(100)] + [(100, {"prompt": "late"})]
    with pytest.raises(InputError, match=r"none of the first 100 rows .* neither a prompt nor messages .it has 'id'"):
        check_first_rows(Source({}, None, lambda: iter(far)), None, [])


@pytest.mark.parametrize(
    "row, column, reason",
    [
        ({}, None, "neither"),
        ({"prompt": None}, None, "neither"),
        ({"prompt": "a", "messages": []}, None, "--column"),
        ({"prompt": "a"}, "text", "no 'text'"),
    ],
)
def test_a_row_without_one_prompt_says_so(row, column, reason):
    with pytest.raises(BadRow, match=reason):
        take_prompt(row, column)


def test_kept_columns_become_json():
    assert take_kept({"a": b"x", "b": {"c": [1.5]}}, ["a", "b", "d"]) == {"a": "b'x'", "b": {"c": [1.5]}, "d": None}
    with pytest.raises(BadRow, match="JSON"):
        take_kept({"a": float("nan")}, ["a"])


@pytest.mark.parametrize(
    "name, kwargs, message",
    [
        ("nothing.jsonl", {}, "no such file"),
        ("nothing/at_all", {}, "neither a file nor a dataset"),
        ("rows.parquet", {"column": "text"}, "has the columns other, but not text"),
        ("rows.parquet", {}, "not prompt or messages"),
        ("rows.parquet", {"split": "train"}, "split"),
        ("broken.parquet", {}, "not a Parquet file"),
        ("saved", {}, "name one with --split"),
        ("saved", {"split": "dev"}, "train, test"),
        ("none.csv", {}, "no such file"),
        ("none.txt", {}, "no such file"),
        ("rows.txt", {"column": "text"}, "has the columns prompt, but not text"),
        ("rows.txt", {"keep": ["id"]}, "but not id"),
        ("rows.csv", {"column": "text"}, "has the columns a, b, but not text"),
        ("twice.csv", {}, "must name the columns"),
        ("nothing.csv", {}, "not prompt or messages"),
        ("empty", {}, "neither a file nor a dataset"),
    ],
)
def test_an_input_that_cannot_be_read_says_why(tmp_path, monkeypatch, name, kwargs, message):
    monkeypatch.chdir(tmp_path)
    parquet.write_table(pyarrow.table({"other": [1]}), "rows.parquet")
    (tmp_path / "broken.parquet").write_bytes(b"PAR1 and so on")
    (tmp_path / "empty").mkdir()
    for file, text in {"rows.txt": "a", "rows.csv": "a,b\n1,2", "twice.csv": "a,a\n", "nothing.csv": ""}.items():
        (tmp_path / file).write_text(text)
    data = datasets.Dataset.from_list(ROWS[:2])
    datasets.DatasetDict({"train": data, "test": data}).save_to_disk(tmp_path / "saved")
    with pytest.raises(InputError, match=message):
        open_source(name, **kwargs)


def test_a_parquet_file_damaged_in_the_middle_stops_with_the_row(tmp_path):
    path = tmp_path / "rows.parquet"
    parquet.write_table(
        pyarrow.table({"prompt": [os.urandom(20).hex() for _ in range(9000)]}), path, row_group_size=900
    )
    data = bytearray(path.read_bytes())
    middle = len(data) // 2
    data[middle : middle + 20000] = bytes(20000)
    path.write_bytes(data)
    with pytest.raises(InputError, match="cannot be read beyond row"):
        for _ in open_source(str(path)).rows():
            pass
