"""Data files that the package ships for demonstrations."""

from pathlib import Path


def demo_model_path() -> str:
    """Folder of the tiny LFM2 that ships with the package: a checkpoint, a tokenizer, and prompts.jsonl."""
    return str(Path(__file__).parent / "tiny-lfm2")
