"""Files that survive: torn lines, other people's files, a full disk."""

import json
import os
import resource
import signal

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lfm2_cb.cli.writer import JobError, JobFiles, LineFile, OutputError, RowSet, write_atomically

RECORD = {"model": "m", "options": {"seed": 0}}


@pytest.fixture
def output(tmp_path):
    return tmp_path / "out.jsonl"


def write_job(output, indices, errors=(), **kwargs):
    files = JobFiles(output, RECORD, **kwargs)
    for i in indices:
        files.write({"index": i, "error": "bad"} if i in errors else {"index": i, "text": f"é{i}"}, i in errors)
    files.close()
    return files


def test_rows_are_known_again(output):
    write_job(output, [0, 5, 3, 9000, 7], errors=[3, 7])
    files = JobFiles(output, RECORD)
    assert [i for i in range(10_000) if i in files.done] == [0, 3, 5, 7, 9000] and len(files.done) == 5
    assert files.num_errors == 2
    files.close()
    assert output.read_text("utf-8").splitlines()[1] == '{"index": 5, "text": "é5"}'
    assert [json.loads(x)["index"] for x in (output.parent / "out.errors.jsonl").open()] == [3, 7]


def test_without_errors_there_is_no_errors_file(output):
    write_job(output, [0, 1])
    assert sorted(p.name for p in output.parent.iterdir()) == ["out.job.json", "out.jsonl"]


@pytest.mark.parametrize(
    "tail", [b'{"index": 9, "te', b"{", b"\n", b"\0" * 50, b'{"index": 8}\x00\n{"index": 9}\n', b'{"a": 1}\n']
)
def test_what_is_torn_is_cut_off_and_nothing_else(output, tail):
    write_job(output, [0, 1])
    whole = output.read_bytes()
    output.write_bytes(whole + tail)
    files = write_job(output, [2])
    assert len(files.done) == 3
    assert output.read_bytes() == whole + b'{"index": 2, "text": "\xc3\xa92"}\n'


@settings(deadline=None, max_examples=40)
@given(cut=st.integers(0, 200))
def test_cut_anywhere_every_whole_line_stays(tmp_path_factory, cut):
    output = tmp_path_factory.mktemp("cut") / "out.jsonl"
    write_job(output, range(8))
    data = output.read_bytes()[:cut]
    output.write_bytes(data)
    files = JobFiles(output, RECORD)
    assert len(files.done) == data.count(b"\n") and output.read_bytes() == data[: data.rfind(b"\n") + 1]
    files.close()


def test_another_job_or_a_strangers_file_is_refused(output):
    write_job(output, [0])
    with pytest.raises(JobError, match=r"options was \{'seed': 0\} and is \{'seed': 1\}"):
        JobFiles(output, {**RECORD, "options": {"seed": 1}})
    files = JobFiles(output, {**RECORD, "options": {"seed": 1}}, overwrite=True)
    assert len(files.done) == 0 and output.read_bytes() == b""
    files.close()
    stranger = output.with_name("mine.jsonl")
    stranger.write_text("precious\n")
    with pytest.raises(JobError, match="--overwrite"):
        JobFiles(stranger, RECORD)
    assert stranger.read_text() == "precious\n"
    output.with_suffix(".job.json").write_text("{")
    with pytest.raises(JobError, match="not a job's record"):
        JobFiles(output, RECORD)


def test_one_job_at_a_time(output):
    files = JobFiles(output, RECORD)
    for overwrite in (False, True):
        with pytest.raises(JobError, match="another job"):
            JobFiles(output, RECORD, overwrite=overwrite)
    files.close()
    JobFiles(output, RECORD).close()


def test_retry_errors_forgets_them(output):
    write_job(output, range(6), errors=[2, 4])
    files = JobFiles(output, RECORD, retry_errors=True)
    assert [i for i in range(6) if i not in files.done] == [2, 4] and files.num_errors == 0
    files.close()


def test_a_full_disk_leaves_whole_lines(output):
    """The limit on a file's size stands in for the disk: the write that crosses it is cut short, the next fails."""
    files = JobFiles(output, RECORD)
    before, ignored = resource.getrlimit(resource.RLIMIT_FSIZE), signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1000, before[1]))
    try:
        with pytest.raises(OutputError, match="File too large"):
            for i in range(1000):
                files.write({"index": i, "text": "x" * 30})
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
        signal.signal(signal.SIGXFSZ, ignored)
    data = output.read_bytes()
    assert data.endswith(b"\n") and 900 < len(data) <= 1000
    files.write({"index": 1000, "text": "room again"})
    files.close()
    assert len([json.loads(line) for line in output.open()]) == data.count(b"\n") + 1


def test_a_file_that_cannot_be_opened(tmp_path):
    with pytest.raises(OutputError, match="Is a directory"):
        LineFile(tmp_path)


def test_write_atomically_leaves_the_old_or_the_new(tmp_path):
    path = tmp_path / "record.json"
    write_atomically(path, b"one")
    write_atomically(path, b"two")
    assert path.read_bytes() == b"two" and os.listdir(tmp_path) == ["record.json"]
    with pytest.raises(OutputError):
        write_atomically(tmp_path / "no" / "such", b"x")


def test_half_a_surrogate_pair_can_be_written(output):
    files = JobFiles(output, RECORD)
    files.write({"index": 0, "text": "", "kept": "\ud800"})
    files.close()
    assert json.loads(output.read_bytes())["kept"] == "\ud800"


@settings(deadline=None)
@given(st.sets(st.integers(0, 100_000)))
def test_row_set_is_a_set(indices):
    rows = RowSet()
    for i in [*indices, *indices]:
        rows.add(i)
    assert len(rows) == len(indices) and all(i in rows for i in indices)
    assert not any(i in rows for i in {i + 1 for i in indices} - indices)


@settings(deadline=None)
@given(st.dictionaries(st.integers(0, 100_000), st.integers(0, 2**64 - 1)))
def test_row_set_knows_digests(digests):
    rows = RowSet()
    for i, digest in digests.items():
        rows.add(i, f"{digest:016x}")
    rows.add(100_001)
    assert all(rows.has_digest(i, f"{digest:016x}") for i, digest in digests.items())
    assert not any(rows.has_digest(i, f"{digest ^ 1:016x}") for i, digest in digests.items())
    assert not rows.has_digest(100_001, "0" * 15 + "1") and not rows.has_digest(5_000_000, "0" * 16)


@pytest.mark.parametrize("digest", [5, "xyz", "0" * 15, []])
def test_a_line_with_a_digest_that_is_none_is_cut_off(output, digest):
    write_job(output, [0])
    whole = output.read_bytes()
    with output.open("a") as file:
        file.write(json.dumps({"index": 1, "row_digest": digest}) + "\n")
    write_job(output, [])
    assert output.read_bytes() == whole
