"""The staircase and the house rules, read from the source."""

import ast
import re
import sys
import tomllib
from pathlib import Path

import pytest

import ftrain

ROOT = Path(ftrain.__file__).parent
PROJECT = tomllib.loads((ROOT.parent / "pyproject.toml").read_text(encoding="utf-8"))

# Each line may import only lines above it.
STAIRCASE = [
    "_version",
    "profiling",
    "errors",
    "_torch",
    "backends",
    "checks",
    "figures",
    "types",
    "guard",
    "tree",
    "masks",
    "reader",
    "misfits",
    "purity",
    "philox",
    "random",
    "keyed",
    "barrier",
    "recompute",
    "policies",
    "operations",
    "running",
    "inductor_random",
    "transfers",
    "pieces",
    "attempt",
    "stash",
    "schedules",
    "optim",
    "away",
    "losses",
    "reentrant",
    "grad",
    "sums",
    "slots",
    "caches",
    "products",
    "blocks",
    "announce",
    "watch",
    "float8",
    "budget",
    "label_weights",
    "overlaps",
    "module",
    "faithful",
    "graph",
    "traced",
    "devicegraph",
    "plan",
    "compiler",
    "looped",
    "lowered",
    "trainable",
    "wrapper",
    "update",
    "eager",
    "step",
    "transforms",
    "compiling",
    "evaluate",
    "additivity",
    "profiling.anatomy",
    "variants",
    "shortage",
    "history",
    "precision",
    "loggers",
    "progress",
    "data",
    "checkpoint",
    "adapters",
    "interrupts",
    "loop",
    "nonfinite",
    "recorder",
    "saved",
    "splitting",
    "feedback",
    "run",
    "fit",
    "replay",
    "timing",
    "profiling.hints",
    "profiling.ladder",
    "profiling.tuning",
    "doctor",
    "__main__",
    "__init__",
]
# What the files of a package may import of it, its own __init__ aside.
INSIDE = {
    "adapters": {"config", "weights", "targets", "layers", "modules", "trees", "lora", "merging"},
    # What devices have in common, and the record of NVIDIA's GPUs, of which AMD's is a variant.
    "backends": {"registry", "copying", "device_module", "cuda", "onednn", "resident"},
    "schedules": {"text", "inputs", "curve", "decays", "cosines", "roots", "stable", "joined", "pieces"},
    "optim": {"counting", "leaves", "rounding", "storage", "quantized", "family", "nested"},
    "losses": {"inputs", "chunked"},
    "profiling.hints": {"facts", "rules", "calls"},
    "profiling.tuning": {"amounts", "record", "search"},
    "profiling.ladder": {"techniques", "drawing", "record"},
    "transforms": set(),
    "profiling.anatomy": {
        "timeline",
        "kinds",
        "captured",
        "planned",
        "whole",
        "parts",
        "drawing",
        "predicted",
        "measured",
        "record",
    },
    "data": {
        "arrays",
        "tokens",
        "draws",
        "order",
        "cuts",
        "lengths",
        "plan",
        "fetch",
        "workers",
        "position",
        "stream",
        "pack",
        "pad",
        "passes",
        "planned",
    },
    "checkpoint": {
        "files",
        "layout",
        "skeleton",
        "manifest",
        "staging",
        "saving",
        "matching",
        "reading",
        "replacing",
        "journal",
        "run",
        "report",
    },
}

LONGEST_FILE = 400
# The doctor measures rates, and ladders and those who tune how long a step takes.
TALKERS = {"announce", "recorder", "progress", "loggers", "doctor", "timing"}
CLOCKS = {"time", "datetime"}
DEVICES = {"cuda", "xpu", "mps", "hpu", "npu", "mlu", "musa", "xla", "mtia", "hip", "ipu", "vulkan", "privateuseone"}
# And what is one platform's own: packages, libraries, compilers, collectives.
DEVICES |= {"rocm", "tpu", "cudnn", "mkldnn", "mudnn", "torch_npu", "torch_mlu", "torch_musa", "torch_xla"}
DEVICES |= {"habana_frameworks", "hpu_backend", "openxla", "nccl", "gloo", "xccl", "hccl", "cncl", "mccl"}
# The host is no platform: keys live there, and so does a tree without a tensor.
NAMES_THE_HOST = {"tree", "random"}
SYNCHRONISING = {"item", "tolist", "numpy", "cpu", "synchronize"}
# (file, function) that waits for the device and says so in its docstring.
WAITS = {
    ("profiling.anatomy", "measure"),
    ("doctor", "_seconds"),
    ("history", "_values"),
    ("optim", "_number"),
    ("random", "words"),
    ("recorder", "read_metrics"),
    ("timing", "seconds"),
}

# What a file raises that is not our own: errors of the system, to those who make ours of them.
RAISED = {
    "attempt.py": {"CompilerError"},
    "transforms/compiled.py": {"cause"},
    "data/prefetch.py": {"first.error"},
    "checkpoint/files.py": {"OSError", "BlockingIOError"},
    "fit.py": {"leaving"},
    "interrupts.py": {"Abandoned"},
    "splitting.py": {"Abandoned"},
    "plan.py": {"_Stopped"},
    "recompute.py": {"_Stopped"},
}

FILES = sorted(ROOT.rglob("*.py"))
TREES = {path: ast.parse(path.read_text(encoding="utf-8")) for path in FILES}
files = pytest.mark.parametrize("path", FILES, ids=[str(path.relative_to(ROOT)) for path in FILES])


def unit(path):
    """The line of the staircase that a file belongs to."""
    parts = path.relative_to(ROOT).with_suffix("").parts
    # A package of packages has a line for each.
    nested = ".".join(parts[:2])
    return nested if nested in STAIRCASE else parts[0]


def imports(path):
    """Dotted names of what a file imports, wherever in it: `from a import b` is a.b."""
    for node in ast.walk(TREES[path]):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert not node.level, f"{path}:{node.lineno}: a relative import"
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def own_imports(path):
    """The parts after `ftrain` of what a file imports of this package."""
    for name in imports(path):
        package, *parts = name.split(".")
        if package == "ftrain":
            nested = ".".join(parts[:2])
            yield [nested, *parts[2:]] if nested in STAIRCASE else parts


def docstrings(tree):
    """The nodes that are text for people: docstrings, and strings that stand alone below a constant."""
    return {
        id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)
    }


def where(path, nodes):
    return [f"{path.relative_to(ROOT.parent)}:{node.lineno}: {ast.unparse(node)}" for node in nodes]


# Imports


def test_every_file_has_its_place_on_the_staircase():
    assert {unit(path) for path in FILES} == set(STAIRCASE)
    assert len(STAIRCASE) == len(set(STAIRCASE))


@files
def test_imports_go_down(path):
    here = STAIRCASE.index(unit(path))
    for parts in own_imports(path):
        assert parts, "imports the whole package"
        assert parts[0] in STAIRCASE, f"imports {'.'.join(parts)} from the package instead of from its module"
        there = STAIRCASE.index(parts[0])
        assert there < here or parts[0] == unit(path), (
            f"{STAIRCASE[here]} imports {STAIRCASE[there]}, which is not below it"
        )


@files
def test_files_of_a_package_do_not_import_each_other(path):
    package = unit(path)
    if package not in INSIDE or path.stem == "__init__":
        return
    siblings = {other.stem for other in path.parent.glob("*.py")} - {"__init__"}
    found = {parts[1] for parts in own_imports(path) if parts[0] == package and len(parts) > 1}
    assert found & siblings <= INSIDE[package] - {path.stem}
    # Nor round by the door: `from ftrain.optim import sgd` names no file, and runs all of them.
    assert not any(parts == [package] for parts in own_imports(path))
    assert found <= siblings


@files
def test_imports_are_declared(path):
    needed = {re.split(r"[^\w-]", requirement)[0] for requirement in PROJECT["project"]["dependencies"]}
    drawing = "figures", "schedules", "profiling.anatomy", "profiling.ladder"
    optional = {"progress": {"rich"}, **{drawn: {"matplotlib"} for drawn in drawing}}
    optional = optional.get(unit(path), set())
    for name in imports(path):
        package = name.split(".")[0]
        assert package in {*sys.stdlib_module_names, *needed, *optional, "ftrain"}, name


def test_what_is_required_is_imported():
    needed = {re.split(r"[^\w-]", requirement)[0] for requirement in PROJECT["project"]["dependencies"]}
    assert needed <= {name.split(".")[0] for path in FILES for name in imports(path)}


def test_the_staircase_is_real():
    """An order in which nothing imports anything would prove nothing."""
    used = {parts[0] for path in FILES if unit(path) != "__init__" for parts in own_imports(path)}
    top = {
        "adapters",
        "losses",
        "evaluate",
        "precision",
        "fit",
        "replay",
        "profiling",
        "profiling.tuning",
        "profiling.ladder",
        "__main__",
        "__init__",
    }
    assert set(STAIRCASE) - used <= top


# House rules


@files
def test_files_are_short(path):
    length = len(path.read_text(encoding="utf-8").splitlines())
    assert length <= LONGEST_FILE


@files
def test_no_drawers(path):
    assert path.stem not in {"utils", "util", "common", "helpers", "misc"}
    assert "utils" not in path.parts


@files
def test_no_asserts(path):
    assert not where(path, [node for node in ast.walk(TREES[path]) if isinstance(node, ast.Assert)])


def devices_named(tree, forbidden):
    """The nodes of a file that name a device or what is one platform's own; docstrings may."""
    text = docstrings(tree)
    for node in ast.walk(tree):
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in text:
            if node.value.split(":")[0].split(".")[0] in forbidden:
                yield node
        elif isinstance(node, ast.Attribute):
            # torch.cuda, torch.backends.cuda, tensor.cuda(), tensor.is_cuda
            if node.attr.removeprefix("is_") in DEVICES:
                yield node
        elif isinstance(node, ast.Import | ast.ImportFrom):
            parts = [part for alias in node.names for part in alias.name.split(".")]
            if {*parts, *(getattr(node, "module", None) or "").split(".")} & DEVICES:
                yield node


@files
def test_only_backends_name_devices(path):
    if unit(path) == "backends":
        return
    forbidden = DEVICES if unit(path) in NAMES_THE_HOST else DEVICES | {"cpu"}
    assert not where(path, devices_named(TREES[path], forbidden))


@pytest.mark.parametrize(
    "code",
    [
        "torch.cuda.synchronize()",
        "tensor.cuda()",
        "tensor.is_mps",
        "torch.backends.cudnn.benchmark = True",
        "device.type == 'npu'",
        "torch.device('cuda:1')",
        "f'cuda:{rank}'",
        "torch.empty(1, device='cpu')",
        "getattr(torch, 'xpu')",
        "import torch_npu",
        "from torch.cuda import graphs",
        "from torch import cuda",
        "importlib.import_module('habana_frameworks.torch')",
        "torch.compile(f, backend='openxla')",
        "dist.init_process_group('nccl')",
    ],
)
def test_the_search_for_names_of_devices_finds_them(code):
    assert list(devices_named(ast.parse(code), DEVICES | {"cpu"}))
    assert not list(devices_named(ast.parse(f'def f():\n    """{code}"""'), DEVICES | {"cpu"}))


@files
def test_only_the_loop_talks_and_reads_clocks(path):
    if unit(path) in TALKERS or path.stem == "__main__":
        return
    assert not {name.split(".")[0] for name in imports(path)} & CLOCKS
    spoken = [
        node
        for node in ast.walk(TREES[path])
        if (isinstance(node, ast.Name) and node.id in {"print", "input"})
        or (isinstance(node, ast.Attribute) and ast.unparse(node) in {"sys.stdout", "sys.stderr"})
    ]
    assert not where(path, spoken)


def functions(tree, name="", parent=None):
    """Every function with its name, the class it is in, and whether all of that is public."""
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            yield name, node, parent
            if isinstance(node, ast.ClassDef):
                yield from functions(node, node.name, node)


@files
def test_only_the_loop_waits_for_the_device(path):
    # What goes to the disk must be there first.
    if unit(path) in {"backends", "checkpoint"}:
        return
    for _, function, _ in functions(TREES[path]):
        if (unit(path), function.name) in WAITS:
            assert "wait" in (ast.get_docstring(function) or "")
            continue
        waiting = [
            node
            for node in ast.walk(function)
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr in SYNCHRONISING
        ]
        assert not where(path, waiting)


def public(node, parent):
    return not node.name.startswith("_") and (parent is None or not parent.name.startswith("_"))


@files
def test_public_names_have_docstrings(path):
    assert ast.get_docstring(TREES[path]), "the module has none"
    missing = [
        f"{path.relative_to(ROOT.parent)}:{node.lineno}: {node.name}"
        for _, node, parent in functions(TREES[path])
        if (public(node, parent) or (node.name == "__call__" and public(parent, None))) and not ast.get_docstring(node)
    ]
    assert not missing


def raises(function):
    """Whether a function, or one defined in it, raises something that is its own to raise."""
    return any(isinstance(node, ast.Raise) and node.exc is not None for node in ast.walk(function))


@files
def test_docstrings_say_what_is_raised(path):
    silent = []
    for _, node, parent in functions(TREES[path]):
        if isinstance(node, ast.ClassDef) or not raises(node):
            continue
        told = ast.get_docstring(node) or ""
        if node.name == "__init__":
            told = ast.get_docstring(parent) or ""
        elif node.name != "__call__" and not public(node, parent):
            continue
        if parent is not None and parent.name.startswith("_"):
            continue
        if not re.search(r"\b[Rr]aises\b", told):
            silent.append(f"{path.relative_to(ROOT.parent)}:{node.lineno}: {node.name}")
    assert not silent


@files
def test_errors_are_our_own(path):
    """Whoever catches `FtrainError` catches all that is raised on purpose; AttributeError is Python's protocol."""
    known = {node.name for node in TREES[ROOT / "errors.py"].body if isinstance(node, ast.ClassDef)}
    makers = {
        node.name
        for node in ast.walk(TREES[path])
        if isinstance(node, ast.FunctionDef) and node.returns is not None and ast.unparse(node.returns) in known
    }
    other = []
    for node in ast.walk(TREES[path]):
        if isinstance(node, ast.Raise) and node.exc is not None:
            kind = node.exc.func if isinstance(node.exc, ast.Call) else node.exc
            allowed = {*known, *makers, *RAISED.get(path.relative_to(ROOT).as_posix(), ())}
            other += [node] * (ast.unparse(kind) not in {*allowed, "AttributeError"})
    assert not where(path, other)
