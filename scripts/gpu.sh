#!/usr/bin/env bash
# On a machine with a CUDA card: parity with stock, and speed beside others, in ten minutes. Arguments go to gpu.py.
# PYTHON names the Python to use, of an environment with this package's dependencies and a torch with CUDA.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
export PYTHONPATH="$PWD${PYTHONPATH:+:$PYTHONPATH}"
exec "${PYTHON:-python}" scripts/benchmarks/gpu.py "$@"
