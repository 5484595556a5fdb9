"""lm-eval's Hugging Face model with its two slow parts replaced: generation by the engine, scoring by `Scorer`.

Everything that makes a score what it is (tokenization, truncation, special tokens, chat templates, stop sequences)
stays `HFLM`'s, so the scores stay its too.
"""

from __future__ import annotations

import dataclasses
import inspect
from collections.abc import Callable, Sequence
from typing import Any

import torch
from lm_eval.api.instance import Instance
from lm_eval.api.registry import register_model
from lm_eval.models.huggingface import HFLM
from lm_eval.models.utils import handle_stop_sequences, normalize_gen_kwargs, postprocess_generated_text
from tqdm import tqdm
from transformers import PreTrainedModel

from lfm2_cb.engine.config import EngineConfig
from lfm2_cb.generator import ContinuousBatchingGenerator
from lfm2_cb.requests.options import GenerateOptions, UnsupportedOptionError
from lfm2_cb.scheduling.request import FinishReason
from lfm2_cb.scoring import Scorer

#: options of HFLM that another way of computing has no place for
REFUSED = ("parallelize", "tp_plan", "mixed_precision_dtype", "peft", "delta", "autogptq", "gptqmodel")

#: what HFLM takes beside its own options, for `from_pretrained`
FOR_LOADING = {"attn_implementation", "cache_dir", "force_download", "local_files_only", "token", "use_safetensors"}


@register_model("lfm2-cb")
class Lfm2CbLM(HFLM):
    """`--model lfm2-cb --model_args pretrained=PATH`.

    Args:
        pretrained: checkpoint path, or a live LFM2.
        device: HFLM's; the accelerator where there is one, by default.
        softmax_dtype: None or float32; log-probabilities are always computed in float32.
        kwargs: the engine's options (fields of `EngineConfig`), and HFLM's. `batch_size` is taken and has no effect:
            batches are made of tokens.
    Raises:
        UnsupportedOptionError: an option that is not known, or cannot be honoured here. TypeError: not an LFM2.
    """

    def __init__(
        self,
        pretrained: str | PreTrainedModel,
        *,
        device: str | None = None,
        softmax_dtype: str | torch.dtype | None = None,
        **kwargs: Any,
    ) -> None:
        for name in REFUSED:
            if kwargs.get(name):
                raise UnsupportedOptionError(f"{name}={kwargs[name]!r} is not supported by lfm2-cb; use --model hf")
        if softmax_dtype not in (None, "float32", torch.float32):
            raise UnsupportedOptionError(f"softmax_dtype={softmax_dtype!r}: lfm2-cb's log-probabilities are float32")
        names = {field.name for field in dataclasses.fields(EngineConfig)}
        options = EngineConfig(**{name: kwargs.pop(name) for name in names & kwargs.keys()})
        if unknown := sorted(kwargs.keys() - inspect.signature(HFLM.__init__).parameters.keys() - FOR_LOADING):
            raise UnsupportedOptionError(
                f"lfm2-cb has no {', '.join(unknown)}; the engine's: {', '.join(sorted(names))}"
            )
        device = device or ("cuda" if torch.cuda.is_available() else "cpu")
        super().__init__(pretrained, device=device, **kwargs)
        self.generator = ContinuousBatchingGenerator(self.model, self.tokenizer, **vars(options))
        self.scorer = Scorer(self.model, options.max_batch_tokens)

    @property
    def batch_size(self) -> int:
        """Windows that `loglikelihood_rolling` hands over at once: all of them."""
        return 2**31

    def _loglikelihood_tokens(
        self,
        requests: Sequence[tuple[tuple[str, str] | None, list[int], list[int]]],
        disable_tqdm: bool = False,
        override_bs: int | None = None,
    ) -> list[tuple[float, bool]]:
        """(log-probability, whether greedy decoding would produce it) of each (key, context, continuation)."""
        pairs = []
        for _, context, continuation in requests:
            assert len(continuation) <= self.max_length
            kept = (context + continuation)[-(self.max_length + 1) :]  # as HFLM: too long is cut on the left
            pairs.append((kept[: -len(continuation)], continuation))
        answers: list[tuple[float, bool]] = [(0.0, False)] * len(pairs)
        with tqdm(total=len(pairs), disable=disable_tqdm or self.rank != 0, desc="loglikelihood") as bar:
            for index, score in self.scorer.iterate(pairs):
                answers[index] = (score.logprob, score.is_greedy)
                key = requests[index][0]
                if key is not None:  # rolling windows have none: the whole string is noted by the caller
                    self.cache_hook.add_partial("loglikelihood", key, answers[index])
                bar.update()
        return answers

    def generate_until(self, requests: list[Instance], disable_tqdm: bool = False) -> list[str]:
        """All requests in one continuous batch, whatever their options; each stops at its own stop sequences."""
        calls = [_Call(self, *request.args) for request in requests]
        options: dict[str, GenerateOptions] = {}
        submissions = []
        for index, call in enumerate(calls):
            key = repr(call.kwargs)
            if key not in options:
                options[key] = self.generator.resolve(None, call.kwargs, interface="lm-eval's generate_until")
            submissions.append(self.generator.enqueue([call.token_ids], call.stopping(options[key]), index))
        texts = []
        with tqdm(total=len(calls), disable=disable_tqdm or self.rank != 0, desc="generate_until") as bar:
            for index, (call, submission) in enumerate(zip(calls, submissions, strict=True)):
                (output,) = self.generator.run(submission, decode=False)
                if output.finish_reason is FinishReason.ERROR:
                    raise RuntimeError(f"request {index} failed: {output.error!r}") from output.error
                texts.append(call.text(output.token_ids))
                self.cache_hook.add_partial("generate_until", (call.context, call.gen_kwargs), texts[-1])
                bar.update()
        return texts


class _Call:
    """One generation request: HFLM's reading of its options, of its context and of its answer."""

    def __init__(self, lm: Lfm2CbLM, context: str, gen_kwargs: dict[str, Any]) -> None:
        self.lm, self.context, self.gen_kwargs = lm, context, gen_kwargs
        kwargs = dict(normalize_gen_kwargs(gen_kwargs, lm.max_gen_toks))
        eos = lm.tok_decode(lm.eot_token_id, skip_special_tokens=False)
        self.stop = handle_stop_sequences(kwargs.pop("until", None), eos=eos)
        limit = kwargs.pop("max_gen_toks")
        if limit >= lm.max_length:
            raise ValueError(f"max_gen_toks={limit} must be less than the model's maximum length {lm.max_length}")
        if not kwargs.get("do_sample"):
            kwargs = {**kwargs, "do_sample": False, "temperature": None}
        if "max_length" not in kwargs:
            kwargs["max_new_tokens"] = limit
        self.kwargs = kwargs
        ids, _ = lm.tok_batch_encode([context], left_truncate_len=lm.max_length - limit, truncation=lm.truncation)
        self.token_ids: list[int] = ids[0].tolist()

    def stopping(self, options: GenerateOptions) -> GenerateOptions:
        """The options with this request's stop sequences, which must not be found in its context."""
        criterion = stop_at(self.stop, self.lm.tokenizer, len(self.token_ids))
        return dataclasses.replace(options, call=dataclasses.replace(options.call, stopping_criteria=[criterion]))

    def text(self, token_ids: list[int]) -> str:
        """The answer without what thinking and stop sequences take from it."""
        end = self.lm.think_end_token
        thought = isinstance(end, int) and end in token_ids
        if thought:
            token_ids = token_ids[len(token_ids) - token_ids[::-1].index(end) :]
        text = self.lm.tok_decode(token_ids)
        text = text.lstrip() if isinstance(end, int) else text
        return postprocess_generated_text(text, self.stop, end if isinstance(end, str) else None)


def stop_at(stop: list[str], tokenizer: Any, prompt_length: int) -> Callable[..., bool]:
    """A stopping criterion: one of the texts has been generated. A text has at most as many tokens as bytes."""
    reach = max((len(text.encode()) for text in stop), default=0)

    def ends(input_ids: torch.Tensor, scores: Any, **kwargs: Any) -> bool:
        tail = input_ids[0, max(prompt_length, input_ids.shape[1] - reach) :]
        text = tokenizer.decode(tail)
        return any(term and term in text for term in stop)

    return ends
