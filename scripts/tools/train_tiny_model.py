"""Train the tiny demonstration LFM2 that ships in lfm2_cb/assets/tiny-lfm2, from plain text files.

    OMP_NUM_THREADS=1 python scripts/tools/train_tiny_model.py austen_*.txt --output lfm2_cb/assets/tiny-lfm2

Each file holds one paragraph a line. A seeded share of the paragraphs is held out, from the tokenizer too: it gives
the held-out perplexity in the model card, and prompts.jsonl. The network is trained with stock `Lfm2ForCausalLM`:
matrices by Muon, the rest by AdamW, in bf16 where the processor multiplies it, with dropout. With `--checkpoint FILE`
an interrupted run goes on where it was.
"""

from __future__ import annotations

import argparse
import json
import math
import random
import time
from dataclasses import dataclass
from functools import cached_property, partial
from pathlib import Path

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers
from torch import nn
from torch.nn import functional
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
#: how its answers read best; comparisons ask for greedy
SAMPLING = {"do_sample": True, "temperature": 0.6, "top_p": 0.7}
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
- **Training**: `scripts/tools/train_tiny_model.py`, {minutes:.0f} minutes of one processor: {steps} steps of
  {tokens:,} tokens.
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


@dataclass(frozen=True)
class Documents:
    """What an epoch is made of: stories and chats, cut anew each time."""

    corpus: Corpus
    tokenizer: PreTrainedTokenizerFast

    def encode(self, text: str) -> list[int]:
        return self.tokenizer.encode(text, add_special_tokens=False)

    @cached_property
    def novels(self) -> list[list[list[int] | None]]:
        return [[None if p is None else self.encode(p + "\n") for p in novel] for novel in self.corpus.train]

    def epoch(self, context: int, rng: random.Random) -> list[list[int]]:
        stories = self.stories(context, rng)
        return stories + self.chats(context, len(stories) // 4, rng)

    def stories(self, context: int, rng: random.Random) -> list[list[int]]:
        """Consecutive paragraphs, packed up to the context, from `<|startoftext|>` to `<|endoftext|>`.

        A held-out paragraph ends a document, and so does chance, so that each epoch begins them elsewhere.
        """
        documents = []
        for novel in self.novels:
            document = [BOS]
            for ids in [*novel, None]:
                if ids is None or len(document) + len(ids) > context or rng.random() < 0.1:
                    documents.append([*document, END_OF_TEXT][: context + 1])
                    document = [BOS]
                document += (ids or [])[: context - 1]
        return [document for document in documents if len(document) > 8]

    def chats(self, context: int, count: int, rng: random.Random) -> list[list[int]]:
        """Chats in LFM2's form: go on with a paragraph, or repeat a sentence of it (so that it learns to copy)."""
        paragraphs = [p for novel in self.corpus.train for p in novel if p and len(p) > 80]
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
            ids = self.tokenizer.apply_chat_template(chat, return_dict=True)["input_ids"]
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


def short_convolution(module: nn.Module, hidden_states: torch.Tensor, **_: object) -> torch.Tensor:
    """Stock's `Lfm2ShortConv` on whole rows, without its transposes: [B, T, C] -> [B, T, C]."""
    b, c, x = module.in_proj(hidden_states).chunk(3, dim=-1)
    taps = module.conv.weight.squeeze(1).T  # [width, C]
    x = functional.pad(b * x, (0, 0, len(taps) - 1, 0))
    length = hidden_states.shape[1]
    return module.out_proj(c * sum(tap * x[:, i : i + length] for i, tap in enumerate(taps)))


def prepare(model: Lfm2ForCausalLM, dropout: float) -> None:
    """Dropout on what each operator and MLP adds, which stock lacks, and the faster convolution."""

    def drop(module: nn.Module, _inputs: tuple, output: torch.Tensor | tuple) -> torch.Tensor | tuple:
        if isinstance(output, tuple):
            return functional.dropout(output[0], dropout, module.training), *output[1:]
        return functional.dropout(output, dropout, module.training)

    for layer in model.model.layers:
        if hasattr(layer, "conv"):
            layer.conv.forward = partial(short_convolution, layer.conv)
        for part in (layer.conv if hasattr(layer, "conv") else layer.self_attn, layer.feed_forward):
            part.register_forward_hook(drop)


def learning_rate(progress: float, peak: float) -> float:
    """Linear warm-up over 3 %, then a cosine to a hundredth."""
    if progress < 0.03:
        return peak * max(progress, 1e-3) / 0.03
    return peak * (0.01 + 0.99 * (1 + math.cos(math.pi * progress)) / 2)


class Clock:
    """Share of the budget that is spent: processor time of this process or time on the clock, whichever is further.

    So a slower or shared machine takes fewer steps, and the schedule still ends where it should.
    """

    def __init__(self, processor_minutes: float, minutes: float, spent: tuple[float, float] = (0.0, 0.0)) -> None:
        self.limits = (60 * processor_minutes, 60 * minutes)
        self.begun = (time.process_time() - spent[0], time.time() - spent[1])

    def spent(self) -> tuple[float, float]:
        return time.process_time() - self.begun[0], time.time() - self.begun[1]

    def progress(self) -> float:
        return max(spent / limit for spent, limit in zip(self.spent(), self.limits, strict=True))


def optimizers(model: Lfm2ForCausalLM, peak: float) -> list[torch.optim.Optimizer]:
    """Muon for the layers' matrices, AdamW for the embedding (no decay: it is the head), filters and norms."""
    hidden = [p for name, p in model.named_parameters() if p.ndim == 2 and "embed" not in name]
    rest = [p for name, p in model.named_parameters() if p.ndim != 2 or "embed" in name]
    return [
        torch.optim.Muon(hidden, lr=peak, weight_decay=0.1, adjust_lr_fn="match_rms_adamw"),
        torch.optim.AdamW(rest, lr=peak, betas=(0.9, 0.95), weight_decay=0.0),
    ]


def train(model: Lfm2ForCausalLM, data: Documents, held_out: list[str], args: argparse.Namespace) -> tuple[int, float]:
    """Train until the clock says so; rows of twice the context in the last quarter.

    Returns: steps, and minutes of processor time, those before the checkpoint included.
    """
    both = optimizers(model, args.learning_rate)
    saved = torch.load(args.checkpoint) if args.checkpoint and args.checkpoint.exists() else None
    step, spent = 0, (0.0, 0.0)
    if saved:
        model.load_state_dict(saved["model"])
        for optimizer, state in zip(both, saved["optimizers"], strict=True):
            optimizer.load_state_dict(state)
        step, spent = saved["step"], saved["spent"]
    clock, rng = Clock(args.minutes, args.wall_minutes or math.inf, spent), random.Random(args.seed + step)
    while True:
        longer = 1 if clock.progress() < 0.75 else 2
        rows = pack_rows(data.epoch(longer * args.context, rng), longer * args.context, rng)
        for batch in rows.split(args.batch // longer):
            progress = clock.progress()
            if progress >= 1:
                return step, clock.spent()[0] / 60
            if longer == 1 and progress >= 0.75:
                break
            for optimizer in both:
                for group in optimizer.param_groups:
                    group["lr"] = learning_rate(progress, args.learning_rate)
            with torch.autocast("cpu", torch.bfloat16, enabled=torch.cpu._is_amx_tile_supported()):
                loss = model(batch, labels=batch.masked_fill(batch == PAD, -100), use_cache=False).loss
            loss.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            for optimizer in both:
                optimizer.step()
                optimizer.zero_grad()
            step += 1
            if step % 50 == 0:
                print(f"{progress:5.1%} step {step} loss {loss.item():.3f}", flush=True)
            if step % 500 == 0:
                perplexity, _ = evaluate(model.eval(), data.tokenizer, held_out[:60])
                model.train()
                print(f"{progress:5.1%} step {step} held-out perplexity {perplexity:.2f}", flush=True)
                if args.checkpoint:
                    states = [optimizer.state_dict() for optimizer in both]
                    state = {"model": model.state_dict(), "optimizers": states, "step": step, "spent": clock.spent()}
                    torch.save(state, args.checkpoint)


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
    parser.add_argument("--minutes", type=float, default=75.0, help="processor time to train for")
    parser.add_argument("--wall-minutes", type=float, help="and no longer than this on the clock")
    parser.add_argument("--checkpoint", type=Path, help="file to go on from, written every 500 steps")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--vocab-size", type=int, default=4096)
    parser.add_argument("--hidden-size", type=int, default=192)
    parser.add_argument("--context", type=int, default=256, help="tokens a training row; twice as many at the end")
    parser.add_argument("--batch", type=int, default=8, help="rows a step")
    parser.add_argument("--dropout", type=float, default=0.1)
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
        intermediate_size=14 * args.hidden_size // 3,
        num_hidden_layers=6,
        num_attention_heads=args.hidden_size // 32,
        num_key_value_heads=2,
        max_position_embeddings=4096,
        block_multiple_of=64,
        block_auto_adjust_ff_dim=False,
        layer_types=["full_attention" if i in attention else "conv" for i in range(6)],
        rope_parameters={"rope_type": "default", "rope_theta": 1000000.0},
        eos_token_id=IM_END,
        tie_word_embeddings=True,
    )
    model = Lfm2ForCausalLM(config)
    prepare(model, args.dropout)
    data = Documents(corpus, tokenizer)
    tokens = sum(len(ids) for novel in data.novels for ids in novel if ids)
    print(f"{model.num_parameters() / 1e6:.2f} M parameters, {tokens:,} tokens of text", flush=True)

    args.output.mkdir(parents=True, exist_ok=True)
    tokenizer.save_pretrained(args.output)
    prompts = make_prompts(corpus, tokenizer, 240, random.Random(args.seed))
    lines = [json.dumps({"prompt": prompt}, ensure_ascii=False) for prompt in prompts]
    (args.output / "prompts.jsonl").write_text("\n".join(lines) + "\n", "utf-8")

    steps, minutes = train(model.train(), data, corpus.held_out, args)
    model = model.to(torch.bfloat16).eval()
    model.generation_config = GenerationConfig(
        bos_token_id=BOS, eos_token_id=[IM_END, END_OF_TEXT], pad_token_id=PAD, **SAMPLING
    )
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
        minutes=minutes,
        steps=steps,
        tokens=args.batch * args.context,
        perplexity=perplexity,
        bits=bits,
    )
    (args.output / "README.md").write_text(card, "utf-8")
    print(f"held-out perplexity {perplexity:.2f} a token, {bits:.3f} bits a byte")


if __name__ == "__main__":
    main()
