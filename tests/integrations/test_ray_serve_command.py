# ruff: noqa: E402  (what the extras bring is looked for before it is imported)
"""`lfm2-cb serve --replicas`: from its first word to its exit code; minutes, as replicas take long to start."""

import os
import signal
import time
from concurrent.futures import ThreadPoolExecutor

import pytest

pytest.importorskip("prometheus_client")
openai = pytest.importorskip("openai")
pytest.importorskip("ray.serve")
os.environ["RAY_USAGE_STATS_ENABLED"] = "0"

import ray
from helpers import demo_prompts
from ray import serve
from serving import KEY, Command

import lfm2_cb
from lfm2_cb.cli.main import main

pytestmark = pytest.mark.slow

FLAGS = ["--dtype", "float32", "--kernels", "torch", "--cache-memory", "32MiB", "--no-access-log"]


def wait_for_word(it: Command, word: str) -> None:
    while not any(word in line for line in it.said):
        assert it.process.poll() is None
        time.sleep(0.01)


def test_sigterm_lets_what_runs_finish_on_all_replicas_and_takes_nothing_more():
    with Command("--replicas", "2", *FLAGS) as it, ThreadPoolExecutor(8) as clients:
        assert [model.id for model in it.client.models.list()] == ["tiny"]
        long = {"model": "tiny", "max_tokens": 600, "extra_body": {"ignore_eos": True}}
        streams = [iter(it.client.completions.create(**long, prompt=text, stream=True)) for text in demo_prompts(4)]
        for stream in streams:
            next(stream)
        whole = [clients.submit(it.client.completions.create, **long, prompt=text) for text in demo_prompts(4)]
        time.sleep(0.5)
        it.process.send_signal(signal.SIGTERM)
        wait_for_word(it, "no more requests are taken")
        with pytest.raises(openai.APIError) as refused:
            for _ in range(1000):  # until the front has heard of it
                openai.OpenAI(base_url=f"{it.url}/v1", api_key=KEY, max_retries=0).models.list()
        assert "shutting down" in str(refused.value)
        assert [[*stream][-1].choices[0].finish_reason for stream in streams] == ["length"] * 4
        assert [answer.result().choices[0].finish_reason for answer in whole] == ["length"] * 4
        assert it.process.wait(120) == 0
        assert not any("not all requests" in line or "Traceback" in line for line in it.said), it.said


def test_a_running_cluster_takes_the_fleet_and_outlives_it():
    ray.init(num_cpus=2, include_dashboard=False, object_store_memory=100 * 2**20, log_to_driver=False)
    try:
        where = ray.get_runtime_context().gcs_address
        with Command("--replicas", "1", "--address", "auto", *FLAGS, RAY_ADDRESS=where) as it:
            ask = {"model": "tiny", "prompt": "It was", "max_tokens": 4}
            assert it.client.completions.create(**ask).choices[0].text
            assert it.end(signal.SIGTERM) == 0
        assert ray.is_initialized() and not serve.status().applications
    finally:
        serve.shutdown()
        ray.shutdown()


def test_an_address_without_a_cluster_is_said_in_one_line(capsys):
    assert main(["serve", lfm2_cb.demo_model_path(), "--address", "ray://127.0.0.1:1", "--port", "0"]) == 2
    last = capsys.readouterr().err.splitlines()[-1]
    assert last.startswith("lfm2-cb: error: no cluster answers at ray://127.0.0.1:1: ")
