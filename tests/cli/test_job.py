"""The job over the engine: what each row becomes."""

import json
import random

import pytest
import torch
from helpers import demo_prompts
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from lfm2_cb import ContinuousBatchingGenerator
from lfm2_cb.cli.job import Job
from lfm2_cb.cli.progress import NoProgress
from lfm2_cb.cli.reader import Source, open_source
from lfm2_cb.cli.writer import JobFiles
from lfm2_cb.engine.loop import BrokenError

GREEDY = {"do_sample": False, "max_new_tokens": 6, "seed": 0}


@pytest.fixture(scope="module")
def generator(demo_stock, demo_tokenizer):
    with ContinuousBatchingGenerator(
        demo_stock, demo_tokenizer, cache_memory="8MiB", max_sequences=4, max_batch_tokens=256
    ) as generator:
        yield generator
        assert not generator.engine.has_unfinished and not generator.loop._submissions
        generator.engine.scheduler.cache.check_integrity([])


def run(generator, tmp_path, rows, options=None, **kwargs):
    """Run rows (JSON objects, or bytes of a line); returns records and error records."""
    path = tmp_path / "in.jsonl"
    path.write_bytes(b"".join((r if isinstance(r, bytes) else json.dumps(r).encode()) + b"\n" for r in rows))
    source = open_source(str(path), column=kwargs.get("column"), keep=kwargs.get("keep", ()))
    files = JobFiles(tmp_path / "out.jsonl", {}, overwrite=True)
    try:
        Job(generator, generator.resolve(None, options or GREEDY), **kwargs).run(source, files, NoProgress())
    finally:
        files.close()
    errors = files.errors.read_bytes().splitlines() if files.errors.exists() else []
    return [json.loads(x) for x in files.output.read_bytes().splitlines()], [json.loads(x) for x in errors]


@pytest.mark.parametrize("ordered", [True, False])
def test_rows_get_what_generate_says(generator, tmp_path, ordered):
    texts = demo_prompts(30)
    expected = [o.text for o in generator.generate(texts, **GREEDY)]
    records, errors = run(generator, tmp_path, [{"prompt": t} for t in texts], ordered=ordered)
    assert not errors and sorted(r["index"] for r in records) == list(range(30))
    assert {r["index"]: r["text"] for r in records} == dict(enumerate(expected))
    if ordered:
        assert [r["index"] for r in records] == list(range(30))
    first = next(r for r in records if r["index"] == 0)
    assert first["output_tokens"] == 6 and first["finish_reason"] in ("length", "stop")
    assert first["prompt_tokens"] == len(generator.tokenizer(texts[0])["input_ids"])


def test_bad_rows_have_their_reason_and_do_not_stop_the_job(generator, tmp_path):
    chat = [{"role": "user", "content": "Continue.\nIt was"}]
    rows = [
        {"prompt": "It was"},
        b"{",
        {"messages": chat},
        {"prompt": [5, 10**6]},
        {"prompt": [5] * 5000},
        {"prompt": 7},
        {"messages": [{"role": "user"}]},
        {"prompt": "half a \ud800 pair"},
        {"prompt": [5, 6], "messages": None},
        {"prompt": {"role": "user"}},
    ]
    records, errors = run(generator, tmp_path, rows, ordered=True)
    reasons = {e["index"]: e["error"] for e in errors}
    assert {r["index"] for r in records} | reasons.keys() == set(range(10)) and len(records) + len(errors) == 10
    assert {0, 2, 8} <= {r["index"] for r in records} and {1, 3, 4, 5, 9} <= reasons.keys()
    assert "the prompt has token id 1000000" in reasons[3] and "not JSON" in reasons[1]
    assert "max_position_embeddings" in reasons[4] and "int" in reasons[5]
    assert reasons[6].startswith("BadRow: the tokenizer or its chat template cannot use it: ")
    assert reasons[7] == "PromptError: the prompt is not valid text: a lone surrogate '\\ud800' at character 7"


@pytest.mark.parametrize(
    "row",
    [
        {"prompt": "\udc00"},
        {"messages": [{"role": "user", "content": "a \ud800"}]},
        {"messages": [{"role": "us\ud800er", "content": "a"}]},
    ],
)
def test_a_lone_surrogate_is_that_rows_error(generator, tmp_path, row):
    records, errors = run(generator, tmp_path, [{"prompt": "It was"}, row, {"prompt": "He had", "id": "\ud800"}])
    assert sorted(r["index"] for r in records) == [0, 2]
    (error,) = errors
    assert error["index"] == 1 and error["error"].startswith("PromptError: the prompt is not valid text: a lone surr")


def test_kept_columns_and_many_sequences(generator, tmp_path):
    options = {"do_sample": True, "num_return_sequences": 3, "max_new_tokens": 4, "seed": 2}
    rows = [{"q": "It was", "id": {"a": i}, "other": 1} for i in range(5)]
    records, _ = run(generator, tmp_path, rows, options, column="q", keep=["id"])
    assert all(len(r["text"]) == len(r["output_tokens"]) == 3 and r["id"] == {"a": r["index"]} for r in records)
    assert "other" not in records[0]
    again, _ = run(generator, tmp_path, rows, options, column="q", keep=["id"], ordered=True)
    assert sorted(again, key=str) == sorted(records, key=str)  # a row's draws depend on its number only
    assert len({str(r["text"]) for r in records}) == 5


@pytest.mark.parametrize("ordered", [True, False])
def test_a_failed_step_costs_nobody_a_row(generator, tmp_path, ordered):
    texts = demo_prompts(20)
    expected = {i: o.text for i, o in enumerate(generator.generate(texts, **GREEDY))}
    calls = 0

    def fail_sometimes(module, args):
        nonlocal calls
        calls += 1
        if calls == 7:
            raise torch.OutOfMemoryError("no room")

    hook = generator.model.model.layers[0].register_forward_pre_hook(fail_sometimes)
    try:
        records, errors = run(generator, tmp_path, [{"prompt": t} for t in texts], ordered=ordered)
    finally:
        hook.remove()
    assert calls > 7 and not errors and {r["index"]: r["text"] for r in records} == expected
    if ordered:
        assert [r["index"] for r in records] == list(range(20))


def test_a_row_that_fails_twice_is_an_error(generator, tmp_path):
    poison = generator.tokenizer("zebra")["input_ids"][-1]
    good = demo_prompts(5)
    assert not any(poison in generator.tokenizer(t)["input_ids"] for t in good)

    def fail_on_poison(module, args, kwargs):
        if (kwargs["input_ids"] == poison).any():
            raise RuntimeError("poisoned")

    hook = generator.model.model.register_forward_pre_hook(fail_on_poison, with_kwargs=True)
    try:
        records, errors = run(generator, tmp_path, [{"prompt": "zebra"}, *({"prompt": t} for t in good)], ordered=True)
    finally:
        hook.remove()
    assert errors[0]["index"] == 0 and "poisoned" in errors[0]["error"]
    assert len(records) + len(errors) == 6


def test_memory_is_a_window_whatever_the_input(generator, tmp_path):
    read, written = 0, 0

    def rows():
        nonlocal read
        for i in range(60):
            read += 1
            yield i, {"prompt": [5, 6, 7]}

    class Counting(JobFiles):
        def write(self, record, is_error=False):
            nonlocal written
            super().write(record, is_error)
            written += 1
            assert read - written <= job.window

    job = Job(generator, generator.resolve(None, {**GREEDY, "max_new_tokens": 2}))
    files = Counting(tmp_path / "out.jsonl", {})
    job.run(Source({}, None, rows), files, NoProgress())
    files.close()
    assert written == 60 > job.window


def test_stopping_leaves_no_request_behind(generator, tmp_path):
    class Full(JobFiles):
        def write(self, record, is_error=False):
            raise OSError("full")

    job = Job(generator, generator.resolve(None, GREEDY))
    files = Full(tmp_path / "out.jsonl", {})
    with pytest.raises(OSError, match="full"):
        job.run(Source({}, None, lambda: ((i, {"prompt": [5, 6]}) for i in range(50))), files, NoProgress())
    files.close()
    assert not generator.engine.has_unfinished


def test_a_broken_engine_stops_the_job_and_blames_no_row(demo_stock, demo_tokenizer, tmp_path):
    broken = ContinuousBatchingGenerator(demo_stock, demo_tokenizer, cache_memory="8MiB", max_sequences=4)

    def fail():
        raise KeyError("lost")

    broken.engine.scheduler.schedule = fail
    with pytest.raises(BrokenError, match="lost"):
        run(broken, tmp_path, [{"prompt": "It was"}] * 30)
    assert (tmp_path / "out.jsonl").read_bytes() == b"" and not (tmp_path / "out.errors.jsonl").exists()


# Fuzz: any bytes as input give one record a row, and nothing else

json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8) | st.integers(0, 4095),
    lambda inner: (
        st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from(["role", "content", "x"]), inner, max_size=3)
    ),
    max_leaves=6,
)
messages = st.lists(
    st.fixed_dictionaries({"role": st.sampled_from(["user", "assistant", "?"]), "content": json_values})
)
json_rows = st.dictionaries(st.sampled_from(["prompt", "messages", "id", "x"]), json_values | messages, max_size=3)
lines = st.one_of(
    json_rows.map(lambda row: json.dumps(row).encode()),
    json_values.map(lambda value: json.dumps({"prompt": value}).encode()),
    st.tuples(json_rows, st.integers(0, 60)).map(lambda pair: json.dumps(pair[0]).encode()[: pair[1]]),
    st.binary(max_size=20).map(lambda data: data.replace(b"\n", b"")),
)


@settings(max_examples=60, deadline=None, suppress_health_check=list(HealthCheck))
@given(rows=st.lists(lines, max_size=6), ordered=st.booleans())
def test_fuzzed_input_gives_one_record_a_row(generator, tmp_path_factory, rows, ordered):
    options = {"do_sample": False, "max_new_tokens": 2, "seed": 0}
    records, errors = run(generator, tmp_path_factory.mktemp("fuzz"), rows, options, ordered=ordered, keep=["id"])
    indices = [r["index"] for r in records] + [e["index"] for e in errors]
    assert sorted(indices) == [i for i, row in enumerate(rows) if row.strip()]
    assert all(isinstance(r["text"], str) for r in records) and all(": " in e["error"] for e in errors)


@settings(max_examples=60, deadline=None, suppress_health_check=list(HealthCheck))
@given(seed=st.integers(0, 2**32))
def test_fuzzed_parquet_is_read_or_refused(tmp_path_factory, seed):
    import pyarrow
    from pyarrow import parquet

    from lfm2_cb.cli.reader import InputError

    rng, path = random.Random(seed), tmp_path_factory.mktemp("fuzz") / "rows.parquet"
    parquet.write_table(pyarrow.table({"prompt": ["a", "b", "c"] * 5, "id": list(range(15))}), path)
    data = bytearray(path.read_bytes())
    for _ in range(rng.randint(1, 8)):
        data[rng.randrange(len(data))] = rng.randrange(256)
    path.write_bytes(data[: rng.choice([len(data), rng.randrange(len(data))])])
    try:
        rows = list(open_source(str(path), keep=["id"]).rows())
    except InputError:
        return
    assert [i for i, _ in rows] == list(range(len(rows)))
