"""What test_accelerate.py runs in every process of `torchrun`: one call after another, what came of each to a file."""

import json
import os
import sys
from pathlib import Path

import torch
from accelerate import PartialState
from lfm2_cb.integrations.accelerate import RankError, generate_across_processes

import lfm2_cb


def main(cases_path: str, output_folder: str) -> None:
    rank = int(os.environ["RANK"])  # accelerate's state is left for generate_across_processes to make
    model = lfm2_cb.Lfm2CbForCausalLM.from_pretrained(lfm2_cb.demo_model_path(), dtype=torch.float32)
    results = {}
    with lfm2_cb.ContinuousBatchingGenerator(model, cache_memory="32MiB") as generator:
        for name, case in json.loads(Path(cases_path).read_text("utf-8")).items():
            torch.manual_seed(100 + rank)  # no process may sample by its own
            try:
                outputs = generate_across_processes(generator, case.pop("prompts"), **case)
                results[name] = [[o.prompt_token_ids, o.token_ids] for o in outputs]
            except RankError as error:
                results[name] = {"ranks": error.ranks, "message": str(error)}
    state = PartialState()
    path = Path(output_folder, f"{state.process_index}-of-{state.num_processes}.json")
    path.write_text(json.dumps({"results": results, "pid": os.getpid()}), "utf-8")
    state.destroy_process_group()


if __name__ == "__main__":
    main(*sys.argv[1:])
