"""The plan's directions, read from the source: who may know whom, and who may touch transformers' private names."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import pytest
import torch
import transformers
from transformers.generation.continuous_batching.continuous_api import BackgroundThreadStatus
from transformers.pipelines import PIPELINE_REGISTRY

ROOT = Path(__file__).parent.parent / "lfm2_cb"
INTEGRATIONS = ROOT.parent / "integrations"  # installed as lfm2_cb.integrations
PATHS = sorted(path.relative_to(ROOT) for path in ROOT.rglob("*.py"))
PATHS += sorted(Path("integrations", path.relative_to(INTEGRATIONS)) for path in INTEGRATIONS.rglob("*.py"))
DOTTED = re.compile(r"lfm2_cb(\.\w+)+")
#: room → the rooms it may import, beside itself: what is above it is none of its business. A file at the top of the
#: package is a room of its own.
MAY_IMPORT: dict[str, set[str]] = {"ops": set(), "scheduling": set(), "assets": set()}
MAY_IMPORT["model"] = {"ops"}
MAY_IMPORT["loading"] = {"model", "ops"}
MAY_IMPORT["adapters"] = {"model", "ops"}  # what is added to a model's layers; who is in memory, scheduling decides
MAY_IMPORT["engine"] = {"adapters", "scheduling", "model", "ops"}
MAY_IMPORT["requests"] = {"engine", "adapters", "scheduling", "loading", "model", "ops"}
MAY_IMPORT["generator"] = MAY_IMPORT["scoring"] = {"requests", *MAY_IMPORT["requests"]}
MAY_IMPORT["hf"] = {"generator", *MAY_IMPORT["generator"]}
MAY_IMPORT["manager_config"] = {"hf", *MAY_IMPORT["hf"]}  # a path that users have
MAY_IMPORT["__init__"] = {"hf", "scoring", "assets", *MAY_IMPORT["hf"]}
MAY_IMPORT["integrations"] = {"__init__", *MAY_IMPORT["__init__"]}
MAY_IMPORT["cli"] = {"integrations", *MAY_IMPORT["integrations"]}
MAY_IMPORT["__main__"] = {"cli"}
#: room → what of the outside its modules may not import (with all that lies below)
MUST_NOT_IMPORT = {
    "scheduling": {"torch", "transformers", "numpy"},
    "ops": {"transformers"},
    "model": {"transformers.pipelines", "transformers.tokenization_utils_base"},
    "engine": {"transformers.pipelines", "transformers.tokenization_utils_base", "transformers.GenerationMixin"},
}
#: underscored names that transformers itself asks models to define, or users to read
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
#: what a subclass of stock's pipelines calls on itself; in pipeline.py the pipeline hands itself to its `_Call`
PIPELINE_HOOKS = {"_prepare_generate_kwargs", "_get_set_generation_params"}
#: what only registration.py may import, although it has no underscore
REGISTRIES = {"PIPELINE_REGISTRY", "register_checkpoint_conversion_mapping", "CONFIG_MAPPING", "MODEL_MAPPING"}


#: the files that touch private names: one changes transformers, one reads it, one has what a subclass needs of it
PRIVATE_TOUCHERS = {Path("hf/registration.py"), Path("requests/stock.py"), Path("hf/stock_manager.py")}


#: of a class. Stock's manager has 14, so ours has them too; with more a class has more than one reason to change.
MAX_PUBLIC_METHODS = 15


class Import(NamedTuple):
    name: str  # absolute and dotted, down to what is imported: "lfm2_cb.model.modeling.Lfm2CbModel"
    line: int


def imports(tree: ast.Module, path: Path) -> Iterator[Import]:
    """All that a module names of others: imports anywhere, those for annotations and dotted names in strings too, for
    `importlib` or for somebody else's: knowledge all the same."""
    package = ["lfm2_cb", *path.parts[:-1]]
    for node in ast.walk(tree):
        names = []
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            base = package[: len(package) - node.level + 1] if node.level else []
            names = [".".join([*base, *filter(None, [node.module]), alias.name]) for alias in node.names]
        elif isinstance(node, ast.Constant) and isinstance(node.value, str) and DOTTED.fullmatch(node.value):
            names = [node.value]
        yield from (Import(name, node.lineno) for name in names)


def is_below(name: str, roots: set[str]) -> bool:
    return any(name == root or name.startswith(f"{root}.") for root in roots)


def room_of(name: str) -> str:
    """Of a dotted name within the package."""
    parts = name.split(".")
    return parts[1] if len(parts) > 1 and parts[1] in MAY_IMPORT else "__init__"


def wrong_directions(tree: ast.Module, path: Path) -> Iterator[str]:
    """Imports against the plan."""
    room = path.parts[0].removesuffix(".py")
    for name, line in imports(tree, path):
        inside = name.split(".")[0] == "lfm2_cb"
        if inside and room_of(name) not in {room, *MAY_IMPORT[room]}:
            yield f"{path}:{line} imports {name}"
        if not inside and is_below(name, MUST_NOT_IMPORT.get(room, set())):
            yield f"{path}:{line} imports {name}"


def private_names_of_transformers() -> set[str]:
    owners = [
        transformers.GenerationMixin,
        transformers.PreTrainedModel,
        transformers.PreTrainedConfig,
        transformers.PreTrainedTokenizerBase,
        transformers.GenerationConfig(),
        transformers.DynamicCache(),
        transformers.AutoModelForCausalLM,
        transformers.AutoModelForCausalLM._model_mapping,
        transformers.AutoConfig,
        transformers.TextGenerationPipeline,
        PIPELINE_REGISTRY,
        BackgroundThreadStatus(),
    ]
    names = {name for owner in owners for name in dir(owner) if name.startswith("_") and not name.endswith("__")}
    names |= {"_eos_token_tensor", "_pad_token_tensor"}  # set by generate() on a config
    names |= {"_cached_continuous_batching_manager"}  # set on a model
    return names - set(dir(torch.nn.Module())) - CONVENTIONS


PRIVATE = private_names_of_transformers()


def private_touches(tree: ast.Module, path: Path) -> Iterator[str]:
    """Uses of transformers' private names and registries, on anything but the object itself."""
    for name, line in imports(tree, path):
        parts = name.split(".")
        if parts[0] == "transformers" and (any(p.startswith("_") for p in parts) or parts[-1] in REGISTRIES):
            yield f"{path}:{line} imports {name}"
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute):
            owner, name = ast.unparse(node.value), node.attr
            if owner.split(".")[0] == "transformers":  # no private name, and nothing is assigned
                if name.startswith("_") or isinstance(node.ctx, ast.Store):
                    yield f"{path}:{node.lineno} touches {owner}.{name}"
            elif owner.startswith("Auto") and (name == "register" or name.startswith("_")):
                yield f"{path}:{node.lineno} touches {owner}.{name}"
            elif path.name == "pipeline.py" and owner == "pipe" and name in PIPELINE_HOOKS:
                continue
            elif name in PRIVATE and owner not in ("self", "cls", "super()"):
                yield f"{path}:{node.lineno} touches {owner}.{name}"
        elif isinstance(node, ast.Call) and ast.unparse(node.func) in ("getattr", "setattr", "hasattr", "delattr"):
            owner, name = ast.unparse(node.args[0]), node.args[1]
            if isinstance(name, ast.Constant) and name.value in PRIVATE and owner not in ("self", "cls"):
                yield f"{path}:{node.lineno} touches {owner}.{name.value}"


def import_graph() -> dict[str, set[str]]:
    """Module → the package's modules that it names."""
    names = {".".join(["lfm2_cb", *path.with_suffix("").parts]).removesuffix(".__init__"): path for path in PATHS}
    graph = {}
    for name, path in names.items():
        found = [i.name for i in imports(parse(path), path)]
        graph[name] = {n if n in names else n.rpartition(".")[0] for n in found} & names.keys() - {name}
    return graph


def find_circle(graph: dict[str, set[str]]) -> list[str]:
    """The modules of one import circle, or nothing."""
    done: set[str] = set()

    def visit(name: str, trail: list[str]) -> list[str]:
        if name in trail:
            return [*trail[trail.index(name) :], name]
        if name not in done:
            for other in sorted(graph[name]):
                if circle := visit(other, [*trail, name]):
                    return circle
            done.add(name)
        return []

    return next((circle for name in graph if (circle := visit(name, []))), [])


def num_public_methods(node: ast.ClassDef) -> int:
    methods = [n for n in node.body if isinstance(n, (ast.FunctionDef, ast.AsyncFunctionDef))]
    is_property = [{"property", "cached_property"} & {ast.unparse(d) for d in m.decorator_list} for m in methods]
    return sum(not m.name.startswith("_") and not p for m, p in zip(methods, is_property, strict=True))


def read(path: Path) -> str:
    return (ROOT.parent if path.parts[0] == "integrations" else ROOT).joinpath(path).read_text("utf-8")


def parse(path: Path) -> ast.Module:
    return ast.parse(read(path))


# The package


@pytest.mark.parametrize("path", PATHS, ids=str)
def test_imports_go_only_downwards(path):
    assert not list(wrong_directions(parse(path), path))


@pytest.mark.parametrize("path", [p for p in PATHS if p not in PRIVATE_TOUCHERS], ids=str)
def test_only_registration_touches_private_names_of_transformers(path):
    assert not list(private_touches(parse(path), path))


def test_every_room_has_its_place():
    assert {path.parts[0].removesuffix(".py") for path in PATHS} == MAY_IMPORT.keys()


def test_rooms_are_in_one_order():
    assert not find_circle(MAY_IMPORT)


def test_no_module_imports_itself_in_a_circle():
    assert not find_circle(import_graph())


def test_a_class_has_few_public_methods():
    """One reason to change, and so few ways to be used; properties are none of them."""
    classes = [n for path in PATHS for n in ast.walk(parse(path)) if isinstance(n, ast.ClassDef)]
    assert [n.name for n in classes if num_public_methods(n) > MAX_PUBLIC_METHODS] == []


# The reader itself: it must find what it is there to find


@pytest.mark.parametrize(
    "path, source",
    [
        ("scheduling/scheduler.py", "import torch"),
        ("scheduling/scheduler.py", "def f():\n    from numpy.random import rand"),
        ("scheduling/scheduler.py", "from ..engine.engine import Engine"),
        ("scheduling/scheduler.py", "from lfm2_cb.model import modeling"),
        ("scheduling/scheduler.py", "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    import torch"),
        ("model/modeling.py", "from ..scheduling import request"),
        ("model/modeling.py", "from .. import generator"),
        ("model/modeling.py", "import lfm2_cb"),
        ("ops/attention.py", "from ..model.configuration import head_dim"),
        ("ops/attention.py", "from transformers import PreTrainedModel"),
        ("engine/engine.py", "from ..hf.pipeline import ContinuousBatchingPipeline"),
        ("engine/engine.py", "from ..requests.stock import options_set"),
        ("engine/engine.py", "from transformers.pipelines import pipeline"),
        ("engine/loop.py", "def f():\n    import importlib\n    importlib.import_module('lfm2_cb.generator')"),
        ("requests/options.py", "from ..generator import ContinuousBatchingGenerator"),
        ("requests/options.py", "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    from ..hf import manager"),
        ("loading.py", "from .engine.engine import Engine"),
        ("generator.py", "from .hf.manager import Lfm2CbManager"),
        ("scoring.py", "from . import load_model"),
        ("hf/pipeline.py", "from ..cli.job import Job"),
        ("integrations/serve/app.py", "from ...cli import main"),
        ("cli/job.py", "from ..__main__ import sys"),
    ],
)
def test_an_import_against_the_plan_is_found(path, source):
    assert len(list(wrong_directions(ast.parse(source), Path(path)))) == 1


@pytest.mark.parametrize(
    "source",
    [
        "from transformers.generation.utils import _speculative_sampling",
        "from transformers.pipelines import PIPELINE_REGISTRY",
        "from transformers.conversion_mapping import register_checkpoint_conversion_mapping",
        "import transformers\ntransformers.Lfm2ForCausalLM = None",
        "import transformers\ntransformers.models._secret",
        "AutoModelForCausalLM.register(a, b)",
        "AutoModelForCausalLM._model_mapping",
        "model._prepare_generation_config(config)",
        "self.model._get_logits_processor(config)",
        "config._eos_token_tensor",
        "getattr(model, '_get_stopping_criteria')",
    ],
)
def test_a_touch_of_something_private_is_found(source):
    assert len(list(private_touches(ast.parse(source), Path("generator.py")))) == 1


@pytest.mark.parametrize(
    "source",
    ["self._prepare_generate_kwargs()", "module._parameters", "config._attn_implementation", "handle._events"],
)
def test_what_is_nobody_elses_business_is_let_pass(source):
    assert not list(private_touches(ast.parse(source), Path("generator.py")))


def test_the_private_names_are_in_these_files():
    for path in PRIVATE_TOUCHERS:
        assert len(list(private_touches(parse(path), path))) > 2


def test_a_circle_is_found():
    graph = {"a": {"b"}, "b": {"c", "d"}, "c": set(), "d": {"b"}}
    assert find_circle(graph) == ["b", "d", "b"]
    assert not find_circle({"a": {"b", "c"}, "b": {"c"}, "c": set()})


def test_public_methods_are_counted():
    methods = ["@property\n    def a(self): ...", "def b(self): ...", "async def c(self): ...", "def _d(self): ..."]
    source = "\n    ".join(["class A:", *methods])
    assert num_public_methods(ast.parse(source).body[0]) == 2


def test_the_graph_sees_the_package():
    graph = import_graph()
    assert "lfm2_cb.hf.registration" in graph["lfm2_cb"] and "lfm2_cb.engine.engine" in graph["lfm2_cb.engine.loop"]
    assert "lfm2_cb.hf.pipeline" in graph["lfm2_cb.hf.registration"]  # a string that transformers resolves
