"""integrations/ is installed as lfm2_cb.integrations: the list of packages in pyproject.toml forgets no folder."""

import importlib
import tomllib
from pathlib import Path

ROOT = Path(__file__).parents[2]


def test_every_folder_with_code_is_packaged():
    setuptools = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["tool"]["setuptools"]
    assert setuptools["package-dir"] == {"lfm2_cb.integrations": "integrations"}
    ours = {path.parent.relative_to(ROOT) for path in (ROOT / "lfm2_cb").rglob("__init__.py")}
    theirs = {Path("lfm2_cb", path.parent.relative_to(ROOT)) for path in (ROOT / "integrations").rglob("__init__.py")}
    assert sorted(setuptools["packages"]) == sorted(".".join(path.parts) for path in ours | theirs)


def test_integrations_are_importable_under_the_package():
    package = importlib.import_module("lfm2_cb.integrations")
    assert package.__file__ is not None and Path(package.__file__).name == "__init__.py"
