"""Functions with which tests read the source of the package."""

import ast
from functools import cache
from pathlib import Path

import ftrain

ROOT = Path(ftrain.__file__).parent
FILES = sorted(ROOT.rglob("*.py"))
NAMES = {path: ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__") for path in FILES}


@cache
def tree_of(path):
    # Parsed at the first call, not when this file is imported: every process that runs tests imports it.
    return ast.parse(path.read_text(encoding="utf-8"))


def unit(path):
    """The place of the staircase that a file belongs to."""
    return path.relative_to(ROOT).with_suffix("").parts[0]


def label(path):
    return path.relative_to(ROOT).as_posix()


def imports(path):
    """Yield the dotted name of everything that a file imports, also within functions: `from a import b` is a.b."""
    for node in ast.walk(tree_of(path)):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert not node.level, f"{path}:{node.lineno}: a relative import"
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def own_imports(path):
    """Yield the dotted name of each file or folder of this package that a file imports: the longest that exists."""
    modules = set(NAMES.values())
    for name in imports(path):
        if name.split(".")[0] == "ftrain":
            parts = name.split(".")[1:]
            lengths = [length for length in range(len(parts), 0, -1) if ".".join(parts[:length]) in modules]
            yield ".".join(parts[: lengths[0]]) if lengths else ""


def where(path, nodes):
    return [f"ftrain/{label(path)}:{node.lineno}: {ast.unparse(node)}" for node in nodes]


def offenders(search, leaving_out=()):
    """Return the lines that `search(path)` lists, for every file outside the units in `leaving_out`."""
    return [line for path in FILES if unit(path) not in leaving_out for line in search(path)]
