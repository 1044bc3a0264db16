"""The signatures of public functions. A change of this file is a change for users."""

import inspect

import pytest

import ftrain as ft


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


@pytest.mark.parametrize("name", [*SIGNATURES, *SIGNATURE_STARTS])
def test_public_functions_are_annotated(name):
    function = inspect.unwrap(look_up(name))
    missing = [name for name in inspect.signature(function).parameters if name not in function.__annotations__]
    assert missing in ([], ["self"])
    assert "return" in function.__annotations__
