"""The status page: whole in itself, over metrics that are there, and shown by a real browser."""

import json
import re
import shutil
import subprocess

import pytest

pytest.importorskip("prometheus_client")

import httpx
from lfm2_cb.integrations.serve.app import STATUS_PAGE

NODE = shutil.which("node")
CHROMIUM = shutil.which("chromium") or shutil.which("google-chrome")


def test_the_page_is_whole_and_needs_no_key(server):
    answer = httpx.get(server.url + "/")
    assert answer.status_code == 200 and answer.headers["content-type"].startswith("text/html")
    assert not re.search(r"""(src|href)=["']?(https?:)?//""", answer.text), "an asset from elsewhere"
    assert httpx.get(server.url + "/metrics").status_code == 401  # what it shows does need it


def test_every_metric_that_the_page_reads_is_there(server):
    server.client.completions.create(model="tiny", prompt="It was", max_tokens=4)
    page, metrics = httpx.get(server.url + "/").text, server.http.get("/metrics").text
    names = {f"lfm2_cb_{name}" for name in re.findall(r'\bget\("(\w+)"\)', page)}
    names |= {f"{name}_bucket" for name in re.findall(r'"(lfm2_cb_\w+_seconds)"', page)}
    there = set(re.findall(r"^(\w+)", metrics, re.M))
    assert len(names) >= 9
    assert {name for name in names if name not in there} <= {"lfm2_cb_refused_total"}  # has a label, counts none yet


FLEET = """
lfm2_cb_cache_usage{replica="a"} 0.5
lfm2_cb_cache_usage{replica="b"} 0.1
lfm2_cb_fleet_cache_usage 0.3
lfm2_cb_inter_token_seconds_bucket{le="0.1",replica="a"} 3
lfm2_cb_fleet_inter_token_seconds_bucket{le="0.1"} 7
lfm2_cb_fleet_inter_token_seconds_bucket{le="+Inf"} 8
"""


@pytest.mark.skipif(NODE is None, reason="no Node.js here")
@pytest.mark.parametrize(
    "page, usage, buckets, replicas",
    [(FLEET, 0.3, [[0.1, 7], [None, 8]], ["a", "b"]), ("lfm2_cb_cache_usage 0.2\n", 0.2, None, [])],
)
def test_of_a_fleet_it_shows_the_sums(page, usage, buckets, replicas):
    parse = re.search(r"^function parse.*?^}", STATUS_PAGE.read_text("utf-8"), re.M | re.S)[0]
    program = f"{parse}; const page = parse({json.dumps(page)}); page.replicas = [...page.replicas];"
    shown = subprocess.run(
        [NODE, "-e", f"{program} console.log(JSON.stringify(page))"], capture_output=True, text=True, timeout=120
    )
    found = json.loads(shown.stdout)
    assert found["values"]["lfm2_cb_cache_usage"] == usage and found["replicas"] == replicas
    assert found["buckets"].get("lfm2_cb_inter_token_seconds_bucket") == buckets


@pytest.mark.skipif(CHROMIUM is None, reason="no Chromium here")
@pytest.mark.slow
def test_a_browser_shows_the_page(server):
    command = [CHROMIUM, "--headless", "--no-sandbox", "--disable-gpu", "--virtual-time-budget=3000", "--dump-dom"]
    shown = subprocess.run([*command, server.url + "/"], capture_output=True, text=True, timeout=120).stdout
    assert "the API key is asked for" in shown and 'id="login"' in shown
