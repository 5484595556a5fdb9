"""Ray Data on a local cluster of two actors, beside stock."""

import os
import random
import time
import uuid
from pathlib import Path

import pytest

pytest.importorskip("ray")
os.environ["RAY_USAGE_STATS_ENABLED"] = "0"

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import ray
import ray.data
import torch
from helpers import demo_prompts, stock_greedy
from lfm2_cb.integrations.ray import Lfm2CbPredictor, generate_parquet

import lfm2_cb
from lfm2_cb.loading import UnsafeCheckpointError
from lfm2_cb.requests.options import UnsupportedOptionError

MODEL = lfm2_cb.demo_model_path()
GREEDY = {"do_sample": False, "eos_token_id": None, "max_new_tokens": 5}
SMALL = {"cache_memory": "32MiB", "max_sequences": 16}


@pytest.fixture(scope="module")
def cluster():
    ray.init(num_cpus=3, include_dashboard=False, object_store_memory=100 * 2**20, log_to_driver=False)
    ray.data.DataContext.get_current().enable_progress_bars = False
    yield
    ray.shutdown()


def test_two_actors_keep_their_engines_between_batches(cluster, demo_stock, demo_tokenizer, tmp_path):
    class Watched(Lfm2CbPredictor):  # defined here, so that it travels to the actors by value
        def __init__(self, **kwargs):
            super().__init__(**kwargs)
            self.name, self.num_batches = uuid.uuid4().hex, 0

        def __call__(self, batch):
            self.num_batches += 1
            Path(tmp_path, self.name).touch()
            while len(list(tmp_path.iterdir())) < 2:  # neither does all the work before the other has begun
                time.sleep(0.05)
            n = len(batch["prompt"])
            return {**super().__call__(batch), "actor": [self.name] * n, "batch": [self.num_batches] * n}

    prompts = demo_prompts(24)
    rows = [{"id": i, "prompt": prompt} for i, prompt in enumerate(prompts)]
    answers = (
        ray.data.from_items(rows, override_num_blocks=8)
        .map_batches(
            Watched,
            fn_constructor_kwargs={
                "model": MODEL,
                "generation_kwargs": GREEDY,
                "generator_kwargs": SMALL,
                "dtype": "float32",
            },
            batch_size=3,
            compute=ray.data.ActorPoolStrategy(size=2, max_tasks_in_flight_per_actor=2),
        )
        .take_all()
    )
    answers = sorted(answers, key=lambda row: row["id"])
    assert [row["prompt"] for row in answers] == prompts
    for row in answers:
        token_ids = stock_greedy(demo_stock, demo_tokenizer(row["prompt"])["input_ids"], 5)
        assert row["generated_text"] == demo_tokenizer.decode(token_ids, skip_special_tokens=True)
        assert (row["finish_reason"], row["num_tokens"], row["error"]) == ("length", 5, "")
    assert len({row["actor"] for row in answers}) == 2, "one engine an actor, made once"
    assert sum(len({r["batch"] for r in answers if r["actor"] == a}) for a in {r["actor"] for r in answers}) == 8


def test_parquet_to_parquet(cluster, tmp_path):
    prompts = [*demo_prompts(10), ""]
    pq.write_table(pa.table({"key": list(range(11)), "text": prompts}), tmp_path / "in.parquet")
    report = generate_parquet(
        MODEL,
        str(tmp_path / "in.parquet"),
        str(tmp_path / "out"),
        num_actors=2,
        batch_size=4,
        prompt_column="text",
        generation_kwargs={**GREEDY, "max_new_tokens": 3},
        generator_kwargs=SMALL,
    )
    rows = sorted(pq.read_table(tmp_path / "out").to_pylist(), key=lambda row: row["key"])
    assert [row["text"] for row in rows] == prompts and report["rows"] == 11
    failed = [row for row in rows if row["error"]]
    assert report["errors"] == len(failed) == sum(row["finish_reason"] == "error" for row in rows)
    assert report["tokens"] == 3 * (11 - len(failed))


def test_actors_that_leave_no_cpu_are_refused(cluster, tmp_path):
    with pytest.raises(ValueError, match="3 actors of 1 CPUs leave none of the cluster's 3"):
        generate_parquet(MODEL, str(tmp_path), str(tmp_path / "out"), num_actors=3)


# The predictor by itself


@pytest.fixture(scope="module")
def predictor():
    options = {**GREEDY, "max_new_tokens": 4, "do_sample": True, "seed": 3}
    return Lfm2CbPredictor(MODEL, generation_kwargs=options, generator_kwargs=SMALL, dtype="float32")


def test_rows_that_cannot_be_run_say_why_and_stop_nobody(predictor):
    batch = {"prompt": [[5, 6, 7], [], [10**6], 3.5, [9] * 5000, [{"role": "user", "content": "Hello"}], "It was"]}
    answers = predictor(batch)
    assert [bool(error) for error in answers["error"]] == [False, True, True, True, True, False, False]
    assert answers["num_tokens"].tolist() == [4, 0, 0, 0, 0, 4, 4]
    assert answers["finish_reason"] == ["length", "error", "error", "error", "error", "length", "length"]
    assert "outside the vocabulary" in answers["error"][2] and "5000 tokens" in answers["error"][4]


def test_sampled_answers_depend_on_the_seed_and_the_batch(predictor):
    rng = random.Random(0)
    batch = {"prompt": [[rng.randrange(3, 4000) for _ in range(8)] for _ in range(4)] + [[5, 6, 7]] * 2}
    first, again = predictor(batch)["generated_text"], predictor(batch)["generated_text"]
    assert first == again and first[4] != first[5]
    other = predictor({"prompt": [[5, 6, 7]] * 2})["generated_text"]
    assert other != first[4:]


def test_a_path_is_loaded_as_load_model_does(tmp_path, demo_stock, demo_tokenizer):
    path = tmp_path / "fp32"
    demo_stock.save_pretrained(path)
    demo_tokenizer.save_pretrained(path)
    for said, expected in ({}, "float32"), ({"dtype": None}, "float32"), ({"dtype": "bfloat16"}, "bfloat16"):
        made = Lfm2CbPredictor(str(path), generator_kwargs=SMALL, **said)
        assert made.generator.model.dtype == getattr(torch, expected)
    (path / "model.safetensors").rename(path / "pytorch_model.bin")
    with pytest.raises(UnsafeCheckpointError):
        Lfm2CbPredictor(str(path), generator_kwargs=SMALL)


def test_what_cannot_be_honoured_is_refused_when_the_actor_starts(predictor):
    with pytest.raises(UnsupportedOptionError, match="num_beams"):
        Lfm2CbPredictor(MODEL, generation_kwargs={"num_beams": 2}, generator_kwargs=SMALL)
    with pytest.raises(ValueError, match="one sequence a row"):
        Lfm2CbPredictor(
            MODEL, generation_kwargs={"num_return_sequences": 2, "do_sample": True}, generator_kwargs=SMALL
        )
    with pytest.raises(ValueError, match="no column 'prompt', only text"):
        predictor({"text": ["a"]})


def test_what_load_model_refuses_is_refused(tmp_path):
    config = Path(MODEL, "config.json").read_text("utf-8")
    (tmp_path / "config.json").write_text(config, "utf-8")
    (tmp_path / "pytorch_model.bin").write_bytes(b"pickle")
    with pytest.raises(lfm2_cb.loading.UnsafeCheckpointError, match="pickled"):
        Lfm2CbPredictor(str(tmp_path))
    (tmp_path / "config.json").write_text('{"model_type": "gpt2"}', "utf-8")
    with pytest.raises(TypeError, match="gpt2"):
        Lfm2CbPredictor(str(tmp_path))


def test_errors_of_prompts_are_columns_unless_asked_to_be_raised():
    batch = {"prompt": np.array(["It was", ""], dtype=object)}
    options = {"model": MODEL, "generator_kwargs": SMALL}
    predictor = Lfm2CbPredictor(**options, generation_kwargs={**GREEDY, "max_new_tokens": 2})
    answers = predictor({"prompt": np.array([[5, 6], []], dtype=object)})
    assert answers["num_tokens"].tolist() == [2, 0] and answers["finish_reason"] == ["length", "error"]
    assert answers["error"][0] == "" and "prompt 1 is empty" in answers["error"][1]
    strict = Lfm2CbPredictor(**options, generation_kwargs={**GREEDY, "on_error": "raise"})
    with pytest.raises(ValueError, match="prompt 0 is empty"):
        strict({"prompt": np.array([[]], dtype=object)})
    assert strict(batch | {"prompt": batch["prompt"][:1]})["error"] == [""]
