"""The parts of a fleet by themselves, without a cluster."""

import json
import sys
import time
from pathlib import Path

import pytest

pytest.importorskip("prometheus_client")
pytest.importorskip("uvicorn")
pytest.importorskip("ray.serve")

from types import SimpleNamespace

from helpers import demo_prompts, ours
from lfm2_cb.integrations.ray.autoscaling import TARGET_PRESSURE, wanted_replicas
from lfm2_cb.integrations.ray.fleet_metrics import merge_pages
from lfm2_cb.integrations.ray.front import FrontOptions, PromptReader
from lfm2_cb.integrations.ray.replica import RoutingReport
from lfm2_cb.integrations.ray.routing import Aim
from lfm2_cb.integrations.ray.serve import build_deployment
from prometheus_client.parser import text_string_to_metric_families
from serving import CHAT, Server

import lfm2_cb
from lfm2_cb.cli.main import main
from lfm2_cb.hf.manager_config import Lfm2CbBatchingConfig
from lfm2_cb.scheduling.prefix_hashes import PrefixSketch, unpack
from lfm2_cb.scheduling.routing import PrefixRouter

sys.path.append(str(Path(__file__).parent.parent / "adapters"))

MODEL = lfm2_cb.demo_model_path()
BLOCK = 8
READER = PromptReader(FrontOptions(MODEL, "tiny", BLOCK))

TEXT = " ".join(demo_prompts(4))


@pytest.fixture(scope="module")
def small_blocks(demo_stock, demo_tokenizer):
    config = Lfm2CbBatchingConfig(block_size=BLOCK, num_blocks=400, max_batch_tokens=256, kernels="torch")
    with Server(ours(demo_stock), demo_tokenizer, continuous_batching_config=config) as running:
        yield running


@pytest.mark.parametrize(
    "path, body",
    [
        ("/v1/completions", {"prompt": TEXT}),
        ("/v1/completions", {"prompt": [TEXT, "It"]}),
        ("/v1/completions", {"prompt": list(range(20, 90))}),
        ("/v1/chat/completions", {"messages": [*CHAT, {"role": "assistant", "content": TEXT}, *CHAT]}),
        ("/v1/chat/completions", {"messages": [{"role": "developer", "content": [{"type": "text", "text": TEXT}]}]}),
        ("/v1/responses", {"input": TEXT}),
        ("/v1/responses", {"input": CHAT, "instructions": TEXT}),
    ],
)
def test_a_front_reads_a_prompt_as_the_server_does(small_blocks, path, body):
    """Its hashes are those of blocks that the engine then has."""
    small_blocks.app.state.served.dispatcher.manager.batch_processor.engine.scheduler.cache.clear()
    aim = READER.aim(path, json.dumps({"model": "tiny", **body}).encode())
    limit = "max_output_tokens" if path.endswith("responses") else "max_tokens"
    answer = small_blocks.http.post(path, json={"model": "tiny", limit: 2, **body})
    assert answer.status_code == 200, answer.text
    pool = small_blocks.app.state.served.dispatcher.manager.batch_processor.engine.scheduler.cache.pool
    assert len(aim.hashes) >= 5 and {*aim.hashes} <= {*unpack(PrefixSketch(pool).read())} and aim.adapter is None


def test_an_adapter_is_another_prefix():
    body = {"prompt": TEXT, "model": "tiny"}
    base, adapted = (
        READER.aim("/v1/completions", json.dumps({**body, "model": m}).encode()) for m in ("tiny", "poet")
    )
    assert adapted.adapter == "poet" and not {*base.hashes} & {*adapted.hashes}


def test_replicas_tell_of_adapters_and_of_their_blocks(small_blocks, demo_stock, tmp_path):
    pytest.importorskip("peft")
    from making import save_adapter

    served, report = small_blocks.app.state.served, RoutingReport()
    for name in ("poet", "judge"):
        served.load_adapter(name, save_adapter(demo_stock, tmp_path / name))
    try:
        body = {"model": "poet", "prompt": TEXT, "max_tokens": 2}
        assert small_blocks.http.post("/v1/completions", json=body).status_code == 200
        poet, judge = (
            READER.aim("/v1/completions", json.dumps({**body, "model": name}).encode()) for name in ("poet", "judge")
        )
        told = report.read(served.dispatcher.manager.batch_processor.engine)
        assert told["adapters"] == ["poet"] and told["load"] == 0
        assert {*poet.hashes} <= {*unpack(told["sketch"])} and not {*judge.hashes} & {*unpack(told["sketch"])}
        router = PrefixRouter(0)
        router.keep(["here", "there"])
        router.report("here", unpack(told["sketch"]), told["adapters"])
        assert {router.choose(poet.hashes, lambda _: 0.0, poet.adapter) for _ in range(9)} == {"here"}
        assert len({router.choose(judge.hashes, lambda _: 0.0, judge.adapter) for _ in range(40)}) == 2
    finally:
        for name in ("poet", "judge"):
            served.unload_adapter(name)


@pytest.mark.parametrize("body", [b"{", b"[]", b"{}", b'{"messages": 3}', b'{"messages": [{"role": 1}]}', b"\xff"])
def test_what_cannot_be_read_is_the_replicas_to_refuse(body):
    assert READER.aim("/v1/chat/completions", body) == READER.aim("/nothing", body) == Aim()


PAGE = """# HELP lfm2_cb_running Sequences running
# TYPE lfm2_cb_running gauge
lfm2_cb_running {running}
# HELP lfm2_cb_cache_usage Share
# TYPE lfm2_cb_cache_usage gauge
lfm2_cb_cache_usage {usage}
# HELP lfm2_cb_inter_token_seconds ITL
# TYPE lfm2_cb_inter_token_seconds histogram
lfm2_cb_inter_token_seconds_bucket{{le="0.1"}} {running}
lfm2_cb_inter_token_seconds_bucket{{le="+Inf"}} 7
lfm2_cb_inter_token_seconds_count 7
lfm2_cb_inter_token_seconds_sum 2.5
# HELP lfm2_cb_inter_token_seconds_created ITL
# TYPE lfm2_cb_inter_token_seconds_created gauge
lfm2_cb_inter_token_seconds_created 1.7e+09
"""


def test_metrics_are_there_by_replica_and_summed():
    pages = {"a": PAGE.format(running=3, usage=0.5), "b": PAGE.format(running=4, usage=0.1)}
    families = list(text_string_to_metric_families(merge_pages(pages).decode()))
    found = {
        (s.name.removeprefix("lfm2_cb_"), *sorted(s.labels.items())): s.value for f in families for s in f.samples
    }
    assert found["running", ("replica", "a")] == 3 and found["running", ("replica", "b")] == 4
    assert found[("fleet_running",)] == 7 and found[("fleet_cache_usage",)] == pytest.approx(0.3)
    assert found["fleet_inter_token_seconds_bucket", ("le", "0.1")] == 7
    assert found[("fleet_inter_token_seconds_sum",)] == 5 and found[("fleet_inter_token_seconds_count",)] == 14
    assert {f.type for f in families} == {"gauge", "histogram"} and not any("created" in name for name, *_ in found)
    assert merge_pages({}) == b""


@pytest.mark.parametrize(
    "pressures, running, wanted",
    [
        ({}, 3, 3),
        ({0: 1.4}, 1, 2),
        ({0: 0.7, 1: 0.7}, 2, 2),
        ({0: 0.0, 1: 0.0}, 2, 1),
        ({0: 2.8, 1: 0.7, 9: 50.0}, 2, 5),
    ],
)
def test_as_many_replicas_as_the_load_asks_for(pressures, running, wanted):
    """One that has gone (9) counts no more."""
    context = SimpleNamespace(
        aggregated_metrics={"pressure": pressures} if pressures else None,
        running_replicas=list(range(running)),
        current_num_replicas=running,
        target_num_replicas=running,
    )
    assert TARGET_PRESSURE == 0.7 and wanted_replicas(context)[0] == pytest.approx(wanted)


def test_a_stuck_step_is_noticed(small_blocks):
    dispatcher = small_blocks.app.state.served.dispatcher
    engine = dispatcher.manager.batch_processor.engine
    assert dispatcher.problem() is None and engine.step_started is None
    engine.step_started = time.perf_counter() - 200
    try:
        assert dispatcher.problem(300) is None and "a step began 200 s ago" in dispatcher.problem()
        answer = small_blocks.http.get("/health")
        assert answer.status_code == 503 and "stuck" in answer.json()["reason"]
    finally:
        engine.step_started = None


@pytest.mark.parametrize(
    "options, message",
    [
        ({"replicas": 0}, "replicas must be 1 or more"),
        ({"replicas": (3, 2)}, "replicas must be 1 or more"),
        ({"fronts": 0}, "fronts, max_queue and max_request_bytes must be positive"),
        ({"trace": "steps.json"}, "trace goes with one replica"),
        ({"block_size": 0}, "block_size must be a positive integer"),
        ({"shutdown_seconds": -1}, "shutdown_seconds must be 0 or more"),
        ({"name": "poet", "adapters": {"poet": "/nowhere"}}, "adapter 'poet': it is the model's own name"),
        ({"adapters": {"poet": "/nowhere"}}, "adapter 'poet': there is no folder /nowhere"),
    ],
)
def test_what_is_wrong_is_said_before_anything_is_started(options, message):
    with pytest.raises(ValueError, match=message):
        build_deployment(MODEL, **options)


@pytest.mark.parametrize("flags", [["--replicas", "2"], ["--replicas", "1:2"], ["--address", "auto"]])
def test_without_ray_one_line_says_what_to_install(flags, capsys, monkeypatch):
    monkeypatch.setitem(sys.modules, "ray", None)
    for name in [name for name in sys.modules if name.startswith("lfm2_cb.integrations.ray")]:
        monkeypatch.delitem(sys.modules, name)
    assert main(["serve", MODEL, *flags]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert "pip install 'lfm2-cb[ray,serve]'" in line


@pytest.mark.parametrize("text", ["0", "two", "3:2", "1:", ":2"])
def test_a_number_of_replicas_that_is_none(text, capsys):
    assert main(["serve", MODEL, "--replicas", text]) == 2
    assert "--replicas" in capsys.readouterr().err


def test_adapters_of_a_fleet_are_those_it_starts_with(capsys):
    assert main(["serve", MODEL, "--replicas", "2", "--adapter-endpoints"]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert "--adapter-endpoints cannot be combined with --replicas" in line and "--adapter NAME=PATH" in line
    assert main(["serve", MODEL, "--replicas", "2", "--port", "0", "--adapter", "poet=/nowhere"]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert "adapter 'poet': there is no folder /nowhere" in line
