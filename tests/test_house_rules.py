"""The rules of the house, read from the source."""

import ast
import re

import pytest

from tests.source import FILES, ROOT, imports, label, layer, lines_of, tree_of, violations

LONGEST_FILE = 400
# Layers and files that may print and read clocks: profiling measures times, training reports progress.
LAYERS_THAT_PRINT = {"profiling", "training"}
FILES_THAT_PRINT = {"transforms/compile/log_if_slow.py"}
CLOCKS = {"time", "datetime"}
DEVICES = {"cuda", "xpu", "mps", "hpu", "npu", "mlu", "musa", "xla", "mtia", "hip", "ipu", "vulkan", "privateuseone"}
# Packages, libraries, compilers and collectives of one platform.
DEVICES |= {"rocm", "tpu", "cudnn", "mkldnn", "mudnn", "torch_npu", "torch_mlu", "torch_musa", "torch_xla"}
DEVICES |= {"habana_frameworks", "hpu_backend", "openxla", "nccl", "gloo", "xccl", "hccl", "cncl", "mccl"}
# These layers may name the CPU: keys are on the host, and so is a tree without tensors.
NAMES_THE_HOST = {"tree", "random"}
SYNCHRONISING = {"item", "tolist", "numpy", "cpu", "synchronize"}
# The functions (file, name) that wait for the device, and say so in their docstrings.
WAITS = {
    ("data/device_prefetch.py", "_copy"),
    ("data/worker_messages.py", "_to_bytes"),
    ("optim/leafwise.py", "_as_float"),
    ("parallel/same_step.py", "first_difference"),
    ("parallel/same_step.py", "_warn_of_same_rows"),
    ("parallel/same_loss.py", "_unused_by_all"),
    ("parallel/same_loss.py", "require_same_block"),
    ("profiling/anatomy/measured.py", "measure"),
    ("random/host_keys.py", "key_data"),
    ("step/microbatch.py", "difference"),
    ("step/evaluate.py", "_read"),
    ("training/history.py", "_values"),
    ("training/metrics.py", "_collect"),
    ("training/metrics.py", "read_metrics"),
    ("transforms/compile/capture.py", "_identity"),
}

# What else a file raises: exceptions that it has caught or received, and those that another file of ours catches.
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
    """Return the ids of the nodes that are docstrings, also of constants: a string that is a statement."""
    statements = [node for node in ast.walk(tree) if isinstance(node, ast.Expr)]
    return {id(node.value) for node in statements if isinstance(node.value, ast.Constant)}


def test_files_are_short():
    assert not [label(path) for path in FILES if len(path.read_text(encoding="utf-8").splitlines()) > LONGEST_FILE]


def test_no_file_or_folder_is_called_utils():
    assert not [path for path in FILES if {"utils", "util", "common", "helpers", "misc"} & {path.stem, *path.parts}]


def test_warnings_point_at_the_users_call():
    def uses_of_warnings_warn(path):
        attributes = (node for node in ast.walk(tree_of(path)) if isinstance(node, ast.Attribute))
        return lines_of(path, (node for node in attributes if ast.unparse(node) == "warnings.warn"))

    # `_torch` warns of the version of torch while it is imported, which is no call of a user.
    assert not violations(uses_of_warnings_warn, except_in={"_torch"})


def test_no_asserts():
    def asserts(path):
        return lines_of(path, (node for node in ast.walk(tree_of(path)) if isinstance(node, ast.Assert)))

    assert not violations(asserts)


def devices_named(tree, forbidden):
    """Yield the nodes of a file, except docstrings, that name a device or a package of one platform."""
    docs = docstrings(tree)
    for node in ast.walk(tree):
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in docs:
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
        forbidden = DEVICES if layer(path) in NAMES_THE_HOST else DEVICES | {"cpu"}
        return lines_of(path, devices_named(tree_of(path), forbidden))

    assert not violations(named, except_in={"backends"})


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


def test_only_training_and_profiling_print_and_read_clocks():
    def prints_and_clocks(path):
        if label(path) in FILES_THAT_PRINT or path.stem == "__main__":
            return []
        # A timedelta is a length of time and reads no clock.
        clocks = {name.split(".")[0] for name in imports(path) if name != "datetime.timedelta"} & CLOCKS
        prints = [
            node
            for node in ast.walk(tree_of(path))
            if (isinstance(node, ast.Name) and node.id in {"print", "input"})
            or (isinstance(node, ast.Attribute) and ast.unparse(node) in {"sys.stdout", "sys.stderr"})
        ]
        return [*(f"{label(path)} imports {clock}" for clock in clocks), *lines_of(path, prints)]

    assert not violations(prints_and_clocks, except_in=LAYERS_THAT_PRINT)


def definitions(tree, parent=None):
    """Yield each function and class, and the class that defines it or None; not those defined within functions."""
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            yield node, parent
            if isinstance(node, ast.ClassDef):
                yield from definitions(node, node)


def test_functions_that_wait_for_the_device_say_so():
    unseen = set(WAITS)

    def waiting(path):
        for function, _ in definitions(tree_of(path)):
            calls = [node for node in ast.walk(function) if isinstance(node, ast.Call)]
            methods = [node for node in calls if isinstance(node.func, ast.Attribute)]
            synchronising = [node for node in methods if node.func.attr in SYNCHRONISING]
            if (label(path), function.name) in WAITS:
                unseen.discard((label(path), function.name))
                assert synchronising, f"{label(path)}: {function.name} does not wait"
                assert "wait" in (ast.get_docstring(function) or "")
            else:
                yield from lines_of(path, synchronising)

    # A checkpoint must be on the host before it can be written to a disk.
    assert not violations(waiting, except_in={"backends", "checkpoint"})
    assert not unseen


def public(node, parent):
    return not node.name.startswith("_") and (parent is None or not parent.name.startswith("_"))


def test_public_names_have_docstrings():
    def missing(path):
        assert ast.get_docstring(tree_of(path)), f"{path} has none"
        return [
            f"ftrain/{label(path)}:{node.lineno}: {node.name}"
            for node, parent in definitions(tree_of(path))
            if (public(node, parent) or (node.name == "__call__" and public(parent, None)))
            and not ast.get_docstring(node)
        ]

    assert not violations(missing)


def raises(function):
    """Return whether a function, or one defined in it, raises a new exception; a bare `raise` does not count."""
    return any(isinstance(node, ast.Raise) and node.exc is not None for node in ast.walk(function))


def test_docstrings_say_what_is_raised():
    def silent(path):
        for node, parent in definitions(tree_of(path)):
            in_private_class = parent is not None and parent.name.startswith("_")
            if isinstance(node, ast.ClassDef) or in_private_class or not raises(node):
                continue
            text = ast.get_docstring(node) or ""
            if node.name == "__init__":
                text = ast.get_docstring(parent) or ""
            elif node.name != "__call__" and not public(node, parent):
                continue
            if not re.search(r"\b[Rr]aises\b", text):
                yield f"ftrain/{label(path)}:{node.lineno}: {node.name}"

    assert not violations(silent)


def test_errors_are_our_own():
    """`except FtrainError` catches every error of ftrain but AttributeError, which `hasattr` and `getattr` need."""
    known = {node.name for node in tree_of(ROOT / "errors.py").body if isinstance(node, ast.ClassDef)}
    known.add("AttributeError")

    def other(path):
        factories = {
            node.name
            for node in ast.walk(tree_of(path))
            if isinstance(node, ast.FunctionDef) and node.returns is not None and ast.unparse(node.returns) in known
        }
        allowed = {*known, *factories, *RAISED.get(label(path), ())}
        for node in ast.walk(tree_of(path)):
            if isinstance(node, ast.Raise) and node.exc is not None:
                exception = node.exc.func if isinstance(node.exc, ast.Call) else node.exc
                if ast.unparse(exception) not in allowed:
                    yield from lines_of(path, [node])

    assert not violations(other)
