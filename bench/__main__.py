"""`python -m bench`: time training steps against what they replace, write the rows, and write the report.

The quick CPU set is the default; `--device cuda` runs the GPU set. Other libraries are optional: `bench/peers.txt`.
"""

from __future__ import annotations

import argparse
import importlib
import os
import tempfile
import time
from pathlib import Path

import torch

from bench import rows as results
from bench.registry import PEERS
from bench.report import write_report
from bench.settings import Settings

RESULTS = Path(__file__).parent / "results"
CPU = {f"C{number}": f"bench.cases.c{number}" for number in range(15)}
GPU = {f"G{number}": f"bench.gpu.g{number}" for number in range(7)}


def main(arguments: list[str] | None = None) -> int:
    """Run the bench and return the exit status: 1 if the losses of a case differ or an entrant of ftrain fails."""
    options = _parser().parse_args(arguments)
    # A smoke test measures nothing, so it uses one thread: more would wait for cores that others use.
    threads = options.threads or (1 if options.smoke else None)
    if threads:
        torch.set_num_threads(threads)
    if options.report:
        _report(options.out or RESULTS)
        return 0
    if not options.smoke:
        _limit_cores(torch.get_num_threads())
    settings = _settings(options)
    cases = _selected_cases(options)
    with tempfile.TemporaryDirectory(prefix="bench-") as scratch:
        # Tiny problems measure nothing, so their rows must not replace those of `bench/results`.
        folder = options.out or (Path(scratch) if settings.tiny else RESULTS)
        failed = _run(cases, settings, folder)
        _report(folder)
    return int(failed)


def _limit_cores(count: int) -> None:
    """Let this process and its children run on so many cores only.

    JAX starts a thread for each core, and has no setting for their number; and no entrant may have more cores than
    another.
    """
    if hasattr(os, "sched_setaffinity"):
        os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[:count])


def _run(cases: dict[str, str], settings: Settings, folder: Path) -> bool:
    """Run the cases, write their rows, and return whether one failed."""
    failed = False
    machine = results.machine(settings.torch_device)
    device = f"{machine}, tiny" if settings.tiny else machine
    for name, module in cases.items():
        start = time.perf_counter()
        rows = results.with_origin(importlib.import_module(module).run(settings), device)
        results.write(rows, folder / f"{name}.csv")
        _print(rows)
        print(f"{name}: {time.perf_counter() - start:.0f} s\n", flush=True)
        # That another library fails is a result of the bench; a failure of anything else is an error.
        failed |= any(row.metric == results.FAILED and row.variant not in PEERS for row in rows)
    return failed


def _settings(options: argparse.Namespace) -> Settings:
    smoke = options.smoke
    return Settings(
        device=options.device,
        rounds=1 if smoke else options.rounds,
        seconds=0.0 if smoke else options.seconds,
        tiny=options.tiny or smoke,
        smoke=smoke,
        full=options.full,
        # A smoke test must trace the graphs as Inductor does; to generate code for them would take minutes.
        compile_backend="aot_eager" if smoke else "inductor",
        peers=options.peers,
        deadline=time.monotonic() + 60 * options.minutes,
    )


def _selected_cases(options: argparse.Namespace) -> dict[str, str]:
    """Return the modules of the cases to run, by the names of the cases."""
    all_cases = {**CPU, **GPU}
    default = CPU if options.device == "cpu" and not options.gpu_set else GPU
    names = options.case or list(default)
    unknown = [name for name in names if name not in all_cases]
    if unknown:
        raise SystemExit(f"bench: no case {', '.join(unknown)}; there are {', '.join(all_cases)}")
    return {name: all_cases[name] for name in names}


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m bench", description=__doc__)
    parser.add_argument("--case", nargs="+", metavar="C1", help="run these cases only")
    parser.add_argument("--rounds", type=int, default=30, help="turns of each entrant")
    parser.add_argument("--seconds", type=float, default=0.05, help="about how long a turn takes")
    parser.add_argument("--device", default="cpu", help="cpu, or cuda for the GPU set")
    parser.add_argument("--gpu-set", action="store_true", help="run the GPU set on any device, to test it with --tiny")
    parser.add_argument("--threads", type=int, help="threads of torch and of the other libraries")
    parser.add_argument(
        "--peers", action=argparse.BooleanOptionalAction, default=True, help="time other libraries as well"
    )
    parser.add_argument("--tiny", action="store_true", help="use tiny problems, to test that all entrants run")
    parser.add_argument("--smoke", action="store_true", help="--tiny with one round and without Inductor's code")
    parser.add_argument(
        "--full", action="store_true", help="all entrants in the slow cases, and graphs that compile for minutes"
    )
    parser.add_argument("--minutes", type=float, default=60.0, help="start no more entrants after this time")
    parser.add_argument(
        "--out", type=Path, help="folder of the rows; default: bench/results, and with --tiny a temporary folder"
    )
    parser.add_argument("--report", action="store_true", help="measure nothing, write the report of the stored rows")
    return parser


def _print(rows: list[results.Row]) -> None:
    for row in rows:
        if row.metric == results.TIME:
            print(f"{row.question:<36}{row.variant:<42}{row.p20:>12,.1f}{row.median:>12,.1f}{row.p80:>12,.1f} us")


def _report(folder: Path) -> None:
    print(f"written to {write_report(folder)}")


if __name__ == "__main__":
    raise SystemExit(main())
