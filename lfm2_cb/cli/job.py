"""A batch job: reads rows, runs them as requests through the engine, writes records."""

from __future__ import annotations

import dataclasses
import re
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch

from ..engine.loop import Submission
from ..engine.sampler import LogitsProcessor
from ..generator import ContinuousBatchingGenerator
from ..requests.options import GenerateOptions
from ..requests.outputs import RequestOutput
from ..requests.prompts import PromptError, SegmentedPrompt, read_prompts
from ..scheduling.request import FinishReason
from .progress import Progress, Summary
from .rows import BadRow, Content, InputError, Source, row_digest, take_adapter, take_kept, take_prompt
from .writer import DIGEST_FIELD, OutputError, RowSet

OTHER_STREAM = "give the same input again, name another output, or --overwrite"
#: names of a record's own fields, which a kept column may not have
RECORD_FIELDS = ("index", "text", "finish_reason", "prompt_tokens", "output_tokens", "error", DIGEST_FIELD)


class Files(Protocol):
    """Where records go: `JobFiles`, `PipeFiles`."""

    done: RowSet
    num_errors: int
    resumes: bool  # whether a later run goes on with them

    def write(self, record: dict[str, Any], is_error: bool = False) -> None: ...


@dataclass
class PromptRow:
    """A row on its way."""

    index: int
    kept: dict[str, Any]
    token_ids: list[int]
    adapter: str | None = None
    digest: str | None = None
    submission: Submission | None = None
    error: BaseException | None = None  # why it will not be run
    is_second_try: bool = False

    @property
    def is_finished(self) -> bool:
        return self.submission is None or self.submission.is_finished


@dataclass(frozen=True)
class Job:
    """Rows of a source → records.

    A record has "index", "text", "finish_reason", "prompt_tokens", "output_tokens" and the kept columns; with
    `num_return_sequences` above 1, "text", "finish_reason" and "output_tokens" are lists. A row that cannot be run, or
    that fails twice (a failed step takes down its batch mates too, hence the second try), gives an error record with
    "index", "error" and the kept columns. Those of a stream that may be resumed have a "row_digest" too, by which a
    later run knows that it is given the same rows again. Memory holds `window` rows, whatever the size of the input.

    Args:
        options: of all rows; their seed and a row's index determine what is sampled.
        column: of the prompts; None: "prompt" or "messages".
        keep: columns carried over into the records.
        has_adapters: a row's column "adapter" names the one that it is for.
        ordered: write rows in their order; else as they complete.
    """

    generator: ContinuousBatchingGenerator
    options: GenerateOptions
    column: str | None = None
    keep: Sequence[str] = ()
    ordered: bool = False
    has_adapters: bool = False

    @property
    def window(self) -> int:
        """Rows read and not yet written: enough that one long answer does not starve the batch behind it."""
        return 4 * self.generator.engine.config.max_sequences

    def check_options(self) -> None:
        """Build a request of one token, and process scores as its first and its last step would.

        Raises: ValueError: the options are such that no row can be run.
        """
        try:
            submission = self.generator.enqueue([SegmentedPrompt([[0]])], self.options)
        except ValueError as error:
            raise ValueError(str(error).replace("prompt 0 has", "the shortest prompt has", 1)) from error
        try:
            (request,) = submission.requests
            for length in (1, request.max_new_tokens):
                self._process_scores(request.params.processors, length)
        finally:
            self.generator.abandon([submission])

    def _process_scores(self, processors: Sequence[LogitsProcessor], length: int) -> None:
        model = self.generator.model
        ids = torch.zeros(1, length, dtype=torch.long, device=model.device)
        scores = torch.zeros(1, model.config.vocab_size, device=model.device)
        for processor in processors:
            try:
                scores = processor(ids, scores)
            except Exception as error:  # stock's own, over whatever is in an option
                raise ValueError(f"{type(processor).__name__} cannot use its options: {error}") from error

    def run(self, source: Source, files: Files, progress: Progress) -> Summary:
        """Run the rows that are not done yet.

        Raises: OutputError: what was written is whole, and the job can go on later. KeyboardInterrupt: the same.
        InputError: the input cannot be read further. BrokenError: the engine is unusable.
        """
        start, summary, finished = time.monotonic(), Summary(), self._finish(self._read(source, files))
        try:
            with progress.shown():
                for row, outputs in finished:
                    record = self._record(row, outputs)
                    files.write(record, is_error="error" in record)
                    summary.num_rows += 1
                    summary.num_errors += "error" in record
                    summary.num_output_tokens += sum(len(output.token_ids) for output in outputs)
                    summary.seconds = time.monotonic() - start
                    progress.update(summary)
        except BrokenPipeError as error:  # of the progress
            raise OutputError("the progress output was closed") from error
        finally:
            finished.close()
            summary.seconds = time.monotonic() - start
        return summary

    def _read(self, source: Source, files: Files) -> Iterator[PromptRow]:
        """Rows that are not done, with their token ids or what is wrong with them.

        Raises: InputError: of rows that are done the source now has others, or none.
        """
        compares, num_before, num_seen = source.is_stream and files.resumes, len(files.done), 0
        for index, content in source.rows():
            digest = row_digest(content) if compares else None
            if index not in files.done:
                yield self._prepare(index, content, digest)
                continue
            num_seen += 1
            if digest is not None and not files.done.has_digest(index, digest):
                raise InputError(f"row {index} of the input is not the one that the output has; {OTHER_STREAM}")
        if num_seen < num_before:
            raise InputError(f"the input has {num_before - num_seen} fewer rows than the output; {OTHER_STREAM}")

    def _prepare(self, index: int, content: Content, digest: str | None) -> PromptRow:
        row = PromptRow(index, {}, [], digest=digest)
        if isinstance(content, BadRow):
            row.error = content
            return row
        try:
            row.kept = take_kept(content, self.keep)
            row.adapter = take_adapter(content) if self.has_adapters else None
            prompts, chunks = [take_prompt(content, self.column)], self.options.call.chunks
            (read,) = read_prompts(prompts, self.generator.tokenizer, chunks)
            if isinstance(read, PromptError):
                raise read
            row.token_ids = read
        except (BadRow, PromptError) as error:
            row.error = error
        except Exception as error:  # a chat template or a tokenizer may raise anything over what is in a row
            row.error = BadRow(f"the tokenizer or its chat template cannot use it: {error}")
        return row

    def _finish(self, rows: Iterator[PromptRow]) -> Any:
        """Run rows, a window of them at a time, and give each with its outputs (none where it was not run)."""
        waiting: dict[int, PromptRow] = {}
        more = True
        try:
            while more or waiting:
                while more and len(waiting) < self.window:
                    row = next(rows, None)
                    if row is None:
                        more = False
                    else:
                        waiting[row.index] = self._enqueue(row)
                if not waiting:
                    return
                ready = self._ready(waiting)
                for row in ready:
                    outputs = self.generator.run(row.submission) if row.submission is not None else []
                    failed = next((o.error for o in outputs if o.finish_reason is FinishReason.ERROR), None)
                    if failed is not None and not row.is_second_try:
                        row.is_second_try = True
                        self._enqueue(row)
                        if self.ordered:
                            break  # those behind it wait for it
                        continue
                    row.error = row.error or failed
                    del waiting[row.index]
                    yield row, outputs
        finally:
            self.generator.abandon([row.submission for row in waiting.values() if row.submission is not None])

    def _enqueue(self, row: PromptRow) -> PromptRow:
        if row.error is None:
            try:
                options = self.options
                if self.has_adapters:
                    call = dataclasses.replace(options.call, adapter=row.adapter)
                    options = dataclasses.replace(options, call=call)
                row.submission = self.generator.enqueue([row.token_ids], options, first_index=row.index)
            except ValueError as error:  # the row's own fault: too long, a token id out of range
                row.submission, row.error = None, error
        return row

    def _ready(self, waiting: dict[int, PromptRow]) -> list[PromptRow]:
        """Wait for rows that can be written: at least one, and all that follow from it."""
        candidates = [next(iter(waiting.values()))] if self.ordered else list(waiting.values())
        if not any(row.is_finished for row in candidates):
            self.generator.wait_any([row.submission for row in candidates if row.submission is not None])
        ready = []
        for row in waiting.values():
            if row.is_finished:
                ready.append(row)
            elif self.ordered:
                break
        return ready

    def _record(self, row: PromptRow, outputs: Sequence[RequestOutput]) -> dict[str, Any]:
        kept = row.kept if row.digest is None else {**row.kept, DIGEST_FIELD: row.digest}
        if row.error is not None:
            reason = re.sub(r"^prompt \d+ ", "the prompt ", str(row.error))  # the record has its index
            return {"index": row.index, "error": f"{type(row.error).__name__}: {reason}", **kept}
        answers: dict[str, Any] = {
            "text": [output.text for output in outputs],
            "finish_reason": [str(output.finish_reason) for output in outputs],
            "output_tokens": [len(output.token_ids) for output in outputs],
        }
        if len(outputs) == 1:
            answers = {name: values[0] for name, values in answers.items()}
        return {"index": row.index, **answers, "prompt_tokens": len(row.token_ids), **kept}
