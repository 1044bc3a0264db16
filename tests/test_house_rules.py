"""The rules of the house, read from the source."""

import ast
import re

import pytest

from tests.source import FILES, ROOT, imports, label, offenders, tree_of, unit, where

LONGEST_FILE = 400
# Profiling measures rates and times; the others talk to whoever runs the training.
TALKERS = {"profiling", "training"}
TALKING_FILES = {"transforms/compile/log_if_slow.py"}
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
    ("data/device_prefetch.py", "_copy"),
    ("data/worker_messages.py", "_to_bytes"),
    ("optim/elementwise.py", "_as_float"),
    ("parallel/same_step.py", "first_difference"),
    ("parallel/same_step.py", "_warn_of_same_rows"),
    ("parallel/same_loss.py", "_unused_by_all"),
    ("parallel/same_loss.py", "require_same_block"),
    ("profiling/anatomy/measured.py", "measure"),
    ("random/host_keys.py", "key_data"),
    ("step/microbatch.py", "difference"),
    ("training/history.py", "_values"),
    ("training/metrics.py", "_collect"),
    ("training/metrics.py", "read_metrics"),
    ("transforms/compile/capture.py", "_identity"),
}

# What a file raises that is not our own: errors of the system, to those who make ours of them.
RAISED = {
    "checkpoint/files.py": {"OSError", "BlockingIOError"},
    "checkpoint/ranks.py": {"error"},
    "data/device_prefetch.py": {"failure"},
    "data/loader.py": {"batch.error"},
    "parallel/agreement.py": {"error"},
    "parallel/stand_in.py": {"OutOfMemoryOnRankError"},
    "step/across_ranks.py": {"error"},
    "training/fit.py": {"interrupted"},
    "training/oom_retry.py": {"Abandoned", "OutOfMemoryOnRankError", "StateOverwrittenError"},
    "training/progress.py": {"error"},
    "training/signals.py": {"Abandoned"},
    "transforms/compile/evaluation.py": {"cause"},
    "transforms/compile/fallback.py": {"CompilerError"},
    "transforms/compile/wrapper.py": {"cause"},
    "transforms/remat/checkpoint.py": {"_Stopped"},
}


def docstrings(tree):
    """The nodes that are text for people: docstrings, and strings that stand alone below a constant."""
    return {
        id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)
    }


def test_files_are_short():
    assert not [label(path) for path in FILES if len(path.read_text(encoding="utf-8").splitlines()) > LONGEST_FILE]


def test_no_drawers():
    assert not [path for path in FILES if {"utils", "util", "common", "helpers", "misc"} & {path.stem, *path.parts}]


def test_warnings_point_at_the_users_call():
    def elsewhere(path):
        calls = (node for node in ast.walk(tree_of(path)) if isinstance(node, ast.Attribute))
        return where(path, (node for node in calls if ast.unparse(node) == "warnings.warn"))

    # That of torch's version is told at the import.
    assert not offenders(elsewhere, leaving_out={"_torch"})


def test_no_asserts():
    assert not offenders(
        lambda path: where(path, (node for node in ast.walk(tree_of(path)) if isinstance(node, ast.Assert)))
    )


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


def test_only_backends_name_devices():
    def named(path):
        forbidden = DEVICES if unit(path) in NAMES_THE_HOST else DEVICES | {"cpu"}
        return where(path, devices_named(tree_of(path), forbidden))

    assert not offenders(named, leaving_out={"backends"})


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


def test_only_training_and_profiling_talk_and_read_clocks():
    def talking(path):
        if label(path) in TALKING_FILES or path.stem == "__main__":
            return []
        # A timedelta is a length of time and reads no clock.
        clocks = {name.split(".")[0] for name in imports(path) if name != "datetime.timedelta"} & CLOCKS
        spoken = [
            node
            for node in ast.walk(tree_of(path))
            if (isinstance(node, ast.Name) and node.id in {"print", "input"})
            or (isinstance(node, ast.Attribute) and ast.unparse(node) in {"sys.stdout", "sys.stderr"})
        ]
        return [*(f"{label(path)} imports {clock}" for clock in clocks), *where(path, spoken)]

    assert not offenders(talking, leaving_out=TALKERS)


def functions(tree, name="", parent=None):
    """Every function with its name, the class it is in, and whether all of that is public."""
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            yield name, node, parent
            if isinstance(node, ast.ClassDef):
                yield from functions(node, node.name, node)


def test_what_waits_for_the_device_says_so():
    unseen = set(WAITS)

    def waiting(path):
        for _, function, _ in functions(tree_of(path)):
            calls = [
                node
                for node in ast.walk(function)
                if isinstance(node, ast.Call)
                and isinstance(node.func, ast.Attribute)
                and node.func.attr in SYNCHRONISING
            ]
            if (label(path), function.name) in WAITS:
                unseen.discard((label(path), function.name))
                assert calls, f"{label(path)}: {function.name} does not wait"
                assert "wait" in (ast.get_docstring(function) or "")
            else:
                yield from where(path, calls)

    # What goes to the disk must be there first.
    assert not offenders(waiting, leaving_out={"backends", "checkpoint"})
    assert not unseen


def public(node, parent):
    return not node.name.startswith("_") and (parent is None or not parent.name.startswith("_"))


def test_public_names_have_docstrings():
    def missing(path):
        assert ast.get_docstring(tree_of(path)), f"{path} has none"
        return [
            f"ftrain/{label(path)}:{node.lineno}: {node.name}"
            for _, node, parent in functions(tree_of(path))
            if (public(node, parent) or (node.name == "__call__" and public(parent, None)))
            and not ast.get_docstring(node)
        ]

    assert not offenders(missing)


def raises(function):
    """Whether a function, or one defined in it, raises something that is its own to raise."""
    return any(isinstance(node, ast.Raise) and node.exc is not None for node in ast.walk(function))


def test_docstrings_say_what_is_raised():
    def silent(path):
        for _, node, parent in functions(tree_of(path)):
            if (
                isinstance(node, ast.ClassDef)
                or not raises(node)
                or (parent is not None and parent.name.startswith("_"))
            ):
                continue
            text = ast.get_docstring(node) or ""
            if node.name == "__init__":
                text = ast.get_docstring(parent) or ""
            elif node.name != "__call__" and not public(node, parent):
                continue
            if not re.search(r"\b[Rr]aises\b", text):
                yield f"ftrain/{label(path)}:{node.lineno}: {node.name}"

    assert not offenders(silent)


def test_errors_are_our_own():
    """Whoever catches `FtrainError` catches all that is raised on purpose; AttributeError is Python's protocol."""
    known = {node.name for node in tree_of(ROOT / "errors.py").body if isinstance(node, ast.ClassDef)} | {
        "AttributeError"
    }

    def other(path):
        makers = {
            node.name
            for node in ast.walk(tree_of(path))
            if isinstance(node, ast.FunctionDef) and node.returns is not None and ast.unparse(node.returns) in known
        }
        allowed = {*known, *makers, *RAISED.get(label(path), ())}
        for node in ast.walk(tree_of(path)):
            if isinstance(node, ast.Raise) and node.exc is not None:
                kind = node.exc.func if isinstance(node.exc, ast.Call) else node.exc
                if ast.unparse(kind) not in allowed:
                    yield from where(path, [node])

    assert not offenders(other)
