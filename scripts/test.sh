#!/usr/bin/env bash
# Set up a fresh environment and run the checks and the test suite, two files at a time. Arguments go to pytest.
package=".[test]"
source "$(dirname "${BASH_SOURCE[0]}")/setup_env.sh"
"$venv/bin/ruff" check .
"$venv/bin/ruff" format --check .
"$venv/bin/mypy"
# One thread each, that sleeps while it waits: the tests that want more say so.
export OMP_NUM_THREADS=1 OMP_WAIT_POLICY=PASSIVE
"$venv/bin/python" -m pytest -n 2 --dist loadfile "$@"
