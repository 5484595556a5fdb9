#!/usr/bin/env bash
# Set up a fresh environment and run the checks and the test suite. Arguments go to pytest.
package=".[test]"
source "$(dirname "${BASH_SOURCE[0]}")/setup_env.sh"
"$venv/bin/ruff" check .
"$venv/bin/ruff" format --check .
"$venv/bin/mypy"
"$venv/bin/python" -m pytest "$@"
