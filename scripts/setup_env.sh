# Sourced by demo.sh and test.sh: a fresh virtual environment in $venv with the package and the given extra.
# torch's version is named because a bare `torch` may bring several GB of CUDA packages; set TORCH to change it.
# --no-compile: most of what is installed is never imported, and compiling it all takes two minutes. What is imported is
# compiled once and kept, also where the environment says otherwise: the tests start hundreds of processes.
set -euo pipefail
unset PYTHONDONTWRITEBYTECODE
cd "$(dirname "${BASH_SOURCE[0]}")/.."
venv=$(mktemp -d "${TMPDIR:-/tmp}/lfm2-cb-venv.XXXXXX")
trap 'rm -rf "$venv"' EXIT
"${PYTHON:-python3}" -m venv "$venv"
pip=("$venv/bin/python" -m pip install -q --no-compile --disable-pip-version-check)
"${pip[@]}" "${TORCH:-torch==2.13.0}"
"${pip[@]}" -e "$package"
