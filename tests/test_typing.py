"""What the types of the package say to users: errors where there are some, and nothing else."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

import ftrain as ft
from ftrain.errors import ComposeError

ROOT = Path(ft.__file__).parents[1]
CASES = Path(__file__).with_name("typing_cases.py")


def test_mypy_finds_the_errors_of_users_and_no_others():
    # With the settings and the cache of `make lint`: without a cache this takes most of a minute.
    command = [sys.executable, "-m", "mypy", str(CASES)]
    found = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    told = re.findall(r"typing_cases\.py:(\d+): error: .*\[([\w-]+)\]$", found.stdout, re.MULTILINE)
    lines = enumerate(CASES.read_text(encoding="utf-8").splitlines(), 1)
    expected = [(str(number), line.split("# E: ")[1]) for number, line in lines if "# E: " in line]
    assert told == expected, found.stdout + found.stderr


@pytest.mark.parametrize(
    "step", [lambda state, batch: (state, {}), ft.train_step(lambda p, b: p["w"], ft.optim.sgd(1))]
)
def test_a_step_and_a_state_that_are_swapped(step):
    with pytest.raises(ComposeError, match=r"fit: the step and the state are swapped; needs fit\(step, state, data\)"):
        ft.fit({"w": 0}, step, [1])
