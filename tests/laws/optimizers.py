"""Every optimizer, in one table: a line here puts it into the laws, the hard cases and the convergence suite."""

import ftrain.optim as optim

OPTIMIZERS = {
    "sgd": lambda lr=0.05, **more: optim.sgd(lr, **more),
    "momentum": lambda lr=0.05, **more: optim.sgd(lr, momentum=0.9, nesterov=True, **more),
    "dampened": lambda lr=0.05, **more: optim.sgd(lr, momentum=0.9, dampening=0.5, **more),
    "adam": lambda lr=0.05, **more: optim.adam(lr, **more),
    "amsgrad": lambda lr=0.05, **more: optim.adamw(lr, amsgrad=True, **more),
    "adamw": lambda lr=0.05, **more: optim.adamw(lr, **more),
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
"""Name -> factory; takes a rate, and the options of the factory."""

MATRICES_ONLY = {"muon"}
"""What takes matrices alone."""
