"""lm-eval's own command line, with `--model lfm2-cb` known: `python -m lfm2_cb.integrations.lm_eval run ...`."""

import sys

from lfm2_cb.integrations.lm_eval import TASKS_PATH
from lm_eval.__main__ import cli_evaluate

if __name__ == "__main__":
    if not any(argument.partition("=")[0] == "--include_path" for argument in sys.argv):
        sys.argv += ["--include_path", TASKS_PATH]
    cli_evaluate()
