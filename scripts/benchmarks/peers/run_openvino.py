"""OpenVINO GenAI (`pip install openvino-genai`) on a model that optimum-intel has exported (export_openvino.py)."""

from __future__ import annotations

from typing import Any

import common


def start(options: dict[str, Any]) -> tuple[common.Run, dict[str, Any]]:
    import numpy
    import openvino
    import openvino_genai

    scheduler = openvino_genai.SchedulerConfig()
    scheduler.cache_size = max(1, options["cache_memory"] // 2**30)  # GB
    scheduler.max_num_batched_tokens = options["max_batch_tokens"]
    scheduler.max_num_seqs = options["max_sequences"]
    scheduler.enable_prefix_caching = options["prefix_caching"]
    properties = {"INFERENCE_NUM_THREADS": options["threads"]}
    pipeline = openvino_genai.ContinuousBatchingPipeline(options["model"], scheduler, "CPU", properties)
    num_added = 0

    def run(work: common.Work, gained) -> None:
        nonlocal num_added
        handles = {}
        for index, (prompt, length) in enumerate(work):
            config = openvino_genai.GenerationConfig(
                max_new_tokens=length, min_new_tokens=length, ignore_eos=True, do_sample=False
            )
            ids = openvino.Tensor(numpy.array([prompt], dtype=numpy.int64))
            handles[index] = pipeline.add_request(num_added, ids, config)
            num_added += 1
        while pipeline.has_non_finished_requests():
            pipeline.step()
            for index, handle in handles.items():
                while handle.can_read():
                    for output in handle.read().values():
                        gained(index, len(output.generated_ids))

    return run, {"version": openvino_genai.__version__}


if __name__ == "__main__":
    common.main(start)
