# Sourced by demo.sh and test.sh: a fresh virtual environment in $venv with the package and the given extra.
# torch's version is named because a bare `torch` may bring several GB of CUDA packages; set TORCH to change it.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
venv=$(mktemp -d "${TMPDIR:-/tmp}/lfm2-cb-venv.XXXXXX")
trap 'rm -rf "$venv"' EXIT
"${PYTHON:-python3}" -m venv "$venv"
"$venv/bin/python" -m pip install -q --disable-pip-version-check "${TORCH:-torch==2.13.0}"
"$venv/bin/python" -m pip install -q --disable-pip-version-check -e "$package"
