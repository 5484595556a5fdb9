# ruff: noqa: E402  (what the extra brings is looked for before it is imported)
"""`lfm2-cb serve`: its flags, what it says, and how it ends."""

import math
import re
import signal
import socket
import threading
import time
from dataclasses import fields

import pytest

pytest.importorskip("prometheus_client")
openai = pytest.importorskip("openai")
pytest.importorskip("uvicorn")

import httpx
import lfm2_cb.integrations.serve as server
from serving import ENDLESS, KEY, Command

import lfm2_cb
from lfm2_cb.cli.main import main
from lfm2_cb.engine.config import EngineConfig
from lfm2_cb.hf.manager_config import engine_config

MODEL = lfm2_cb.demo_model_path()


def test_it_serves_until_interrupted_and_says_what_it_does():
    with Command(
        "--num-blocks", "64", "--weights", "int8", "--cache-dtype", "int8", "--max-step-seconds", "0.5"
    ) as it:
        assert it.said == [f"lfm2-cb: tiny is served on {it.url} (Ctrl-C ends it)\n"]
        assert [model.id for model in it.client.models.list()] == ["tiny"]
        ask = {"model": "tiny", "prompt": "It was", "max_tokens": 4, "extra_headers": {"x-request-id": "mine:7"}}
        assert it.client.completions.create(**ask).choices[0].text
        assert list(it.client.completions.create(**ask, stream=True))
        with pytest.raises(openai.BadRequestError):
            it.client.completions.create(**{**ask, "max_tokens": -1})
        httpx.get(f"{it.url}/noth%0aing", headers={"x-request-id": "two words"})
        assert it.end(signal.SIGINT) == 0
        log = [line for line in it.said if "request " in line]
        asked = [re.search(r" 127\.0\.0\.1 (\w+ \S+ \d+) [\d.]+ s, request (\S+)\n", line) for line in log]
        path = "POST /v1/completions"
        statuses = ["GET /v1/models 200", f"{path} 200", f"{path} 200", f"{path} 400", r"GET /noth\ning 401"]
        assert [found[1] for found in asked] == statuses
        assert [found[2] for found in asked[1:4]] == ["mine:7"] * 3
        assert "two words" not in "".join(it.said)


def test_sigterm_lets_what_runs_finish_and_takes_nothing_more():
    with Command("--no-access-log") as it:
        long = {"model": "tiny", "prompt": "It was", "stream": True, "max_tokens": 400}
        stream = it.client.completions.create(**long, extra_body={"ignore_eos": True})
        events = iter(stream)
        next(events)
        it.process.send_signal(signal.SIGTERM)
        while not any("SIGTERM" in line for line in it.said):
            assert it.process.poll() is None
        with pytest.raises(openai.APIConnectionError):
            for _ in range(1000):  # until the listener is closed
                openai.OpenAI(base_url=f"{it.url}/v1", api_key=KEY, max_retries=0).models.list()
        *_, last = events
        assert last.choices[0].finish_reason == "length"
        assert it.process.wait(60) == 0
        it._reader.join(30)
        assert len(it.said) == 2 and "SIGTERM: no more requests are taken" in it.said[1], it.said


def test_what_does_not_finish_in_time_is_ended():
    with Command("--shutdown-seconds", "1", "--no-access-log") as it:
        ask = {"model": "tiny", "prompt": "It was", "extra_body": ENDLESS}
        next(iter(it.client.completions.create(**ask, stream=True)))

        def wait_for_json():
            with pytest.raises(openai.InternalServerError, match="shutting down") as caught:
                it.client.completions.create(**ask)
            cut.append(caught.value.status_code)

        cut: list[int] = []
        waiting = threading.Thread(target=wait_for_json)
        waiting.start()
        while "running 2.0" not in httpx.get(f"{it.url}/metrics", headers={"Authorization": f"Bearer {KEY}"}).text:
            time.sleep(0.02)
        assert it.end(signal.SIGTERM) == 0
        waiting.join()
        assert cut == [503]
        assert "Traceback" not in "".join(it.said)


@pytest.mark.parametrize(
    "flags, message",
    [
        (["--port", "-1"], "cannot listen on 127.0.0.1:-1"),
        (["--host", "no.such.host.invalid"], "cannot listen on no.such.host.invalid:8000"),
        (
            ["--max-memory-percent", "5"],
            "max_memory_percent is a share of the free memory, above 0 and at most 1, got 5",
        ),
        (["--num-blocks", "0"], "num_blocks"),
        (["--num-blocks", "4", "--max-memory-percent", "0.1"], "not allowed with"),
        (["--max-sequences", "-1"], "max_sequences must be"),
        (["--cache-memory", "lots"], "cache_memory must be bytes"),
        (["--cache-memory", "10KB", "--port", "0"], "too small"),
        (["--drafting", "sometimes"], "--drafting"),
        (["--policy", "luck"], "luck"),
        (["--dtype", "float8"], "--dtype"),
        (["--device", "abacus", "--port", "0"], "--device abacus"),
        (["--max-queue", "0", "--port", "0"], "max_queue"),
        (["--shutdown-seconds", "-1", "--port", "0"], "shutdown_seconds"),
        (["--nonsense"], "--nonsense"),
    ],
    ids=str,
)
def test_what_is_wrong_is_said_in_one_line(capsys, flags, message):
    assert main(["serve", MODEL, *flags]) == 2
    (said,) = [line for line in capsys.readouterr().err.splitlines() if "Loading weights" not in line]
    assert message in said and said.startswith("lfm2-cb: error: ")


def test_a_port_that_is_taken_is_said_before_a_model_is_loaded(capsys, monkeypatch):
    monkeypatch.setattr("lfm2_cb.cli.serve.load_from", lambda args: pytest.fail("loaded"))
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        assert main(["serve", MODEL, "--port", str(port)]) == 2
    (said,) = capsys.readouterr().err.splitlines()
    assert said.startswith(f"lfm2-cb: error: cannot listen on 127.0.0.1:{port}: ")


def test_another_model_or_none_is_said_in_one_line(capsys, tmp_path):
    (tmp_path / "config.json").write_text('{"model_type": "llama"}')
    for model, message in ((str(tmp_path), "holds 'llama'"), (str(tmp_path / "nowhere"), "nowhere")):
        assert main(["serve", model, "--port", "0"]) == 2
        (said,) = capsys.readouterr().err.splitlines()
        assert message in said and said.startswith("lfm2-cb: error: ")


def test_every_option_of_the_engine_has_a_flag_that_reaches_it(monkeypatch, tmp_path):
    taken = {}
    monkeypatch.setattr(server, "serve_on", lambda listener, model, tokenizer, **options: taken.update(options))
    asked = {
        "max_batch_tokens": 300,
        "max_sequences": 7,
        "cache_memory": "3MiB",
        "block_size": 256,
        "prefix_caching": False,
        "policy": "batch",
        "drafting": "auto",
        "kernels": "torch",
        "max_step_seconds": 0.5,
        "cache_dtype": "int8",
        "trace": str(tmp_path / "t.json"),
        "sparse_prefill": 0.9,
        "adapter_memory": "2GiB",
    }
    assert asked.keys() == {field.name for field in fields(EngineConfig)}
    flags = ["--no-prefix-caching"]
    for name, value in asked.items():
        flags += [] if value is False else [f"--{name.replace('_', '-')}", str(value)]
    assert main(["serve", MODEL, "--port", "0", "--dtype", "float32", *flags]) == 0
    config = taken["continuous_batching_config"]
    model = lfm2_cb.load_model(MODEL)
    assert engine_config(config, model) == EngineConfig(**asked)
    assert main(["serve", MODEL, "--port", "0", "--page-size", "32", "--max-requests-per-batch", "3"]) == 0
    old = engine_config(taken["continuous_batching_config"], model)
    assert (old.block_size, old.max_sequences) == (32, 3)


def test_answers_do_not_wait_long_for_prompts_by_default(monkeypatch, capsys):
    """As in Python: see test_serve.py."""
    taken = {}
    monkeypatch.setattr(server, "serve_on", lambda listener, model, tokenizer, **options: taken.update(options))
    for said, limit in (([], 0.2), (["--max-step-seconds", "inf"], math.inf), (["--max-step-seconds", "1"], 1.0)):
        assert main(["serve", MODEL, "--port", "0", *said]) == 0
        assert taken["continuous_batching_config"].max_step_seconds == limit
    with pytest.raises(SystemExit, match="0"):
        main(["serve", "--help"])
    assert "prefilled (default: 0.2)" in " ".join(capsys.readouterr().out.split())
