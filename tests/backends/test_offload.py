"""Offloading from a device that is not its host."""

import json
import os
import subprocess
import sys

from tests.backends.test_private_use import ROOT, needs_route


@needs_route
def test_a_registered_device_offloads_to_its_host():
    env = {**os.environ, "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "tests.backends.offload_on_toy"]
    done = subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert len(found) == 9
    assert [name for name, agrees in found.items() if agrees is not True] == [], found
