"""Export a checkpoint for run_openvino.py, with fp16 weights: needs optimum-intel and transformers ≤ 5.4.

    python export_openvino.py CHECKPOINT OUTPUT [TOKENIZER]

OpenVINO GenAI will not load a model without a tokenizer, so one is converted too: the checkpoint's, or that in the
folder TOKENIZER (nothing is tokenized in the benchmark: any will do).
"""

from __future__ import annotations

import sys

import openvino
from openvino_tokenizers import convert_tokenizer
from optimum.intel import OVModelForCausalLM
from transformers import AutoTokenizer


def main(checkpoint: str, output: str, tokenizer: str | None = None) -> None:
    model = OVModelForCausalLM.from_pretrained(checkpoint, export=True, compile=False, load_in_8bit=False)
    model.half()
    model.save_pretrained(output)
    source = AutoTokenizer.from_pretrained(tokenizer or checkpoint)
    into_ids, into_text = convert_tokenizer(source, with_detokenizer=True)
    openvino.save_model(into_ids, f"{output}/openvino_tokenizer.xml")
    openvino.save_model(into_text, f"{output}/openvino_detokenizer.xml")


if __name__ == "__main__":
    main(*sys.argv[1:])
