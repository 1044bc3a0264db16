"""Benchmarks: `python -m bench` measures a step beside the loops and the libraries that it replaces.

Top to bottom, each file uses only those above it: `stats`, `rows`, `models`, `problems`, `tasks` (what is trained);
`loops`, `ours`, `peers/` (who trains it); `gate`, `apart`, `timing`, `same`, `memory`, `compiling` (how it is
measured); `race` (one question from start to end); `cases/` and `gpu/` (the questions); `claims`, `plots`, `report`.
"""
