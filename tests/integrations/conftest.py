"""Fixtures of the server's tests; what an extra brings is imported where it is used."""

import pytest
from helpers import ours, stock_greedy

#: the model's own configuration samples; answers are compared with stock's greedy ones
GREEDY = {"model": "tiny", "max_tokens": 12, "temperature": 0}


@pytest.fixture(scope="module")
def server(demo_stock, demo_tokenizer):
    from serving import Server

    with Server(ours(demo_stock), demo_tokenizer) as running:
        yield running


@pytest.fixture(scope="module")
def complete(server):
    return lambda **kwargs: server.client.completions.create(**{**GREEDY, **kwargs})


@pytest.fixture(scope="module")
def chat(server):
    from serving import CHAT

    defaults = {**GREEDY, "messages": CHAT}
    return lambda **kwargs: server.client.chat.completions.create(**{**defaults, **kwargs})


@pytest.fixture(scope="module")
def greedy(demo_stock, demo_tokenizer):
    """Stock's text after a prompt (text, or a chat)."""

    def answer(prompt, count=12):
        if isinstance(prompt, str):
            ids = demo_tokenizer(prompt)["input_ids"]
        else:
            ids = demo_tokenizer.apply_chat_template(prompt, add_generation_prompt=True)["input_ids"]
        tokens = stock_greedy(demo_stock, ids, count, eos_token_id=[7, 2])
        return demo_tokenizer.decode(tokens, skip_special_tokens=True)

    return answer
