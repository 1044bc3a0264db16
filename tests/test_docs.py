"""Every Python block of the documentation runs, and the printed pipeline is the one that is shown."""

import re
from pathlib import Path

import pytest

from ftrain import backends
from ftrain.backends import registry

ROOT = Path(__file__).parent.parent
DOCUMENTS = ["README.md", "CONTRIBUTING.md"]


def blocks(name, language):
    return re.findall(rf"^```{language}\n(.*?)^```$", (ROOT / name).read_text(), re.DOTALL | re.MULTILINE)


@pytest.mark.parametrize("name", DOCUMENTS)
def test_python_blocks_run(name, monkeypatch):
    monkeypatch.setattr(registry, "_records", dict(registry._records))
    found = blocks(name, "python")
    assert found
    scope = {"__name__": "documentation"}
    for block in found:
        # The compiler is left out: what it does is tested elsewhere, and takes half a minute.
        exec(compile(block.replace("ft.compiled()", 'ft.compiled(backend="eager")'), name, "exec"), scope)
    assert backends.names()


def test_the_pipeline_prints_as_the_readme_shows():
    scope = {"__name__": "documentation"}
    code = blocks("README.md", "python")[0].split("state = step.init")[0]
    exec(compile(code, "README.md", "exec"), scope)
    assert repr(scope["step"]) == blocks("README.md", "text")[0].strip()


def test_make_commands_of_the_readme_exist():
    targets = set(re.findall(r"^([\w-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    named = set(re.findall(r"(?:^|`)make ([\w-]+)", (ROOT / "README.md").read_text(), re.MULTILINE))
    assert {"train", "test", "test-avx2", "lint", "bench"} <= named <= targets
