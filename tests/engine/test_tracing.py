"""Traces: what their events add up to, what a torn or full file does, and that every door writes one."""

import collections
import itertools
import json
import os
import random

import pytest
from helpers import demo_prompts, random_prompts, stock_greedy
from transformers import GenerationConfig

import lfm2_cb
from lfm2_cb import ContinuousBatchingGenerator
from lfm2_cb.cli.plot import read_trace
from lfm2_cb.hf.manager_config import Lfm2CbBatchingConfig

MODEL = lfm2_cb.demo_model_path()
GREEDY = {"do_sample": False, "eos_token_id": None}


def by_name(path):
    named = collections.defaultdict(list)
    for event in json.loads(path.read_text()):
        named[event["name"]].append(event)
    return named


def of_request(events, tid):
    return [event for event in events if event["tid"] == tid]


def test_events_add_up_under_preemption_and_chunks(tmp_path, demo_stock):
    """A cache too small for all of them, chunks of 20 tokens: each request's spans are whole, and do not overlap."""
    path, prompts = tmp_path / "t.json", random_prompts(random.Random(3), 8, 70)
    with ContinuousBatchingGenerator(
        demo_stock, cache_memory="400KB", block_size=16, max_batch_tokens=20, prefix_caching=False
    ) as generator:
        with generator.trace(path):
            outputs = generator.generate(prompts, max_new_tokens=40, **GREEDY)
        num_preempted = sum(output.metrics.num_preemptions for output in outputs)
        generator.generate(prompts[:1], max_new_tokens=4, **GREEDY)  # after the block: not in the file
    assert num_preempted > 0
    assert [output.token_ids for output in outputs] == [stock_greedy(demo_stock, p, 40) for p in prompts]
    named = by_name(path)
    tids = [event["tid"] for event in named["waiting"]]
    assert len(tids) == len(set(tids)) == len(prompts)
    assert len(named["preempted"]) == num_preempted
    assert len({event["ts"] for event in named["step"]}) == len(named["step"])
    assert sum(e["args"]["prefill_tokens"] for e in named["step"]) == sum(
        e["args"]["tokens"] for e in named["prefill"]
    )
    for tid, prompt in zip(sorted(tids), prompts, strict=True):
        chunks, decodes = of_request(named["prefill"], tid), of_request(named["decode"], tid)
        preempted = of_request(named["preempted"], tid)
        assert sum(e["args"]["tokens"] for e in chunks) >= len(prompt)
        again = sum(1 for e in chunks if e["args"]["from"] == 0) - 1
        assert again == len(preempted)  # each preemption begins once more from nothing
        # every token comes either of a decode, or of the chunk that reached the last known token
        assert 39 - len(preempted) <= sum(e["args"]["tokens"] for e in decodes) <= 40
        assert decodes[-1]["args"]["finish_reason"] == "length"
        spans = sorted((e["ts"], e["ts"] + e["dur"]) for e in (*chunks, *decodes, *preempted))
        assert all(end <= start + 0.2 for (_, end), (start, _) in itertools.pairwise(spans))
    last = named["cache blocks"][-1]["args"]
    assert last["in use"] <= 2 or last["cached"] == 0
    assert max(e["args"]["running"] for e in named["sequences"]) >= 2


def test_drafts_and_cached_prefixes_are_told(tmp_path):
    path = tmp_path / "t.json"
    with ContinuousBatchingGenerator(MODEL) as generator:
        prompt = generator.tokenizer("It is a truth universally acknowledged, that " * 20)["input_ids"]
        generator.generate([prompt], max_new_tokens=2, **GREEDY)
        with generator.trace(path):
            (output,) = generator.generate([prompt], max_new_tokens=60, prompt_lookup_num_tokens=4, **GREEDY)
    named = by_name(path)
    (chunk,), (decode,) = named["prefill"], named["decode"]
    assert chunk["args"]["from"] == output.metrics.num_cached_tokens > 0
    accepted = sum(event["args"]["accepted"] for event in named["step"])
    assert decode["args"]["tokens"] == 59 == decode["args"]["steps"] + accepted and accepted > 0
    assert sum(event["args"]["drafts"] for event in named["step"]) >= accepted


def test_one_trace_at_a_time_and_none_outside(tmp_path):
    first, second = tmp_path / "a.json", tmp_path / "b.json"
    with ContinuousBatchingGenerator(MODEL, trace=str(first)) as generator:
        generator.generate(["It was"], max_new_tokens=3, **GREEDY)
        with generator.trace(second):
            generator.generate(["It was", "She"], max_new_tokens=5, **GREEDY)
        generator.generate(["He"], max_new_tokens=5, **GREEDY)
    assert len(by_name(first)["waiting"]) == 1 and len(by_name(second)["waiting"]) == 2
    with ContinuousBatchingGenerator(MODEL) as generator:
        with pytest.raises(OSError), generator.trace(tmp_path / "nowhere" / "t.json"):
            pass
        assert generator.generate(["He"], max_new_tokens=2)[0].finish_reason == "length"
    with pytest.raises(OSError):
        ContinuousBatchingGenerator(MODEL, trace=str(tmp_path))
    for wrong in ("", 3):
        with pytest.raises(ValueError, match="trace must be"):
            ContinuousBatchingGenerator(MODEL, trace=wrong)


def test_a_name_with_the_process_id(tmp_path):
    with ContinuousBatchingGenerator(MODEL, trace=str(tmp_path / "t-{pid}.json")) as generator:
        generator.generate(["It was"], max_new_tokens=2)
    assert by_name(tmp_path / f"t-{os.getpid()}.json")["step"]


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="no device that is always full")
def test_a_full_disk_ends_the_trace_and_nothing_else(demo_stock):
    with ContinuousBatchingGenerator(demo_stock) as generator:
        prompts = [[5, 6, 7], [8, 9]] * 20
        with generator.trace("/dev/full"):
            outputs = generator.generate(prompts, max_new_tokens=20, progress_bar=False, **GREEDY)
            again = generator.generate(prompts[:2], max_new_tokens=20, **GREEDY)
    assert [o.token_ids for o in outputs[:2]] == [o.token_ids for o in again]
    assert all(output.finish_reason == "length" for output in outputs)


def test_what_a_killed_process_leaves_can_be_read(tmp_path):
    path, torn = tmp_path / "t.json", tmp_path / "torn.json"
    with ContinuousBatchingGenerator(MODEL) as generator, generator.trace(path):
        generator.generate(demo_prompts(3), max_new_tokens=8, **GREEDY)
        before_close = path.read_text()  # idle: all of it is on the disk
    whole = read_trace(str(path))
    assert len([e for e in whole if e["name"] == "step"]) == before_close.count('"step"')
    torn.write_text(path.read_text()[:-60])
    assert (
        read_trace(str(torn)) == whole[: len(read_trace(str(torn)))] and len(read_trace(str(torn))) >= len(whole) - 2
    )


def test_the_manager_writes_one(tmp_path):
    path = tmp_path / "t.json"
    lfm2_cb.load_model(MODEL).generate_batch(
        [[5, 6, 7], [8, 9]],
        generation_config=GenerationConfig(max_new_tokens=4, **GREEDY),
        continuous_batching_config=Lfm2CbBatchingConfig(trace=str(path)),
    )
    chunks = [event["args"]["tokens"] for event in read_trace(str(path)) if event["name"] == "prefill"]
    assert chunks[-2:] == [3, 2]
