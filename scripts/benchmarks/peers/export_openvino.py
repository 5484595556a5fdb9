"""Export a checkpoint for run_openvino.py, with fp16 weights: needs optimum-intel and transformers ≤ 5.4.

    python export_openvino.py CHECKPOINT OUTPUT [TOKENIZER]

OpenVINO GenAI will not load a model without a tokenizer, so one is converted too: the checkpoint's, or that in the
folder TOKENIZER (nothing is tokenized in the benchmark: any will do).
"""

from __future__ import annotations

import sys
import tempfile

import openvino
import torch
from openvino_tokenizers import convert_tokenizer
from optimum.intel import OVModelForCausalLM
from transformers import AutoModelForCausalLM, AutoTokenizer


def main(checkpoint: str, output: str, tokenizer: str | None = None) -> None:
    # From fp32: exported from bf16, a model does not get through the CPU plugin's compiler (2026.4).
    with tempfile.TemporaryDirectory() as full, tempfile.TemporaryDirectory() as exported:
        stock = AutoModelForCausalLM.from_pretrained(checkpoint, dtype=torch.float32)
        stock.save_pretrained(full)
        stock.config.save_pretrained(output)
        OVModelForCausalLM.from_pretrained(full, export=True, compile=False, load_in_8bit=False).save_pretrained(
            exported
        )
        model = openvino.Core().read_model(f"{exported}/openvino_model.xml")
        openvino.save_model(model, f"{output}/openvino_model.xml", compress_to_fp16=True)
    source = AutoTokenizer.from_pretrained(tokenizer or checkpoint)
    into_ids, into_text = convert_tokenizer(source, with_detokenizer=True)
    openvino.save_model(into_ids, f"{output}/openvino_tokenizer.xml")
    openvino.save_model(into_text, f"{output}/openvino_detokenizer.xml")


if __name__ == "__main__":
    main(*sys.argv[1:])
