"""Servers on ports of their own, in a thread or by the command, shared by the tests of several files."""

import os
import re
import subprocess
import sys
import threading
import time

import httpx
import openai
import uvicorn
from lfm2_cb.integrations.serve import build_app

from lfm2_cb import demo_model_path

KEY = "secret"
#: an answer that ends only when it is made to
ENDLESS = {"generation_config": '{"max_new_tokens": 4000, "do_sample": true, "suppress_tokens": [2, 7]}'}
CHAT = [{"role": "user", "content": "Who is Emma?"}]


class Server:
    """An application on a port of its own, in a thread."""

    def __init__(self, model, tokenizer, **options):
        self.app = build_app(model, tokenizer, **{"name": "tiny", "api_key": KEY, **options})
        config = uvicorn.Config(self.app, host="127.0.0.1", port=0, log_level="critical")
        self._server = uvicorn.Server(config)
        self._thread = threading.Thread(target=self._server.run)

    def __enter__(self):
        self._thread.start()
        while not self._server.started:
            time.sleep(0.01)
        self.url = f"http://127.0.0.1:{self._server.servers[0].sockets[0].getsockname()[1]}"
        self.client = openai.OpenAI(base_url=f"{self.url}/v1", api_key=KEY, max_retries=0, timeout=60)
        self.http = httpx.Client(base_url=self.url, headers={"Authorization": f"Bearer {KEY}"}, timeout=60)
        return self

    def __exit__(self, *_):
        self.http.close()
        self.client.close()
        self._server.should_exit = True
        self._thread.join()

    def metrics(self) -> dict[str, float]:
        lines = (line.rsplit(" ", 1) for line in self.http.get("/metrics").text.splitlines() if line[0] != "#")
        return {name.removeprefix("lfm2_cb_"): float(value) for name, value in lines}

    def wait_for(self, **gauges) -> None:
        """Until all these gauges have these values."""
        deadline = time.monotonic() + 60
        while {name: self.metrics()[name] for name in gauges} != gauges:
            assert time.monotonic() < deadline, self.metrics()
            time.sleep(0.02)


class Command:
    """`lfm2-cb serve` in a process of its own, from its first word on."""

    def __init__(self, *flags: str, **environment: str) -> None:
        told = ["serve", demo_model_path(), "--port", "0", "--name", "tiny", *flags]
        environment = {**os.environ, "LFM2_CB_API_KEY": KEY, **environment}
        self.process = subprocess.Popen(
            [sys.executable, "-m", "lfm2_cb", *told], env=environment, stderr=subprocess.PIPE, text=True
        )
        self.said: list[str] = []
        self._started = threading.Event()
        self._reader = threading.Thread(target=self._read)
        self._reader.start()
        assert self._started.wait(120), self.said
        self.url = next(found[0] for line in self.said if (found := re.search(r"http://[\d.:]+", line)))
        self.client = openai.OpenAI(base_url=f"{self.url}/v1", api_key=KEY, max_retries=0, timeout=60)

    def _read(self) -> None:
        for line in self.process.stderr:
            if line.strip() and "Loading weights" not in line:
                self.said.append(line)
            if "http://" in line:
                self._started.set()
        self._started.set()

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.process.kill()
        self.process.wait(30)
        self._reader.join(30)

    def end(self, sign: int) -> int:
        self.process.send_signal(sign)
        status = self.process.wait(60)
        self._reader.join(30)
        return status
