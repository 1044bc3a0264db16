"""The staircase: which folders may import which, and which files of a folder each other."""

import graphlib
import re
import sys
import tomllib

from tests.source import FILES, NAMES, ROOT, imports, label, offenders, own_imports, unit

PROJECT = tomllib.loads((ROOT.parent / "pyproject.toml").read_text(encoding="utf-8"))

# Folders and files at the root: each may import only those before it, and its own files in any order without a circle.
STAIRCASE = [
    *("_version", "_context", "errors", "_torch", "_plotting", "types", "tree", "backends", "losses", "checkpoint"),
    *("random", "optim", "step", "data", "parallel", "transforms", "profiling", "training", "__main__", "__init__"),
]
# Folders whose files are variants of one thing do not import each other, but for what they share.
SHARED = {
    "backends": {"registry", "copying", "device_module", "cuda", "format_bytes", "generators", "graph_recorder"}
    | {"transfers", "host_memory"},
    "losses": {"inputs", "chunked"},
    "optim": {"column", "partial_update", "grouping", "structure_cache", "state_dtype", "rounding", "formats"}
    | {"elementwise", "schedules"},
    "optim.schedules": {"call", "checks", "warmup_and_decay", "phases", "combine"},
    "transforms": {"amp", "compile", "lora", "offload", "remat"},
}
DRAWN = "optim/schedules", "profiling/anatomy", "profiling/ladder"


def test_every_file_has_its_place_on_the_staircase():
    assert {unit(path) for path in FILES} == set(STAIRCASE)
    assert len(STAIRCASE) == len(set(STAIRCASE))


def test_imports_go_down_the_staircase():
    def climbing(path):
        below = {*STAIRCASE[: STAIRCASE.index(unit(path))], unit(path)}
        return [
            f"{label(path)} imports {name or 'ftrain'}" for name in own_imports(path) if name.split(".")[0] not in below
        ]

    assert not offenders(climbing)


def test_the_staircase_is_real():
    """An order in which nothing imports anything would prove nothing: each step but the last few carries another."""
    arrows = {(unit(path), name.split(".")[0]) for path in FILES for name in own_imports(path)}
    used = {to for start, to in arrows if start not in {to, "__init__"}}
    assert set(STAIRCASE) - used == {"losses", "training", "__main__", "__init__"}


def test_files_of_a_folder_do_not_import_each_other_in_circles():
    graph = {name: {other for other in own_imports(path) if other != name} for path, name in NAMES.items()}
    # What a package itself offers is made of its files.
    assert list(graphlib.TopologicalSorter(graph).static_order())


def test_variants_of_one_thing_do_not_import_each_other():
    def sideways(path):
        folder, _, file = NAMES[path].rpartition(".")
        inside = {
            name.removeprefix(f"{folder}.").split(".")[0] for name in own_imports(path) if name.startswith(folder)
        }
        wrong = inside - SHARED.get(folder, inside) - {file}
        return [f"{label(path)} imports {name}" for name in wrong] if path.stem != "__init__" else []

    assert not offenders(sideways)


def test_imports_are_declared():
    expected = {re.split(r"[^\w-]", requirement)[0] for requirement in PROJECT["project"]["dependencies"]}
    optional = {"training/progress.py": {"rich"}, "_plotting.py": {"matplotlib"}}
    optional |= {f"{folder}/{file}.py": {"matplotlib"} for folder in DRAWN for file in ("drawing", "record")}

    def undeclared(path):
        known = {*sys.stdlib_module_names, *expected, *optional.get(label(path), ()), "ftrain"}
        return [f"{label(path)} imports {name}" for name in imports(path) if name.split(".")[0] not in known]

    assert not offenders(undeclared)
    assert expected <= {name.split(".")[0] for path in FILES for name in imports(path)}
