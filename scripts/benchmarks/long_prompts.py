"""What sparse prefill is worth on long prompts, and what it costs.

python scripts/benchmarks/long_prompts.py time --lengths 8192 16384         # the random 350M in bf16; 2 to 3 minutes
python scripts/benchmarks/long_prompts.py time --lengths 32768 --shares 0.95    # as long
python scripts/benchmarks/long_prompts.py time --lengths 32768 --shares 0.95 --sharpness 2
python scripts/benchmarks/long_prompts.py perplexity --texts austen_*.txt    # the tiny model over whole novels
python scripts/benchmarks/long_prompts.py memory --lengths 8192 32768 131072

"time" alternates dense and sparse prefills of the same random tokens. Random weights attend to everything alike: the
worst case. For each length it says how many blocks, and how many keys, hold the first share of the mass at the end of
the prompt by perfect knowledge of it, hence how much faster any choice could be that keeps to the share. With
"--sharpness" the model's attention falls off with the distance (harness/attention_mass.py). "--half" adds a row in
which a block of queries is given half of the blocks it sees, whatever their mass: what the kernel makes of a choice.
"--lists" makes lists also where they do not pay: what they cost.
"perplexity" is of the tokens that follow a prompt of so many tokens of a text, given to the model one after another as
answers are: exactly, after a prompt that was computed densely or sparsely.
"""

from __future__ import annotations

import argparse
import math
import resource
import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from harness.attention_mass import Needs, attend_locally
from harness.machine import facts
from harness.readings import commit
from harness.workloads import load_model

from lfm2_cb import ContinuousBatchingGenerator, demo_model_path
from lfm2_cb.loading import load_tokenizer
from lfm2_cb.model.ragged_batch import RaggedBatch, Row
from lfm2_cb.ops.attention import packed
from lfm2_cb.ops.attention.kv_blocks import gather
from lfm2_cb.ops.attention.sparse import SparsePrefill, num_blocks

ONE_TOKEN = {"do_sample": False, "eos_token_id": None, "max_new_tokens": 1, "use_prefix_cache": False}


Clock = Callable[[], float]


class Watch:
    """Seconds spent in attention (the cache's writes and the choice of blocks included), and how many of the visible
    blocks were attended to.

    Attributes:
        needs: of each layer at the prompt's end, for `share` of the mass. seconds_aside: that finding these took.
    """

    def __init__(
        self,
        clock: Clock = time.perf_counter,
        half: bool = False,
        lists: bool = False,
        share: float | None = None,
        length: int = 0,
    ) -> None:
        self.clock, self.half, self.lists, self.share, self.length = clock, half, lists, share, length
        self.seconds, self.seconds_aside, self.num_left_out, self.num_visible = 0.0, 0.0, 0, 0
        self.needs: list[Needs] = []

    @property
    def share_of_blocks(self) -> float:
        return 1 - self.num_left_out / self.num_visible if self.num_visible else 1.0

    @contextmanager
    def watching(self) -> Iterator[None]:
        attend, choose, worthwhile = RaggedBatch.attend, packed.choose_blocks, packed.is_worthwhile

        def timed(batch, layer, q, k, v):
            start = self.clock()
            result = attend(batch, layer, q, k, v)
            self.seconds += self.clock() - start
            for row, kv_len in zip(batch.rows, batch.kv_lens, strict=True):
                if row.sparse is not None:
                    self.num_visible += int(visible(len(row.token_ids), kv_len, k.shape[1]).sum())
            if self.share is not None and batch.kv_lens == [self.length]:
                start = self.clock()
                keys = gather(batch.cache.keys[layer.layer_idx], batch.block_tables[0], self.length)
                self.needs.append(Needs.of(q, keys, layer.scaling, self.share))
                self.seconds_aside += self.clock() - start
            return result

        def visible(num_queries, num_keys, kv_heads):
            mass = torch.empty(2, kv_heads, *num_blocks(num_queries, num_keys))
            return choose(mass, SparsePrefill(1.0, 0), num_queries, num_keys)

        def counted(mass, sparse, num_queries, num_keys):
            all_blocks = visible(num_queries, num_keys, mass.shape[1])
            taken = choose(mass, sparse, num_queries, num_keys)
            if self.half:
                taken = all_blocks & (torch.arange(all_blocks.shape[-1]) % 2 == 0)
            self.num_left_out += int(all_blocks.sum() - taken.sum())
            return taken

        def judged(mass, sparse, num_keys):
            return (sparse.share < 1 and (self.half or self.lists)) or worthwhile(mass, sparse, num_keys)

        RaggedBatch.attend, packed.choose_blocks, packed.is_worthwhile = timed, counted, judged
        try:
            yield
        finally:
            RaggedBatch.attend, packed.choose_blocks, packed.is_worthwhile = attend, choose, worthwhile


def times(args: argparse.Namespace) -> None:
    """Prefills of random tokens, dense and at each share, in turn."""
    model, rng = load_model(args.model, torch.bfloat16), torch.Generator().manual_seed(0)
    if args.sharpness:
        attend_locally(model, args.sharpness)
    clock = time.process_time if args.processor_time else time.perf_counter
    kinds = ["dense", *args.shares, *(["half of the blocks"] if args.half else [])]
    print(f"{facts()['cpu']}, {torch.get_num_threads()} threads; {args.model}, bf16; seconds of one prefill")
    with ContinuousBatchingGenerator(model, prefix_caching=False, cache_memory="4GiB") as generator:
        generator.engine.runner.capturing = False  # so that a kernel runs when it is called, while it is timed
        generator.generate([[5] * 300], sparse_prefill=0.9, **ONE_TOKEN)
        commit(generator.engine.runner.cache)
        for length in args.lengths:
            prompt = torch.randint(10, model.config.vocab_size - 10, (length,), generator=rng).tolist()
            readings: dict[Any, list[tuple[float, float, float]]] = {kind: [] for kind in kinds}
            needs: list[Needs] = []
            for _ in range(args.repeats):
                for kind in kinds:
                    is_first = kind == "dense" and not needs
                    share_of_needs = args.shares[0] if is_first else None
                    watch, start = Watch(clock, "half" in str(kind), args.lists, share_of_needs, length), clock()
                    with watch.watching():
                        share = kind if isinstance(kind, float) else 1.0 if kind == "dense" else 0.5
                        generator.generate([prompt], sparse_prefill=share, **ONE_TOKEN)
                    seconds = clock() - start - watch.seconds_aside
                    readings[kind].append((seconds, watch.seconds, watch.share_of_blocks))
                    needs = needs or watch.needs
            report(length, readings, args.shares[0], Needs.mean(needs))


def report(length: int, readings: Mapping[Any, Sequence[tuple[float, ...]]], share: float, needs: Needs) -> None:
    print("| tokens | prefill | in all | attention | blocks attended to | speed of all | of attention |")
    print("|---|---|---|---|---|---|---|")
    medians = {kind: [statistics.median(v) for v in zip(*rows, strict=True)] for kind, rows in readings.items()}
    all_dense, attention_dense, _ = medians["dense"]
    for kind, (seconds, attention, blocks) in medians.items():
        ratios = f"{all_dense / seconds:.2f} × | {attention_dense / attention:.2f} ×"
        print(f"| {length:,} | {kind} | {seconds:.2f} | {attention:.2f} | {blocks:.0%} | {ratios} |", flush=True)
    part = attention_dense / all_dense
    print(f"attention is {part:.0%} of it; at the prompt's end, {share} of the mass is held by")
    for what, least in (("the blocks", needs.blocks), ("the keys, chosen for each query and head", needs.keys)):
        print(f"  {least:.1%} of {what}, by perfect knowledge: at most {1 / (1 - part * (1 - least)):.2f} × in all")
    print(
        f"  the estimate chooses {needs.chosen:.1%} of the blocks, which hold {needs.held:.2%} of the mass", flush=True
    )


def perplexity(args: argparse.Namespace) -> None:
    """Of what follows prompts out of texts, the same tokens after dense and after sparse prompts."""
    path = demo_model_path()
    tokenizer = load_tokenizer(path)
    texts = [Path(text).read_text("utf-8") for text in args.texts] or [
        "\n".join(Path(path, "prompts.jsonl").read_text("utf-8").splitlines())
    ]
    token_ids = [tokenizer(text, add_special_tokens=False)["input_ids"] for text in texts]
    model = load_model("tiny", torch.float32)
    model.config.max_position_embeddings = max(args.contexts) + args.following + 1  # RoPE knows no last position
    print(f"the tiny model in fp32; perplexity of the {args.following} tokens after a prompt")
    print("| prompt | prefill | perplexity | against dense | blocks attended to |")
    print("|---|---|---|---|---|")
    with ContinuousBatchingGenerator(model, prefix_caching=False, max_sequences=1) as generator:
        for context in args.contexts:
            windows = [
                text[start : start + context + args.following]
                for text in token_ids
                for start in range(0, len(text) - context - args.following, max(context, len(text) // args.windows))
            ]
            dense = 0.0
            for share in (None, *args.shares):
                watch, total = Watch(), 0.0
                with watch.watching():
                    for window in windows:
                        total += negative_log_likelihood(generator, window, context, share)
                loss = total / len(windows) / args.following
                dense = loss if share is None else dense
                print(
                    f"| {len(windows)} × {context:,} | {share or 'dense'} | {math.exp(loss):.3f} | "
                    f"{math.expm1(loss - dense):+.2%} | {watch.share_of_blocks:.0%} |",
                    flush=True,
                )


def negative_log_likelihood(
    generator: ContinuousBatchingGenerator, token_ids: list[int], context: int, share: float | None
) -> float:
    """Of the tokens after the first `context`, in nats, those being a prompt that is computed sparsely."""
    runner, size = generator.engine.runner, generator.engine.config.max_batch_tokens
    blocks = range(-(-len(token_ids) // generator.engine.config.block_size))
    sparse = None if share is None else SparsePrefill(share, context - 1)
    for start in range(0, context - 1, size):
        end = min(start + size, context - 1)
        runner.forward([Row(token_ids[start:end], start, blocks, 0, sparse=sparse)])
    rest = token_ids[context - 1 : -1]
    logits = runner.forward([Row(rest, context - 1, blocks, 0, num_logits=len(rest))])
    targets = torch.tensor(token_ids[context:])
    return float(torch.nn.functional.cross_entropy(logits.float(), targets, reduction="sum"))


def memory(args: argparse.Namespace) -> None:
    """Resident memory beside weights and cache, after exact prompts of growing length."""
    model = load_model(args.model, torch.bfloat16)
    model.config.max_position_embeddings = max(args.lengths) + 1
    per_token = 0
    with ContinuousBatchingGenerator(model, prefix_caching=False, cache_memory="8GiB", max_sequences=1) as generator:
        plan = generator.engine.plan
        per_token = plan.bytes_per_block / plan.block_size
        generator.generate([[5] * 4096], **ONE_TOKEN)
        before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 - 4096 * per_token
        for length in args.lengths:
            prompt = torch.randint(10, model.config.vocab_size, (length,)).tolist()
            start = time.perf_counter()
            generator.generate([prompt], **ONE_TOKEN)
            peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
            print(
                f"{length:,} tokens: {time.perf_counter() - start:.0f} s; K/V {length * per_token / 2**20:,.0f} MiB, "
                f"all else {(peak - before - length * per_token) / 2**20:+,.0f} MiB beside a prompt of 4,096",
                flush=True,
            )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=["time", "perplexity", "memory"])
    parser.add_argument("--model", default="random-350m", help='checkpoint path, or "random-350m"')
    parser.add_argument("--lengths", type=int, nargs="+", default=[8192, 16384, 32768])
    parser.add_argument("--shares", type=float, nargs="+", default=[0.99, 0.95, 0.9])
    parser.add_argument("--sharpness", type=float, help="attention that falls off with the distance; 1: nearly flat")
    parser.add_argument(
        "--processor-time",
        action="store_true",
        help="instead of seconds, on a shared machine (with OMP_NUM_THREADS=1)",
    )
    parser.add_argument("--half", action="store_true", help="also attend to every second block")
    parser.add_argument("--lists", action="store_true", help="make lists also where they do not pay")
    parser.add_argument("--repeats", type=int, default=1)
    parser.add_argument("--texts", nargs="*", default=[], help="files; default: the prompts that ship")
    parser.add_argument("--contexts", type=int, nargs="+", default=[3584, 16384])
    parser.add_argument("--following", type=int, default=256)
    parser.add_argument("--windows", type=int, default=4, help="of each text, at most")
    args = parser.parse_args()
    torch.manual_seed(0)
    {"time": times, "perplexity": perplexity, "memory": memory}[args.what](args)


if __name__ == "__main__":
    main()
