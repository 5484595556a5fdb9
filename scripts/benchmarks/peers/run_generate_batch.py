"""transformers' own continuous batching (`generate_batch`), on a model that it does not refuse, as it does LFM2.

`python run_generate_batch.py FOLDER [JSON]` makes a checkpoint for it: a random Llama of LFM2-350M's size, in bf16, or
one of the sizes that JSON gives.
"""

from __future__ import annotations

import json
import sys
from typing import Any

import common

#: of LFM2-350M's size: 344 M parameters
LLAMA = {
    "vocab_size": 65536, "hidden_size": 1024, "intermediate_size": 4608, "num_hidden_layers": 16,
    "num_attention_heads": 16, "num_key_value_heads": 8, "max_position_embeddings": 4096,
}  # fmt: skip
#: managers that are to be stopped at the end: their threads keep the process alive
managers: list[Any] = []


def save_llama(folder: str, **overrides: int) -> None:
    """A random Llama's checkpoint."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    LlamaForCausalLM(LlamaConfig(**{**LLAMA, **overrides})).to(torch.bfloat16).save_pretrained(folder)


def start(options: dict[str, Any]) -> tuple[common.Run, dict[str, Any]]:
    import torch
    import transformers
    from transformers import AutoModelForCausalLM, ContinuousBatchingConfig, GenerationConfig

    model = AutoModelForCausalLM.from_pretrained(options["model"], dtype=getattr(torch, options["dtype"]))
    model = model.to(options.get("device", "cpu")).eval()
    on_cpu = options.get("device", "cpu") == "cpu"
    config = ContinuousBatchingConfig(
        max_batch_tokens=options["max_batch_tokens"],
        max_requests_per_batch=options["max_sequences"],
        allow_block_sharing=options["prefix_caching"],
        # Other engines are on the same device; on a CPU, where things are only tried out, a share would be gigabytes.
        **({"num_blocks": 256} if on_cpu else {"max_memory_percent": 0.3}),
    )
    greedy = GenerationConfig(do_sample=False, eos_token_id=-1, pad_token_id=0)
    manager = model.init_continuous_batching(generation_config=greedy, continuous_batching_config=config)
    manager.start()
    managers.append(manager)
    num_added = 0

    def run(work: common.Work, gained) -> None:
        nonlocal num_added
        index_of = {}
        for index, (prompt, length) in enumerate(work):
            request_id = f"r{num_added}"
            num_added += 1
            index_of[request_id] = index
            manager.add_request(prompt, request_id, max_new_tokens=length, record_timestamps=True, eos_token_id=-1)
        while index_of:
            found = manager.get_result(timeout=1)
            if found is None:
                if not manager.is_running():
                    raise RuntimeError("generate_batch's thread has ended")
            elif found.error is not None:
                raise RuntimeError(found.error)
            elif found.is_finished():
                index = index_of.pop(found.request_id)
                for time in found.timestamps:
                    gained(index, 1, time)

    return run, {"version": transformers.__version__, "attention": model.config._attn_implementation}


if __name__ == "__main__":
    if len(sys.argv) > 1 and not sys.argv[1].startswith("{"):
        save_llama(sys.argv[1], **json.loads(sys.argv[2] if len(sys.argv) > 2 else "{}"))
    else:
        try:
            common.main(start)
        finally:
            for manager in managers:
                manager.stop(block=False, hard_stop=True)
