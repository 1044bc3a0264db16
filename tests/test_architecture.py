"""The layers of the package: which folders may import which, and which files of a folder each other."""

import graphlib
import re
import sys
import tomllib

from tests.source import FILES, MODULE_NAMES, ROOT, imports, label, layer, package_imports, violations

PROJECT = tomllib.loads((ROOT.parent / "pyproject.toml").read_text(encoding="utf-8"))

# Folders and files at the root: each may import only those before it, and its own files without a cycle.
LAYERS = [
    *("_version", "_context", "errors", "_torch", "_plotting", "types", "tree", "backends", "losses", "checkpoint"),
    *("random", "optim", "step", "data", "parallel", "transforms", "profiling", "training", "__main__", "__init__"),
]
# In these folders each file is one variant, such as one optimizer. It may import only the files that are named here.
SHARED = {
    "backends": {"registry", "copying", "device_module", "cuda", "format_bytes", "generators", "graph_recorder"}
    | {"transfers", "host_memory"},
    "losses": {"inputs", "chunked"},
    "optim": {"column", "partial_update", "grouping", "structure_cache", "state_dtype", "rounding", "formats"}
    | {"formula", "leafwise", "schedules"},
    "optim.schedules": {"call", "checks", "warmup_and_decay", "phases", "combine"},
    "transforms": {"amp", "compile", "lora", "offload", "remat"},
}
DRAWING = "optim/schedules", "profiling/anatomy", "profiling/ladder"


def test_every_file_is_in_a_layer():
    assert {layer(path) for path in FILES} == set(LAYERS)
    assert len(LAYERS) == len(set(LAYERS))


def test_a_layer_imports_only_layers_before_it():
    def imports_of_later_layers(path):
        allowed = LAYERS[: LAYERS.index(layer(path)) + 1]
        names = [name for name in package_imports(path) if name.split(".")[0] not in allowed]
        return [f"{label(path)} imports {name or 'ftrain'}" for name in names]

    assert not violations(imports_of_later_layers)


def test_every_layer_but_four_is_imported_by_another():
    """If no layer imported another, any order of the layers would pass the test above."""
    edges = {(layer(path), name.split(".")[0]) for path in FILES for name in package_imports(path)}
    imported = {target for source, target in edges if source not in {target, "__init__"}}
    assert set(LAYERS) - imported == {"losses", "training", "__main__", "__init__"}


def test_imports_have_no_cycles():
    # The `__init__.py` of a folder imports names from the files of the folder, which counts as an import of itself.
    graph = {name: set(package_imports(path)) - {name} for path, name in MODULE_NAMES.items()}
    assert list(graphlib.TopologicalSorter(graph).static_order())


def test_variants_do_not_import_each_other():
    def imports_of_variants(path):
        folder, _, file = MODULE_NAMES[path].rpartition(".")
        if path.stem == "__init__" or folder not in SHARED:
            return []
        in_folder = [name for name in package_imports(path) if name.startswith(folder)]
        siblings = {name.removeprefix(f"{folder}.").split(".")[0] for name in in_folder}
        return [f"{label(path)} imports {name}" for name in siblings - SHARED[folder] - {file}]

    assert not violations(imports_of_variants)


def test_imports_are_declared():
    required = {re.split(r"[^\w-]", requirement)[0] for requirement in PROJECT["project"]["dependencies"]}
    optional = {"training/progress.py": {"rich"}, "_plotting.py": {"matplotlib"}}
    optional |= {f"{folder}/{file}.py": {"matplotlib"} for folder in DRAWING for file in ("drawing", "record")}

    def undeclared(path):
        known = {*sys.stdlib_module_names, *required, *optional.get(label(path), ()), "ftrain"}
        return [f"{label(path)} imports {name}" for name in imports(path) if name.split(".")[0] not in known]

    assert not violations(undeclared)
    assert required <= {name.split(".")[0] for path in FILES for name in imports(path)}
