"""Tables of all optimizers: one line adds an optimizer to the laws, the hard cases and the convergence tests."""

import ftrain.optim as optim

OPTIMIZERS = {
    "sgd": lambda lr=0.05, **more: optim.sgd(lr, **more),
    "momentum": lambda lr=0.05, **more: optim.sgd(lr, momentum=0.9, nesterov=True, **more),
    "dampened": lambda lr=0.05, **more: optim.sgd(lr, momentum=0.9, dampening=0.5, **more),
    "adam": lambda lr=0.05, **more: optim.adam(lr, **more),
    "amsgrad": lambda lr=0.05, **more: optim.adamw(lr, amsgrad=True, **more),
    "adamw": lambda lr=0.05, **more: optim.adamw(lr, **more),
    "nearest": lambda lr=0.05, **more: optim.adamw(lr, state_dtype="bf16", stochastic_rounding=False, **more),
    "stochastic": lambda lr=0.05, **more: optim.adamw(lr, state_dtype="bf16", **more),
    "adamw_8bit": lambda lr=0.05, **more: optim.adamw_8bit(lr, block=3, min_size=1, **more),
    "rmsprop": lambda lr=0.05, **more: optim.rmsprop(lr, **more),
    "centered": lambda lr=0.01, **more: optim.rmsprop(lr, momentum=0.9, centered=True, **more),
    "adagrad": lambda lr=0.2, **more: optim.adagrad(lr, lr_decay=1e-3, **more),
    "nadam": lambda lr=0.05, **more: optim.nadam(lr, **more),
    "radam": lambda lr=0.05, **more: optim.radam(lr, **more),
    "lion": lambda lr=0.01, **more: optim.lion(lr, **more),
    "lamb": lambda lr=0.02, **more: optim.lamb(lr, **more),
    "adafactor": lambda lr=0.05, **more: optim.adafactor(lr, **more),
    "muon": lambda lr=0.02, **more: optim.muon(lr, **{"weight_decay": 0.0, **more}),
    "schedule_free": lambda lr=0.05, **more: optim.schedule_free_adamw(lr, **more),
}
"""Name -> function of a learning rate and the options of the factory, which returns the optimizer."""

MATRICES_ONLY = {"muon"}
"""Names of the optimizers whose parameters must all be matrices."""

COMBINED = {
    "adjustable": lambda lr=0.05, **more: optim.adjustable(optim.adamw(lr, **more)),
    "scheduled_decay": lambda lr=0.05, **more: optim.adamw(
        lr, **{**more, "weight_decay": optim.schedules.linear(0.5, 1.0, 4)}
    ),
    "lookahead": lambda lr=0.05, **more: optim.lookahead(optim.adamw(lr, **more), 2),
    "centralized": lambda lr=0.05, **more: optim.chain(optim.centralize(), optim.adamw(lr, **more)),
    "signum": lambda lr=0.05, **more: optim.chain(optim.sign(), optim.sgd(lr, momentum=0.9, **more)),
    "projected": lambda lr=0.05, **more: optim.chain(optim.project(), optim.adam(lr, **more)),
    "noisy": lambda lr=0.05, **more: optim.chain(optim.noise(0.1), optim.sgd(lr, **more)),
    "nested": lambda lr=0.05, **more: optim.adjustable(
        optim.partition(
            {
                "matrices": optim.chain(optim.noise(0.1), optim.lookahead(optim.sgd(lr, momentum=0.9, **more), 3, 0.3)),
                "rest": optim.chain(optim.noise(0.1), optim.adamw(lr, **more)),
            },
            {"matrices": lambda name, leaf: leaf.ndim == 2},
        )
    ),
}
"""Name -> function like those of `OPTIMIZERS`, for optimizers that are made of others."""
