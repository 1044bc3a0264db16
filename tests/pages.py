"""Runs a page of the documentation: its Python blocks in order, in one namespace, in an empty directory.

A `text` block that follows a Python block is what that block prints; `...` stands for anything.
"""

import contextlib
import doctest
import io
import itertools
import re
import types

import pytest
import torch.distributed as dist

from ftrain.backends import registry
from ftrain.profiling import timing

FENCE = re.compile(r"^```(\w*)\n(.*?)^```$", re.DOTALL | re.MULTILINE)
OUTPUT_FLAGS = doctest.ELLIPSIS | doctest.NORMALIZE_WHITESPACE


def fences(text):
    """Return the fenced blocks of a page as (language, line before the code, code)."""
    return [(match[1], text.count("\n", 0, match.start(2)), match[2]) for match in FENCE.finditer(text)]


def execute(code, path, line, namespace):
    """Run one block and return what it prints; a traceback names the page and its line."""
    # Compiling is tested elsewhere, and takes half a minute.
    code = code.replace("ft.compiled()", 'ft.compiled(backend="eager")')
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        exec(compile("\n" * line + code, str(path), "exec"), namespace)
    return printed.getvalue()


def run(path, directory):
    """Run all Python blocks of a page.

    Raises:
        AssertionError: when the output of a block is not the output that the page shows.
        Exception: what a block raises.
    """
    blocks = fences(path.read_text(encoding="utf-8"))
    namespace = {"__name__": "documentation"}
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(directory)
        patch.setattr(registry, "_records", dict(registry._records))
        # The measured times do not matter here: measure for 2 ms at a time, and collect no garbage before it.
        patch.setattr(timing, "TURN", 0.002)
        patch.setattr(timing, "gc", types.SimpleNamespace(collect=lambda: None))
        # The empty block is what follows the last one.
        for (language, line, code), (next_language, _, shown) in itertools.pairwise([*blocks, ("", 0, "")]):
            if language != "python":
                continue
            printed = execute(code, path, line, namespace)
            if next_language == "text":
                matches = doctest.OutputChecker().check_output(shown, printed, OUTPUT_FLAGS)
                assert matches, f"{path}:{line}: the page shows\n{shown}\nand the block prints\n{printed}"


class Page(pytest.File):
    """A Markdown file with Python blocks, which are one test because they share their variables."""

    def collect(self):
        if any(language == "python" for language, _, _ in fences(self.path.read_text(encoding="utf-8"))):
            yield Blocks.from_parent(self, name="blocks")


class Blocks(pytest.Item):
    """The Python blocks of one page."""

    def runtest(self):
        try:
            run(self.path, self.config._tmp_path_factory.mktemp("page"))
        finally:
            # A page may make a mesh, whose group of one rank later tests would find, and their forks inherit.
            if dist.is_initialized():
                dist.destroy_process_group()

    def reportinfo(self):
        return self.path, 0, str(self.path.name)
