"""The fixture of a directory in memory."""

import tempfile
from pathlib import Path

import pytest

# A file system in memory, where syncing is free. The tests need no disk that keeps its content.
IN_MEMORY = Path("/dev/shm")


@pytest.fixture
def ram_path(tmp_path):
    """A new directory in memory, if the machine has a file system there; otherwise on the disk."""
    if not IN_MEMORY.is_dir():
        yield tmp_path
        return
    with tempfile.TemporaryDirectory(dir=IN_MEMORY, prefix="ftrain-faults-") as name:
        yield Path(name)
