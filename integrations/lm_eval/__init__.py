"""lm-eval's `--model lfm2-cb`: importing this registers it."""

from pathlib import Path

from .model import Lfm2CbLM

#: `--include_path` of the tasks that come with the package: they run offline, on the demonstration model's prompts
TASKS_PATH = str(Path(__file__).parent / "tasks")

__all__ = ["TASKS_PATH", "Lfm2CbLM"]
