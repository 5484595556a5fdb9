#!/usr/bin/env bash
# Set up a fresh environment and run the main job on the model that ships.
package="."
source "$(dirname "${BASH_SOURCE[0]}")/setup_env.sh"
TRANSFORMERS_VERBOSITY=error "$venv/bin/python" scripts/demo.py
