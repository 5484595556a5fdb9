"""Rows from JSONL, Parquet and datasets."""

import json
import os
import threading

import datasets
import pyarrow
import pytest
from pyarrow import parquet

from lfm2_cb.cli import reader
from lfm2_cb.cli.reader import BadRow, InputError, open_source, take_kept, take_prompt

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
        ("rows.parquet", {"column": "text"}, "has the columns other, and not text"),
        ("rows.parquet", {}, "not prompt or messages"),
        ("rows.parquet", {"split": "train"}, "split"),
        ("broken.parquet", {}, "no Parquet file"),
        ("saved", {}, "name one with --split"),
        ("saved", {"split": "dev"}, "train, test"),
        ("empty", {}, "neither a file nor a dataset"),
    ],
)
def test_an_input_that_cannot_be_read_says_why(tmp_path, monkeypatch, name, kwargs, message):
    monkeypatch.chdir(tmp_path)
    parquet.write_table(pyarrow.table({"other": [1]}), "rows.parquet")
    (tmp_path / "broken.parquet").write_bytes(b"PAR1 and so on")
    (tmp_path / "empty").mkdir()
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
