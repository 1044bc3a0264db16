"""Links, names, commands and figures of the documentation are right. `tests/pages.py` runs its code blocks."""

import importlib
import re
from pathlib import Path

import pytest

import ftrain as ft
from bench.report import PARALLEL_PAGE, fill_claims
from bench.rows import TIME, WITHIN, read
from tests import pages
from tests.test_architecture import LAYERS

ROOT = Path(__file__).parent.parent
DOCS = sorted((ROOT / "docs").glob("*.md"))
DOCUMENTS = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", ROOT / "bench/README.md", *DOCS]
ROWS = read(ROOT / "bench/results")
BUDGET = "ftrain, remat(budget=0.3)"
HEAD = "ft.losses.linear_cross_entropy"
DEEP, COLD = "C14 GPT 12x128", "compile, cold cache"
MEDIUM = "ratio to loop, torch.compile(model), matmuls at medium"
LINK = re.compile(r"(?<!`)\[(?:[^][`]|`[^`]*`)+\]\(([^)\s]+)\)")
NAME = re.compile(r"`(?:ftrain|ft)\.(\w+(?:\.\w+)*)[`(]")
LOGGERS = {"compiling"}
"""Loggers of the package whose names are not names of modules."""


def prose(path):
    """Return a page without its fenced blocks."""
    return pages.FENCE.sub("", path.read_text(encoding="utf-8"))


def anchors(path):
    """Return the anchors that GitHub gives the headings of a page."""
    headings = re.findall(r"^#+ (.+)$", prose(path), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


def median(question, variant, metric):
    """Return the median that the bench has measured. Rows of several runs must have the same one."""
    key = (question, variant, metric)
    (value,) = {row.median for row in ROWS if (row.question, row.variant, row.metric) == key}
    return value


@pytest.mark.parametrize("path", DOCUMENTS, ids=lambda path: path.relative_to(ROOT).as_posix())
def test_links_lead_to_a_file_and_a_heading(path):
    for link in LINK.findall(prose(path)):
        if link.startswith(("https://", "http://")):
            continue
        name, _, anchor = link.partition("#")
        target = (path.parent / name).resolve() if name else path
        assert target.is_relative_to(ROOT), f"{path.name}: {link} leads out of the repository"
        assert target.exists(), f"{path.name}: {link} leads to no file"
        assert not anchor or anchor in anchors(target), f"{path.name}: {link} leads to no heading"


def test_the_readme_is_short_and_leads_to_every_page():
    readme = prose(ROOT / "README.md")
    assert len((ROOT / "README.md").read_text(encoding="utf-8").splitlines()) <= 200
    assert {f"docs/{path.name}" for path in DOCS} <= {link.partition("#")[0] for link in LINK.findall(readme)}


@pytest.mark.parametrize(
    "module",
    [ft, ft.optim, ft.schedules, ft.data, ft.losses, ft.adapters, ft.random, ft.checkpoint],
    ids=lambda module: module.__name__,
)
def test_every_public_function_is_on_a_page(module):
    words = set(re.findall(r"\w+", "".join(path.read_text(encoding="utf-8") for path in DOCUMENTS)))
    functions = {name for name in module.__all__ if name.islower() and not name.startswith("_")}
    assert not functions - words


def test_ratios_on_ranks_are_those_of_the_bench():
    page = PARALLEL_PAGE.read_text(encoding="utf-8")
    assert fill_claims(page, ROWS) == page


def test_times_of_the_optimizers_are_those_of_the_bench():
    text = (ROOT / "docs/optimizers.md").read_text(encoding="utf-8")
    times = re.findall(r"^\| `(\w+)` \|[^|]*\| ([\d.]+)(?: \(([\d.]+)\))? \|", text, re.MULTILINE)
    assert len(times) == 13
    for name, ours, theirs in times:
        question, variant = f"C8 {name}, 148 leaves", "ftrain update, eager"
        if not theirs:
            question, variant = "C8 others, 148 leaves", f"ftrain update, {name}"
        assert float(ours) == float(f"{median(question, variant, TIME) / 1e3:.2g}"), name
        if theirs:
            rows = [row for row in ROWS if (row.question, row.metric) == (question, TIME)]
            fastest = min(row.median for row in rows if row.variant != variant)
            assert float(theirs) == float(f"{fastest / 1e3:.2g}"), name


@pytest.mark.parametrize(
    ("page", "sentence", "figure"),
    [
        ("guide", "takes {:.0f} MB beyond", ("C4 loss head, 50,257 classes", "ft.losses.linear_cross_entropy", WITHIN)),
        ("guide", "plain loss takes {:,.0f} MB", ("C4 loss head, 50,257 classes", "F.cross_entropy(F.linear)", WITHIN)),
        (
            "guide",
            "takes {:.2f} of the time in eager mode",
            ("C4 loss head, 50,257 classes", HEAD, "ratio to F.cross_entropy(F.linear)"),
        ),
        (
            "guide",
            "{:.2f} when both are compiled",
            ("C4 loss head, 50,257 classes", f"{HEAD}, compiled", "ratio to F.cross_entropy(F.linear), compiled"),
        ),
        ("wrappers", "took {:.0f} seconds", (DEEP, "ftrain, compiled by block", COLD)),
        ("wrappers", "in place of {:.0f} (`torch", (DEEP, "ftrain, compiled", COLD)),
        ("wrappers", "by hand: {:.0f})", (DEEP, "loop, torch.compile(model)", COLD)),
        ("wrappers", "then {:.2f} of the time", (DEEP, "ftrain, compiled by block", "ratio to ftrain, compiled")),
        ("../bench/README", "by hand: {:.0f} s", (DEEP, "ftrain, compiled", COLD)),
        ("../bench/README", "and {:.0f} s by hand", (DEEP, "loop, torch.compile(model)", COLD)),
        ("../bench/README", "takes {:.2f} of its time", ("C3 GPT 6x384, fp32", "ftrain, compiled", MEDIUM)),
        (
            "wrappers",
            "leaves {:.0%} of",
            ("C9 remat, GPT 12x128", BUDGET, "activations, of those that are kept without"),
        ),
        ("wrappers", "for {:.2f} times", ("C9 remat, GPT 12x128", BUDGET, "ratio to loop that keeps all")),
    ],
)
def test_a_figure_in_a_sentence_is_that_of_the_bench(page, sentence, figure):
    text = " ".join((ROOT / f"docs/{page}.md").read_text(encoding="utf-8").split())
    assert sentence.format(median(*figure)) in text


def test_make_commands_of_the_readme_exist():
    targets = set(re.findall(r"^([\w-]+):", (ROOT / "Makefile").read_text(encoding="utf-8"), re.MULTILINE))
    named = set(re.findall(r"(?:^|`)make ([\w-]+)", (ROOT / "README.md").read_text(encoding="utf-8"), re.MULTILINE))
    assert {"train", "test", "test-avx2", "lint", "bench"} <= named <= targets


@pytest.mark.parametrize(
    ("page", "message"),
    [
        ("```python\nassert 1 == 2\n```\n", "^$"),
        ("```python\nprint(1)\n```\n\n```text\n2\n```\n", "the page shows"),
        ("```python\nx = 1\n```\n\ntext\n\n```python\nassert x == 2\n```\n", "^$"),
    ],
)
def test_a_page_whose_code_is_wrong_fails(page, message, tmp_path):
    (tmp_path / "page.md").write_text(page, encoding="utf-8")
    with pytest.raises(AssertionError, match=message):
        pages.run(tmp_path / "page.md", tmp_path)


def test_a_page_whose_code_is_right_passes(tmp_path):
    (tmp_path / "page.md").write_text("```python\nprint(1)\n```\n\n```text\n1\n```\n", encoding="utf-8")
    pages.run(tmp_path / "page.md", tmp_path)


def test_the_list_of_layers_in_contributing_is_that_of_the_test():
    blocks = pages.fences((ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8"))
    layers = next(code for language, _, code in blocks if language == "text")
    shown = [re.split(r"[/ ]|\.py", line)[0] for line in layers.splitlines()]
    assert shown == [name for name in LAYERS if name in shown]
    assert set(LAYERS) - set(shown) == {"_version"}


@pytest.mark.parametrize("path", DOCUMENTS, ids=lambda path: path.relative_to(ROOT).as_posix())
def test_paths_of_the_repository_exist(path):
    paths = re.findall(r"`((?:ftrain|tests|bench|examples|docs)/[\w/.-]*)`", prose(path))
    assert [name for name in paths if not (ROOT / name).exists()] == []


def resolve(name):
    """Return the object with a dotted name in `ftrain`; for a field of a dataclass, the name of the field."""
    value, path = ft, "ftrain"
    for part in name.split("."):
        path = f"{path}.{part}"
        if part in getattr(value, "__dataclass_fields__", {}):
            value = part
        else:
            value = getattr(value, part) if hasattr(value, part) else importlib.import_module(path)
    return value


def test_only_the_warning_of_the_readme_names_the_package_on_pypi():
    """It is another project. The extras of this one are installed from its folder."""
    texts = [path.read_text(encoding="utf-8") for path in (*DOCUMENTS, *(ROOT / "ftrain").rglob("*.py"))]
    commands = [line for text in texts for line in re.findall(r"pip install ['\"]?ftrain[^`]*", text)]
    assert commands == ["pip install ftrain"]


@pytest.mark.parametrize("folder", ["ftrain", "documents"])
def test_dotted_names_exist(folder):
    paths = DOCUMENTS if folder == "documents" else sorted((ROOT / folder).rglob("*.py"))
    names = {name: path for path in paths for name in NAME.findall(path.read_text(encoding="utf-8"))}
    assert len(names) > 50
    for name in names.keys() - LOGGERS:
        try:
            resolve(name)
        except ImportError:
            pytest.fail(f"{names[name].relative_to(ROOT)}: there is no ftrain.{name}")
