"""The public names and the types that are shipped. A change of this file is a change for users."""

import ast
import inspect
import pydoc
import tomllib
import types
from pathlib import Path

import pytest

import ftrain as ft

ROOT = Path(ft.__file__).parent

NAMES = [
    "Anatomy",
    "Checkpoints",
    "EvalStep",
    "FitResult",
    "Gradients",
    "Hint",
    "Ladder",
    "Mean",
    "OnGrad",
    "OnLoss",
    "OnStep",
    "OnUpdate",
    "PrecisionReport",
    "SlotSpec",
    "Step",
    "Technique",
    "TrainState",
    "Trials",
    "Wrapper",
    "accumulate",
    "anatomy",
    "averaged",
    "block",
    "clip",
    "compiled",
    "compose",
    "donated",
    "ema",
    "empty_cache",
    "eval_step",
    "evaluate",
    "fit",
    "from_module",
    "hints",
    "iterate",
    "ladder",
    "lora",
    "matmul_precision",
    "offload",
    "patience",
    "plateau",
    "precision_report",
    "remat",
    "replay",
    "sam",
    "sharded",
    "skip_nonfinite",
    "skip_spikes",
    "swa",
    "sync_batch_norm",
    "to_module",
    "train_step",
    "trials",
    "tune",
    "update_in_backward",
    "with_amp",
    "wrapper",
]

MODULES = {
    "adapters": ["like", "load", "lora", "merge", "save", "unmerge"],
    "backends": [
        "Backend",
        "Copier",
        "Memory",
        "Recorder",
        "default",
        "get",
        "names",
        "of",
        "private_use",
        "register",
        "require_current",
        "resolve",
        "widest",
    ],
    "checkpoint": ["Checkpoints", "load", "save", "verify"],
    "data": [
        "Loader",
        "TokenDocuments",
        "TokenFile",
        "TokenWriter",
        "arrays",
        "block_mask",
        "loader",
        "pack",
        "packed",
        "pad",
        "padding",
        "position",
        "prefetch",
        "seek",
        "shuffled",
        "write_tokens",
    ],
    "errors": [
        "BatchError",
        "CheckpointError",
        "ComposeError",
        "ConsumedError",
        "DataError",
        "DeviceError",
        "FtrainError",
        "Interrupted",
        "LossError",
        "NonFiniteError",
        "OptionError",
        "RankError",
        "StructureError",
        "TraceError",
        "UnreachableError",
        "VersionError",
    ],
    "loggers": ["Logger", "Record", "jsonl"],
    "losses": ["accuracy", "binary_cross_entropy", "cross_entropy", "linear_cross_entropy", "mse"],
    "optim": [
        "GradientTransform",
        "adafactor",
        "adagrad",
        "adam",
        "adamw",
        "adamw_8bit",
        "adjust",
        "adjustable",
        "centralize",
        "chain",
        "everything",
        "lamb",
        "lion",
        "lookahead",
        "matrices",
        "muon",
        "nadam",
        "noise",
        "partition",
        "project",
        "radam",
        "rmsprop",
        "schedule_free_adamw",
        "schedule_free_params",
        "sgd",
        "sign",
    ],
    "parallel": ["divided", "mesh", "powersgd", "sign", "whole"],
    "random": [
        "bernoulli",
        "bits",
        "dropout",
        "exponential",
        "fold_in",
        "for_examples",
        "key",
        "normal",
        "permutation",
        "randint",
        "split",
        "uniform",
    ],
    "schedules": [
        "Plateau",
        "ahead",
        "as_schedule",
        "chain",
        "constant",
        "cosine",
        "cosine_restarts",
        "describe",
        "exponential",
        "inverse_sqrt",
        "linear",
        "named",
        "one_cycle",
        "piecewise",
        "plot",
        "polynomial",
        "reduce_on_plateau",
        "scale",
        "step_decay",
        "warmup_constant",
        "warmup_cosine",
        "warmup_cosine_restarts",
        "warmup_inverse_sqrt",
        "warmup_linear",
        "warmup_polynomial",
        "warmup_stable_decay",
    ],
    "tree": [
        "HOST",
        "MAX_LISTED",
        "add",
        "all_finite",
        "batch_length",
        "cast",
        "clone",
        "describe",
        "device_of",
        "flatten",
        "global_norm",
        "is_blank",
        "is_tensor",
        "leaf_names",
        "leaves",
        "map",
        "map_named",
        "norm_of",
        "overlay",
        "path",
        "require_same",
        "scale",
        "scale_leaves",
        "scale_leaves_",
        "signature",
        "split",
        "take",
        "to",
        "unflatten",
        "where",
    ],
}

# Modules that are not in `ft.__all__`: authors of wrappers, optimizers and backends import from them.
INNER = {
    "types": [
        "Adapters",
        "Core",
        "DERIVED",
        "GradFn",
        "Gradients",
        "Hyper",
        "Loss",
        "LossFn",
        "LossOutput",
        "LossRanks",
        "Mean",
        "Metrics",
        "NAMESPACE",
        "Optimizer",
        "PyTree",
        "RNG",
        "Runner",
        "STATIC",
        "Schedule",
        "T",
        "TREE_CLASSES",
        "TrainState",
        "UpdateFn",
        "consume",
        "is_donatable",
        "mark_donatable",
        "replace",
        "tree_class",
        "tree_tag",
    ],
}


def defined(path):
    """Return the public names that a file defines or re-exports (`import a as a`), sorted."""
    names = set()
    for node in ast.parse(path.read_text(encoding="utf-8")).body:
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            names.add(node.name)
        elif isinstance(node, ast.Assign):
            names |= {target.id for target in node.targets if isinstance(target, ast.Name)}
        elif isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
            names.add(node.target.id)
        elif isinstance(node, ast.ImportFrom):
            names |= {alias.asname for alias in node.names if alias.asname == alias.name}
    return sorted(name for name in names if not name.startswith("_"))


def test_public_names():
    assert {*ft.__all__} == {*NAMES, *MODULES, "__version__"}
    # `vars` lacks the names that are imported when they are first used.
    public = {name: getattr(ft, name) for name in {*vars(ft), *ft._IMPORTED_WHEN_USED} if not name.startswith("_")}
    assert sorted(name for name, value in public.items() if not isinstance(value, types.ModuleType)) == NAMES
    # A function that is exported under the name of a module would hide the module.
    assert all(isinstance(public[name], types.ModuleType) for name in MODULES)


def test_dir_has_public_names_only():
    assert dir(ft) == sorted(ft.__all__) == sorted([*NAMES, *MODULES, "__version__"])


@pytest.mark.parametrize("name", MODULES)
def test_modules_list_their_names_and_help_shows_them(name):
    module = getattr(ft, name)
    assert MODULES[name] == sorted(MODULES[name])
    if module.__name__ == f"ftrain.{name}" or hasattr(module, "__all__"):
        assert sorted(module.__all__) == MODULES[name]
    else:
        assert defined(Path(module.__file__)) == MODULES[name]
    functions = [member for member in MODULES[name] if inspect.isfunction(getattr(module, member))]
    help_text = pydoc.plaintext.document(module)
    assert [function for function in functions if f"\n    {function}(" not in help_text] == []


def test_no_function_has_the_name_of_a_file_or_folder_beside_it():
    """An import of that module would replace the function in the package."""
    assert [name for name in NAMES if (ROOT / name).is_dir() or (ROOT / f"{name}.py").is_file()] == []


@pytest.mark.parametrize("name", INNER)
def test_names_of_inner_modules(name):
    assert defined(ROOT / f"{name}.py") == INNER[name]


def test_a_fit_result_unpacks_to_state_and_history():
    assert ft.FitResult._fields == ("state", "history")


def test_types_are_shipped():
    assert (ROOT / "py.typed").is_file()
    project = tomllib.loads((ROOT.parent / "pyproject.toml").read_text(encoding="utf-8"))
    assert "py.typed" in project["tool"]["setuptools"]["package-data"]["ftrain"]
    assert "version" in project["project"]["dynamic"]
    assert project["tool"]["setuptools"]["dynamic"]["version"] == {"attr": "ftrain._version.__version__"}
