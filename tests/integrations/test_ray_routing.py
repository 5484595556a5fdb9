"""The parts of a fleet by themselves, without a cluster."""

import json

import pytest

pytest.importorskip("prometheus_client")
pytest.importorskip("uvicorn")
pytest.importorskip("ray.serve")


from helpers import demo_prompts, ours
from lfm2_cb.integrations.ray.front import FrontOptions, PromptReader
from serving import CHAT, Server

import lfm2_cb
from lfm2_cb.hf.manager_config import Lfm2CbBatchingConfig
from lfm2_cb.scheduling.prefix_hashes import PrefixSketch, unpack

MODEL = lfm2_cb.demo_model_path()
BLOCK = 8
READER = PromptReader(FrontOptions(MODEL, "tiny", BLOCK))

TOOL = {"type": "function", "name": "look", "parameters": {"type": "object", "properties": {}}}
TEXT = " ".join(demo_prompts(4))


@pytest.fixture(scope="module")
def small_blocks(demo_stock, demo_tokenizer):
    config = Lfm2CbBatchingConfig(block_size=BLOCK, num_blocks=400, max_batch_tokens=256)
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
