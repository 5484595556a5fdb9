"""A fleet of the tiny model on Ray Serve, in a cluster of this process's."""

import os
import socket
import time

os.environ["RAY_USAGE_STATS_ENABLED"] = "0"

import httpx
import openai
import psutil
import ray
from lfm2_cb.integrations.ray.serve import build_deployment
from prometheus_client.parser import text_string_to_metric_families
from ray import serve
from serving import KEY

import lfm2_cb

MODEL = lfm2_cb.demo_model_path()
BLOCK = 16
OPTIONS = {
    "name": "tiny",
    "api_key": KEY,
    "dtype": "float32",
    "cache_memory": "32MiB",
    "block_size": BLOCK,
    "max_sequences": 64,
    "kernels": "torch",  # nothing to compile first
    "report_seconds": 0.5,
    "shutdown_seconds": 5,
}


class Fleet:
    """The application on a port of its own, in a cluster of this process's."""

    def __init__(self, num_cpus: int = 2, **options):
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
        ray.init(num_cpus=num_cpus, include_dashboard=False, object_store_memory=100 * 2**20, log_to_driver=False)
        try:
            serve.start(http_options={"host": "127.0.0.1", "port": port, "request_timeout_s": None})
            self.handle = serve.run(build_deployment(MODEL, **{**OPTIONS, **options}), name="fleet")
        except BaseException:
            self.close()
            raise
        self.url = f"http://127.0.0.1:{port}"
        self.client = openai.OpenAI(base_url=f"{self.url}/v1", api_key=KEY, max_retries=0, timeout=120)
        self.http = httpx.Client(base_url=self.url, headers={"Authorization": f"Bearer {KEY}"}, timeout=120)

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.close()

    def close(self):
        serve.shutdown()
        ray.shutdown()

    def metrics(self) -> dict[str, dict[str, float]]:
        """Of each metric, its value by replica ("": the fleet's)."""
        found: dict[str, dict[str, float]] = {}
        for family in text_string_to_metric_families(self.http.get("/metrics").text):
            for sample in family.samples:
                name = sample.name.removeprefix("lfm2_cb_")
                values, replica = found.setdefault(name, {}), sample.labels.get("replica", "")
                values[replica] = values.get(replica, 0.0) + sample.value
        return found

    def replica_processes(self) -> list[psutil.Process]:
        children = psutil.Process().children(recursive=True)
        return [child for child in children if "ServeReplica:fleet:engine" in "".join(child.cmdline())]

    def wait_until(self, done):
        deadline = time.monotonic() + 120
        while not done(self.metrics()):
            assert time.monotonic() < deadline, self.metrics()
            time.sleep(0.05)
