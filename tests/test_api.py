"""The public names and signatures. A change of this file is a change for users."""

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


class FunctionName:
    """The default of a parameter that is a function: its repr is the name of the function."""

    def __init__(self, name):
        self.name = name

    def __repr__(self):
        return self.name


def signature_text(function):
    """Return the text of a signature without its annotations."""
    signature = inspect.signature(function)
    parameters = []
    for parameter in signature.parameters.values():
        default = parameter.default
        if inspect.isfunction(default):
            default = FunctionName(default.__name__)
        parameters.append(parameter.replace(annotation=parameter.empty, default=default))
    return str(signature.replace(parameters=parameters, return_annotation=signature.empty))


SIGNATURES = {
    "train_step": "(loss_fn, optimizer, *, trainable=None, allow_unused=False)",
    "eval_step": "(loss_fn)",
    "compose": "(step, *wrappers)",
    "from_module": "(module, criterion=None)",
    "to_module": "(module, state)",
    "Step.init": "(self, params=None, *, buffers=None, seed=0, device=None, donate=False)",
    "Step.__call__": "(self, state, batch)",
    "EvalStep.__call__": "(self, state, batch)",
    "evaluate": "(step, state, data, *, dtype=None, on_oom='raise')",
    "iterate": "(step, state, data, *, steps=None, epochs=None, position=None)",
    "with_amp": "(dtype='auto', *, watch=False)",
    "remat": "(policy='full', blocks=None, *, budget=None)",
    "matmul_precision": "(precision)",
    "precision_report": "(metrics)",
    "accumulate": "(n)",
    "clip": "(max_norm=1.0, *, value=None)",
    "ema": "(decay=0.999)",
    "empty_cache": "(every)",
    "averaged": "(state, kind=None)",
    "swa": "(start=0, every=1)",
    "sync_batch_norm": "()",
    "sam": "(rho=0.05)",
    "skip_nonfinite": "(limit=10)",
    "skip_spikes": "(factor=3.0, *, quantile=0.5, window=128, warmup=32, action='skip')",
    "lora": "(rank, alpha=None, *, targets, dropout=0.0, dora=False, rslora=False)",
    "adapters.merge": "(step, state)",
    "adapters.unmerge": "(step, merged)",
    "adapters.save": "(directory, step, state, *, base_model=None, task_type=None)",
    "adapters.load": "(directory, step, state, *, any_base=False)",
    "adapters.like": "(directory)",
    "donated": "()",
    "hints": "(step, state, batch, *, data=None)",
    "tune": "(step, state, batch, *, memory=None, rounds=5, mesh=None)",
    "trials": "(step, state, batch, *, memory=None, rounds=5, mesh=None)",
    "update_in_backward": "()",
    "offload": "(what, *, directory=None, min_bytes=65536)",
    "block": "(function)",
    "optim.adafactor": (
        "(lr=0.01, *, beta2_decay=-0.8, eps=(None, 0.001), d=1.0, weight_decay=0.0, maximize=False, "
        "decay_mask=everything)"
    ),
    "optim.adagrad": (
        "(lr, *, lr_decay=0.0, weight_decay=0.0, initial_accumulator_value=0.0, eps=1e-10, maximize=False, "
        "decay_mask=everything)"
    ),
    "optim.adam": (
        "(lr, *, b1=0.9, b2=0.999, eps=1e-08, weight_decay=0.0, amsgrad=False, maximize=False, state_dtype=None, "
        "stochastic_rounding=None, decay_mask=everything)"
    ),
    "optim.adamw": (
        "(lr, *, b1=0.9, b2=0.999, eps=1e-08, weight_decay=0.0, amsgrad=False, maximize=False, state_dtype=None, "
        "stochastic_rounding=None, decay_mask=matrices)"
    ),
    "optim.adamw_8bit": (
        "(lr, *, b1=0.9, b2=0.999, eps=1e-08, weight_decay=0.0, block=256, min_size=4096, "
        "stochastic_rounding=False, decay_mask=matrices)"
    ),
    "optim.lamb": "(lr, *, b1=0.9, b2=0.999, eps=1e-06, weight_decay=0.0, decay_mask=matrices)",
    "optim.lion": (
        "(lr, *, b1=0.9, b2=0.99, weight_decay=0.0, state_dtype=None, stochastic_rounding=None, decay_mask=matrices)"
    ),
    "optim.muon": (
        "(lr, *, momentum=0.95, nesterov=True, weight_decay=0.1, ns_coefficients=(3.4445, -4.775, 2.0315), "
        "ns_steps=5, eps=1e-07, adjust_lr_fn='original', decay_mask=everything)"
    ),
    "optim.nadam": (
        "(lr, *, b1=0.9, b2=0.999, eps=1e-08, weight_decay=0.0, momentum_decay=0.004, "
        "decoupled_weight_decay=False, maximize=False, decay_mask=everything)"
    ),
    "optim.partition": "(optimizers, label_fn)",
    "optim.adjust": "(state, factors)",
    "optim.adjustable": "(optimizer)",
    "optim.chain": "(*parts)",
    "optim.centralize": "(mask=matrices)",
    "optim.noise": "(stddev, mask=everything)",
    "optim.sign": "(mask=everything)",
    "optim.project": "(mask=matrices)",
    "optim.lookahead": "(optimizer, k=5, alpha=0.5)",
    "schedules.reduce_on_plateau": (
        "(value=1.0, *, factor=0.1, patience=10, mode='min', threshold=0.0001, threshold_mode='rel', cooldown=0, "
        "end=0.0, eps=1e-08)"
    ),
    "optim.radam": (
        "(lr, *, b1=0.9, b2=0.999, eps=1e-08, weight_decay=0.0, decoupled_weight_decay=False, maximize=False, "
        "decay_mask=everything)"
    ),
    "optim.rmsprop": (
        "(lr, *, alpha=0.99, eps=1e-08, weight_decay=0.0, momentum=0.0, centered=False, maximize=False, "
        "decay_mask=everything)"
    ),
    "optim.schedule_free_adamw": "(lr, *, b1=0.9, b2=0.999, eps=1e-08, weight_decay=0.0, decay_mask=matrices)",
    "optim.schedule_free_params": "(params, opt_state)",
    "optim.sgd": (
        "(lr, *, momentum=0.0, dampening=0.0, nesterov=False, weight_decay=0.0, maximize=False, state_dtype=None, "
        "stochastic_rounding=None, decay_mask=everything)"
    ),
    "schedules.constant": "(value)",
    "schedules.linear": "(start, end, steps)",
    "schedules.cosine": "(peak, total, end=0.0, waves=0.5)",
    "schedules.polynomial": "(peak, total, end=0.0, power=1.0)",
    "schedules.cosine_restarts": "(peak, total, cycles, end=0.0)",
    "schedules.inverse_sqrt": "(peak, timescale=10000)",
    "schedules.step_decay": "(value, every, factor=0.1)",
    "schedules.exponential": "(value, factor, steps=1)",
    "schedules.piecewise": "(points, between='constant')",
    "schedules.one_cycle": "(peak, total, *, rise=0.3, start=None, end=None, shape='cosine', three_phase=False)",
    "schedules.warmup_cosine": "(peak, warmup, total, end=0.0, waves=0.5)",
    "schedules.warmup_linear": "(peak, warmup, total, end=0.0)",
    "schedules.warmup_stable_decay": (
        "(peak, warmup, total, decay, end=0.0, *, start=0.0, warmup_shape='linear', decay_shape='cosine')"
    ),
    "schedules.chain": "(schedules, boundaries)",
    "schedules.scale": "(schedule, factor)",
    "schedules.named": "(name, peak, warmup=0, total=None, **options)",
    "schedules.plot": "(schedules, steps, path=None, *, log=False, title=None)",
    "losses.cross_entropy": "(logits, labels, *, ignore_index=-100, label_smoothing=0.0, weight=None)",
    "losses.linear_cross_entropy": (
        "(hidden, weight, labels, *, bias=None, ignore_index=-100, label_smoothing=0.0, class_weight=None, chunk=None)"
    ),
    "data.prefetch": "(data, device, depth=2)",
    "data.position": "(data)",
    "data.seek": "(data, position)",
    "data.shuffled": "(index, size, *, seed=0, epoch=0)",
    "data.arrays": "(data)",
    "data.pad": "(*, values=None, length=None, multiple=1, side='right', fields=None, mask=None, cut=False)",
    "data.padding": "(batch)",
    "data.pack": "(documents, length, *, rows=None, pad=0, field='tokens', cut=False)",
    "data.packed": "(length, *, rows=None, pad=0, field='tokens', cut=False)",
    "data.block_mask": "(documents)",
    "random.key": "(seed)",
    "random.split": "(key, num=2)",
    "random.fold_in": "(key, data)",
    "random.for_examples": "(key, start, length)",
    "random.normal": "(key, shape, *, dtype=torch.float32)",
    "random.uniform": "(key, shape, *, dtype=torch.float32, low=0.0, high=1.0)",
    "random.bernoulli": "(key, p, shape)",
    "random.dropout": "(key, x, p)",
}

# Signatures to which parameters may be added: they begin like this.
SIGNATURE_STARTS = {
    "Checkpoints.__init__": "(self, directory, *, every, keep=3, best=None, mode='min', async_=True, texts=None)",
    "anatomy": "(step, state, batch, *, measure=True",
    "ladder": "(step, state, batch, *, data=None, techniques=None, stacked=True, throughput=None, rounds=9)",
    "plateau": "(name, rule, factors='*lr')",
    "patience": "(name, count=3, *, mode='min', min_delta=0.0)",
    "replay": "(step, state, data, checkpoints, *, at)",
    "data.loader": (
        "(dataset, batch_size, *, seed=0, shuffle=True, num_workers=0, collate=None, drop_last=True, rank=0, "
        "num_ranks=1"
    ),
    "fit": "(step, state, data, *, steps=None, epochs=None, evaluate=None",
    "compiled": "(*, lowering='auto', donate=False",
}


def look_up(name):
    value = ft
    for part in name.split("."):
        value = getattr(value, part)
    return value


@pytest.mark.parametrize("name", SIGNATURES)
def test_signatures(name):
    assert signature_text(look_up(name)) == SIGNATURES[name]


@pytest.mark.parametrize("name", SIGNATURE_STARTS)
def test_signatures_to_which_parameters_may_be_added(name):
    assert signature_text(look_up(name)).startswith(SIGNATURE_STARTS[name])


def test_clip_without_a_number_is_a_norm_of_one():
    assert ft.clip().text == "clip(norm<=1)"


def test_a_fit_result_unpacks_to_state_and_history():
    assert ft.FitResult._fields == ("state", "history")


def test_types_are_shipped():
    assert (ROOT / "py.typed").is_file()
    project = tomllib.loads((ROOT.parent / "pyproject.toml").read_text(encoding="utf-8"))
    assert "py.typed" in project["tool"]["setuptools"]["package-data"]["ftrain"]
    assert "version" in project["project"]["dynamic"]
    assert project["tool"]["setuptools"]["dynamic"]["version"] == {"attr": "ftrain._version.__version__"}


@pytest.mark.parametrize("name", [*SIGNATURES, *SIGNATURE_STARTS])
def test_public_functions_are_annotated(name):
    function = inspect.unwrap(look_up(name))
    missing = [name for name in inspect.signature(function).parameters if name not in function.__annotations__]
    assert missing in ([], ["self"])
    assert "return" in function.__annotations__
