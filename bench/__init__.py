"""Benchmarks: `python -m bench` times a training step against loops by hand and against other libraries.

The words of this package:

- A *task* is what is trained: a problem (model, batch and loss) on a device in a precision.
- An *entrant* is one implementation of the training step: a loop by hand, ftrain, or another library.
- A *question* is one comparison, such as ``C2 GPT 4x128``. Its rows are stored under this name.
- A *race* times all entrants of a question: in each round, each of them makes some steps (a *turn*).
- A *row* is one result: a metric of one entrant (the *variant*) for one question.

The files, in an order in which each imports only files before it:

- `stats`, `rows`: figures and results
- `models`, `problems`, `tasks`: what is trained
- `gate`, `loops`, `data_parallel`, `ours`, `techniques`, `heads`, `evaluation`, `fitting`, `peers/`: the
  implementations
- `child_process`, `timing`, `loss_check`, `settings`, `memory`, `compiling`, `ranks`: how they are measured
- `updates`, `saving`: optimizers alone, and checkpoints alone
- `race`: one question, from preparing its entrants to its rows
- `registry`: the entrants by name
- `cases/`, `gpu/`: the questions, for a CPU and for a GPU
- `claims`, `plots`, `report`: what the rows show
- `__main__`: the command line
"""
