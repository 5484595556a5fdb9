"""Documents made of the demonstration model's held-out prompts: the last word, and what comes before it."""

import json
from pathlib import Path

from datasets import Dataset

import lfm2_cb

NUM_CHOICES = 4


def last_words(**_: object) -> dict[str, Dataset]:
    """One split, "test": text, context, word, and the word among others' last words (`choices`, `label`)."""
    lines = Path(lfm2_cb.demo_model_path(), "prompts.jsonl").read_text("utf-8").splitlines()
    texts = [json.loads(line)["prompt"].strip() for line in lines]
    splits = [text.rsplit(maxsplit=1) for text in texts if len(text.split()) > 2]
    words = [word for _, word in splits]
    documents = []
    for i, (context, word) in enumerate(splits):
        others = [w for w in dict.fromkeys(words[i + 1 :] + words[:i]) if w != word][: NUM_CHOICES - 1]
        label = i % NUM_CHOICES
        choices = [*others[:label], word, *others[label:]]
        text = f"{context} {word}"
        documents.append({"text": text, "context": context, "word": word, "choices": choices, "label": label})
    return {"test": Dataset.from_list(documents)}
