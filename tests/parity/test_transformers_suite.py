"""transformers' common model tests, from the source distribution of the installed version, mapped to our classes.

To run: unpack the archive that `pip download --no-deps --no-binary :all: transformers==<version>` gets, and name the
folder in TRANSFORMERS_SDIST. (It has the tests of all models in common; those of single models are in git only.)
"""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

SDIST = os.environ.get("TRANSFORMERS_SDIST")
#: what the common tests import, and the source distribution leaves out: for tests that are not run here
LEFT_OUT = {
    "generation/test_utils.py": "class GenerationTesterMixin: pass",
    "exporters/test_export.py": "class ExportTesterMixin: pass",
    "utils/test_configuration_utils.py": "config_common_kwargs = {}",
}


@pytest.mark.slow
@pytest.mark.skipif(SDIST is None, reason="TRANSFORMERS_SDIST names no unpacked source distribution")
def test_transformers_common_tests_pass_on_our_classes(tmp_path):
    pytest.importorskip("parameterized")
    package = tmp_path / "hf_tests"
    shutil.copytree(Path(SDIST, "tests"), package)
    shutil.copy(Path(__file__).with_name("transformers_suite.py"), package / "test_ours.py")
    for name, source in LEFT_OUT.items():
        path = package / name
        path.parent.mkdir(exist_ok=True)
        path.parent.joinpath("__init__.py").touch()
        path.write_text(source)
    package.joinpath("__init__.py").touch()
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "hf_tests/test_ours.py"]
    run = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True)
    print(run.stdout[-2000:])
    assert run.returncode == 0, run.stdout[-5000:]
