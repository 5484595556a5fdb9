"""Train the tiny demonstration LFM2 that ships in lfm2_cb/assets/tiny-lfm2, from plain text files.

    python scripts/tools/train_tiny_model.py austen_*.txt --output lfm2_cb/assets/tiny-lfm2 --minutes 30

Each file holds one paragraph a line. A seeded share of the paragraphs is held out, from the tokenizer too: it gives
the held-out perplexity in the model card, and prompts.jsonl. The network is trained with stock `Lfm2ForCausalLM`.
"""

from __future__ import annotations

import argparse
import json
import math
import random
import time
from dataclasses import dataclass
from pathlib import Path

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers
from transformers import GenerationConfig, Lfm2Config, Lfm2ForCausalLM, PreTrainedTokenizerFast

#: at LFM2's own ids
SPECIAL_TOKENS = [
    "<|pad|>",
    "<|startoftext|>",
    "<|endoftext|>",
    "<|fim_pre|>",
    "<|fim_mid|>",
    "<|fim_suf|>",
    "<|im_start|>",
    "<|im_end|>",
    "<|tool_list_start|>",
    "<|tool_list_end|>",
]
PAD, BOS, END_OF_TEXT, IM_END = 0, 1, 2, 7
CHAT_TEMPLATE = (
    "{{- bos_token -}}{%- for message in messages -%}"
    "{{- '<|im_start|>' + message['role'] + '\\n' + message['content'] + '<|im_end|>\\n' -}}{%- endfor -%}"
    "{%- if add_generation_prompt -%}{{- '<|im_start|>assistant\\n' -}}{%- endif -%}"
)
CARD = """---
license: apache-2.0
language: en
pipeline_tag: text-generation
---
# tiny-lfm2

A {parameters:.2f} M-parameter LFM2 that ships with lfm2_cb so that the package can show itself offline. It writes
recognisable English in the manner of its only author's six novels, and knows nothing else: a demonstration, not a
model to use.

- **Network**: stock `Lfm2ForCausalLM`; {layers} layers (attention at {attention}), hidden size {hidden}, byte-level
  BPE of {vocab} entries with LFM2's special tokens at LFM2's ids and its chat form. Weights in bfloat16.
- **Data**: the six novels of Jane Austen (public domain; from Debian's r-cran-janeaustenr, MIT packaging).
  {held_out} of {paragraphs} paragraphs were held out from tokenizer and training; `prompts.jsonl` is cut from them.
- **Training**: `scripts/tools/train_tiny_model.py`, {minutes:.0f} minutes on CPU: {steps} steps of {batch} × {context}
  tokens.
- **Held-out**: perplexity {perplexity:.2f} a token, {bits:.3f} bits a byte.
- **Licence**: the weights Apache-2.0, as the package; the text is in the public domain.
"""


@dataclass(frozen=True)
class Corpus:
    """Paragraphs by file, in order; the held-out ones are None in `train`."""

    train: list[list[str | None]]
    held_out: list[str]

    @property
    def num_paragraphs(self) -> int:
        return sum(map(len, self.train))


def read_corpus(paths: list[Path], share: float, rng: random.Random) -> Corpus:
    train: list[list[str | None]] = []
    held_out: list[str] = []
    for path in paths:
        paragraphs: list[str | None] = [line.strip() for line in path.read_text("utf-8").splitlines() if line.strip()]
        for i in rng.sample(range(len(paragraphs)), round(share * len(paragraphs))):
            held_out.append(str(paragraphs[i]))
            paragraphs[i] = None
        train.append(paragraphs)
    return Corpus(train, held_out)


def train_tokenizer(corpus: Corpus, vocab_size: int) -> PreTrainedTokenizerFast:
    """Byte-level BPE that puts `<|startoftext|>` first, as LFM2's does."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=SPECIAL_TOKENS,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator((p for novel in corpus.train for p in novel if p), trainer)
    tokenizer.post_processor = processors.TemplateProcessing(
        single="<|startoftext|> $A", pair="<|startoftext|> $A $B", special_tokens=[("<|startoftext|>", BOS)]
    )
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        bos_token="<|startoftext|>",
        eos_token="<|im_end|>",
        pad_token="<|pad|>",
        chat_template=CHAT_TEMPLATE,
        padding_side="left",
        clean_up_tokenization_spaces=False,
        model_max_length=4096,
    )


def text_documents(corpus: Corpus, tokenizer: PreTrainedTokenizerFast, context: int) -> list[list[int]]:
    """Consecutive paragraphs, packed up to the context, from `<|startoftext|>` to `<|endoftext|>`."""
    documents = []
    for novel in corpus.train:
        document = [BOS]
        for paragraph in [*novel, None]:
            ids = [] if paragraph is None else tokenizer.encode(paragraph + "\n", add_special_tokens=False)
            if paragraph is None or len(document) + len(ids) > context:
                documents.append([*document, END_OF_TEXT][: context + 1])
                document = [BOS]
            document += ids[: context - 1]
    return [document for document in documents if len(document) > 8]


def chat_documents(
    corpus: Corpus, tokenizer: PreTrainedTokenizerFast, context: int, count: int, rng: random.Random
) -> list[list[int]]:
    """Chats in LFM2's form: go on with a paragraph, or repeat a sentence of it (so that it learns to copy)."""
    paragraphs = [p for novel in corpus.train for p in novel if p and len(p) > 80]
    documents = []
    for paragraph in rng.sample(paragraphs, min(count, len(paragraphs))):
        words = paragraph.split()
        if rng.random() < 0.5:
            cut = rng.randrange(4, len(words))
            question, answer = "Continue the story.\n" + " ".join(words[:cut]), " ".join(words[cut:])
        else:
            start = rng.randrange(len(words))
            answer = " ".join(words[start : start + rng.randrange(5, 40)])
            question = "Repeat: " + answer
        chat = [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]
        ids = tokenizer.apply_chat_template(chat, return_dict=True)["input_ids"]
        if len(ids) <= context:
            documents.append(ids)
    return documents


def pack_rows(documents: list[list[int]], context: int, rng: random.Random) -> torch.Tensor:
    """Rows of `context` tokens, each starting with a document; short ones share a row, `<|pad|>` fills the rest."""
    rows: list[list[int]] = []
    for document in rng.sample(documents, len(documents)):
        if rows and len(rows[-1]) + len(document) <= context:
            rows[-1] += document
        else:
            rows.append(document[:context])
    return torch.tensor([row + [PAD] * (context - len(row)) for row in rows])


def learning_rate(progress: float, peak: float) -> float:
    """Linear warm-up over 3 %, then a cosine to a twentieth."""
    if progress < 0.03:
        return peak * max(progress, 1e-3) / 0.03
    return peak * (0.05 + 0.95 * (1 + math.cos(math.pi * progress)) / 2)


def train(model: Lfm2ForCausalLM, documents: list[list[int]], args: argparse.Namespace, rng: random.Random) -> int:
    """Train for `--minutes`; the schedule follows the clock, so a slower machine takes fewer steps. Returns: steps."""
    decay = [p for p in model.parameters() if p.ndim >= 2]
    rest = [p for p in model.parameters() if p.ndim < 2]
    groups = [{"params": decay, "weight_decay": 0.1}, {"params": rest, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, lr=args.learning_rate, betas=(0.9, 0.95))
    start, step = time.monotonic(), 0
    while True:
        rows = pack_rows(documents, args.context, rng)
        for batch in rows.split(args.batch):
            progress = (time.monotonic() - start) / (60 * args.minutes)
            if progress >= 1:
                return step
            for group in optimizer.param_groups:
                group["lr"] = learning_rate(progress, args.learning_rate)
            loss = model(batch, labels=batch.masked_fill(batch == PAD, -100), use_cache=False).loss
            loss.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
            step += 1
            if step % 50 == 0:
                print(f"{progress:5.1%} step {step} loss {loss.item():.3f}", flush=True)


@torch.no_grad()
def evaluate(model: Lfm2ForCausalLM, tokenizer: PreTrainedTokenizerFast, paragraphs: list[str]) -> tuple[float, float]:
    """Held-out perplexity a token and bits a byte, each paragraph on its own."""
    nats, tokens, size = 0.0, 0, 0
    for paragraph in paragraphs:
        ids = torch.tensor([tokenizer.encode(paragraph)[:1024]])
        nats += model(ids, labels=ids).loss.item() * (ids.shape[1] - 1)
        tokens += ids.shape[1] - 1
        size += len(paragraph.encode())
    return math.exp(nats / tokens), nats / math.log(2) / size


def make_prompts(corpus: Corpus, tokenizer: PreTrainedTokenizerFast, count: int, rng: random.Random) -> list[str]:
    """Held-out paragraphs cut off at lengths from a few tokens to a few hundred, shuffled."""
    prompts = []
    paragraphs = [paragraph for paragraph in corpus.held_out if any(c.isalpha() for c in paragraph)]
    for paragraph in rng.sample(paragraphs, len(paragraphs)):
        ids = tokenizer.encode(paragraph, add_special_tokens=False)
        length = min(round(math.exp(rng.uniform(math.log(4), math.log(400)))), len(ids) - 1)
        if length >= 3:
            prompts.append(tokenizer.decode(ids[:length]).strip())
    return prompts[:count]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("texts", nargs="+", type=Path, help="UTF-8 text, one paragraph a line")
    parser.add_argument("--output", type=Path, required=True, help="folder to write")
    parser.add_argument("--minutes", type=float, default=30.0, help="training time")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--vocab-size", type=int, default=4096)
    parser.add_argument("--hidden-size", type=int, default=192)
    parser.add_argument("--context", type=int, default=256, help="tokens a training row")
    parser.add_argument("--batch", type=int, default=16, help="rows a step")
    parser.add_argument("--learning-rate", type=float, default=3e-3)
    parser.add_argument("--held-out", type=float, default=0.03, help="share of the paragraphs")
    args = parser.parse_args()
    rng = random.Random(args.seed)
    torch.manual_seed(args.seed)

    corpus = read_corpus(args.texts, args.held_out, rng)
    tokenizer = train_tokenizer(corpus, args.vocab_size)
    attention = [2, 5]
    config = Lfm2Config(
        vocab_size=args.vocab_size,
        hidden_size=args.hidden_size,
        intermediate_size=3 * args.hidden_size,
        num_hidden_layers=6,
        num_attention_heads=args.hidden_size // 32,
        num_key_value_heads=2,
        max_position_embeddings=4096,
        block_multiple_of=64,
        layer_types=["full_attention" if i in attention else "conv" for i in range(6)],
        rope_parameters={"rope_type": "default", "rope_theta": 1000000.0},
        eos_token_id=IM_END,
        tie_word_embeddings=True,
    )
    model = Lfm2ForCausalLM(config)
    documents = text_documents(corpus, tokenizer, args.context)
    documents += chat_documents(corpus, tokenizer, args.context, len(documents) // 2, rng)
    print(f"{model.num_parameters() / 1e6:.2f} M parameters, {sum(map(len, documents)):,} training tokens", flush=True)

    args.output.mkdir(parents=True, exist_ok=True)
    tokenizer.save_pretrained(args.output)
    prompts = make_prompts(corpus, tokenizer, 240, random.Random(args.seed))
    lines = [json.dumps({"prompt": prompt}, ensure_ascii=False) for prompt in prompts]
    (args.output / "prompts.jsonl").write_text("\n".join(lines) + "\n", "utf-8")

    steps = train(model, documents, args, rng)
    model = model.to(torch.bfloat16).eval()
    model.generation_config = GenerationConfig(bos_token_id=BOS, eos_token_id=[IM_END, END_OF_TEXT], pad_token_id=PAD)
    model.save_pretrained(args.output)
    perplexity, bits = evaluate(model.float(), tokenizer, corpus.held_out)
    card = CARD.format(
        parameters=model.num_parameters() / 1e6,
        layers=config.num_hidden_layers,
        attention=attention,
        hidden=config.hidden_size,
        vocab=config.vocab_size,
        held_out=len(corpus.held_out),
        paragraphs=corpus.num_paragraphs,
        minutes=args.minutes,
        steps=steps,
        batch=args.batch,
        context=args.context,
        perplexity=perplexity,
        bits=bits,
    )
    (args.output / "README.md").write_text(card, "utf-8")
    print(f"held-out perplexity {perplexity:.2f} a token, {bits:.3f} bits a byte")


if __name__ == "__main__":
    main()
