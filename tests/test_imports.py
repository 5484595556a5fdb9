"""Who may know whom: read from the imports."""

import ast
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent / "lfm2_cb"
#: room → what its modules may import of the package
MAY_IMPORT = {
    "ops": {"ops"},
    "model": {"model", "ops"},
    "scheduling": {"scheduling"},
    "engine": {"engine", "scheduling", "model", "ops"},
}
#: names with an underscore that transformers itself asks models and users to set or read
CONVENTIONS = {
    "_attn_implementation",
    "_can_record_outputs",
    "_no_split_modules",
    "_skip_keys_device_placement",
    "_supports_attention_backend",
    "_supports_flash_attn",
    "_supports_flex_attn",
    "_supports_sdpa",
    "_tied_weights_keys",
}


def modules():
    return sorted(path.relative_to(ROOT) for path in ROOT.rglob("*.py"))


def name_of(path: Path) -> str:
    return ".".join(path.with_suffix("").parts).removesuffix(".__init__")


def imports(path: Path, with_type_checking: bool = False) -> set[str]:
    """Absolute names of what a module imports; "lfm2_cb.x.y" for the package's own."""
    tree = ast.parse((ROOT / path).read_text())
    package = ["lfm2_cb", *path.parts[:-1]]
    skipped = set()
    if not with_type_checking:
        for node in ast.walk(tree):
            if isinstance(node, ast.If) and getattr(node.test, "id", "") == "TYPE_CHECKING":
                skipped |= set(ast.walk(node))
    found = set()
    for node in ast.walk(tree):
        if node in skipped:
            continue
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            base = package[: len(package) - node.level + 1] if node.level else []
            module = ".".join([*base, node.module] if node.module else base)
            found.add(module)
            found |= {
                f"{module}.{alias.name}" for alias in node.names if (ROOT / "/".join(module.split(".")[1:])).is_dir()
            }
    return found


@pytest.mark.parametrize("path", modules(), ids=str)
def test_rooms_import_only_downwards(path):
    room = path.parts[0]
    if room not in MAY_IMPORT:
        return
    for name in imports(path, with_type_checking=True):
        parts = name.split(".")
        if parts[0] == "lfm2_cb" and len(parts) > 1:
            assert parts[1] in MAY_IMPORT[room], f"{path} imports {name}"


@pytest.mark.parametrize("path", [p for p in modules() if p.parts[0] == "scheduling"], ids=str)
def test_the_deciding_side_computes_nothing(path):
    assert not {name.split(".")[0] for name in imports(path)} & {"torch", "numpy", "transformers"}


def test_no_module_imports_itself_in_a_circle():
    names = {f"lfm2_cb.{name_of(path)}".removesuffix("."): path for path in modules() if path.name != "__init__.py"}
    graph = {name: {n for n in imports(path) if n in names} for name, path in names.items()}
    seen: dict[str, str] = {}

    def visit(name: str, trail: list[str]) -> None:
        assert seen.get(name) != "open", f"circle: {' → '.join([*trail, name])}"
        if name not in seen:
            seen[name] = "open"
            for other in graph[name]:
                visit(other, [*trail, name])
            seen[name] = "done"

    for name in graph:
        visit(name, [])


def private_names_of_transformers() -> set[str]:
    from transformers import AutoModelForCausalLM, GenerationConfig, GenerationMixin, PreTrainedModel

    names = set()
    for owner in (GenerationMixin, PreTrainedModel, GenerationConfig(), AutoModelForCausalLM):
        names |= {name for name in dir(owner) if name.startswith("_") and not name.startswith("__")}
    names |= {"_eos_token_tensor", "_pad_token_tensor", "_extra_content"}
    return names - set(dir(object)) - CONVENTIONS


@pytest.mark.parametrize("path", [p for p in modules() if p.name != "registration.py"], ids=str)
def test_only_registration_touches_private_names_of_transformers(path):
    private = private_names_of_transformers() - {n for n in dir(__import__("torch").nn.Module()) if n.startswith("_")}
    for node in ast.walk(ast.parse((ROOT / path).read_text())):
        if isinstance(node, ast.Attribute) and node.attr in private:
            owner = getattr(node.value, "id", "")
            assert owner in ("self", "cls"), f"{path}:{node.lineno} touches {node.attr}"
    for name in imports(path):
        if name.startswith("transformers"):
            assert not any(part.startswith("_") for part in name.split(".")), f"{path} imports {name}"


def test_no_file_outgrows_its_room():
    for path in modules():
        assert len((ROOT / path).read_text().splitlines()) <= 420, path
