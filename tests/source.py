"""Functions with which tests read the source of the package."""

import ast
from functools import cache
from pathlib import Path

import ftrain

ROOT = Path(ftrain.__file__).parent
FILES = sorted(ROOT.rglob("*.py"))
MODULE_NAMES = {
    path: ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__") for path in FILES
}


@cache
def tree_of(path):
    # Parsed at the first call, not when this file is imported: every process that runs tests imports it.
    return ast.parse(path.read_text(encoding="utf-8"))


def layer(path):
    """Return the layer that a file belongs to: a folder of the package, or a file beside `__init__.py`."""
    return path.relative_to(ROOT).with_suffix("").parts[0]


def label(path):
    """Return the path of a file relative to the package."""
    return path.relative_to(ROOT).as_posix()


def imports(path):
    """Yield the dotted names that a file imports, also within functions; `from a import b` yields "a.b"."""
    for node in ast.walk(tree_of(path)):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert not node.level, f"{path}:{node.lineno}: a relative import"
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def package_imports(path):
    """Yield the dotted name, without "ftrain.", of each module of this package that a file imports.

    A name within a module is left out: `from ftrain.types import Mean` yields "types".
    """
    modules = set(MODULE_NAMES.values())
    for name in imports(path):
        if name.split(".")[0] == "ftrain":
            parts = name.split(".")[1:]
            lengths = [length for length in range(len(parts), 0, -1) if ".".join(parts[:length]) in modules]
            yield ".".join(parts[: lengths[0]]) if lengths else ""


def lines_of(path, nodes):
    """Return the place and the source of each syntax node, as text."""
    return [f"ftrain/{label(path)}:{node.lineno}: {ast.unparse(node)}" for node in nodes]


def violations(search, except_in=()):
    """Return what `search(path)` lists for every file of the package, except those of the layers in `except_in`."""
    return [violation for path in FILES if layer(path) not in except_in for violation in search(path)]
