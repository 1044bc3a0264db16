"""Benchmarks: `python -m bench` measures a step beside the loops and the libraries that it replaces.

From bottom to top, each file uses only those before it: `stats`, `rows` (figures); `models`, `problems`, `tasks` (what
is trained); `gate`, `loops`, `data_parallel`, `ours`, `techniques`, `heads`, `fitting`, `peers/` (who trains it);
`child_process`, `timing`, `same`, `settings`, `memory`, `compiling`, `ranks` (how it is measured); `updates`, `saving`
(optimizers and checkpoints alone); `race` (one question from start to end); `field` (who races); `cases/` and `gpu/`
(the questions); `claims`, `plots`, `report`; `__main__`.
"""
