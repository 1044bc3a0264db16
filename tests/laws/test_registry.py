"""The table of wrappers has every public wrapper, and agrees with the README and with the files of the laws."""

import inspect
import re
from pathlib import Path

import pytest

import ftrain as ft
from ftrain.errors import ComposeError
from tests.laws import oracle
from tests.laws.models import make_batch, make_model
from tests.laws.pipelines import build
from tests.laws.registry import ENTRIES, EVERY, NAMES, WITHOUT_ORACLE

ROOT = Path(ft.__file__).parents[1]


def public_wrappers():
    """Return the names in ``ft.__all__`` of the functions that return a wrapper."""
    functions = {name: getattr(ft, name) for name in ft.__all__ if inspect.isfunction(getattr(ft, name))}
    return {name for name, function in functions.items() if function.__annotations__.get("return") == "Wrapper"}


def test_every_public_wrapper_has_a_law():
    assert {entry.factory.__name__ for entry in EVERY} == public_wrappers()


@pytest.mark.parametrize("entry", WITHOUT_ORACLE, ids=lambda entry: entry.name)
def test_a_file_of_laws_calls_its_wrapper(entry):
    arguments = ", ".join(map(repr, entry.args)).replace("'", '"')
    call = f"ft.{entry.factory.__name__}({arguments}"
    assert call in (ROOT / entry.laws).read_text(encoding="utf-8")


def works_on(wrapper):
    """Return the part of a step that a wrapper acts on, in the words of the README."""
    if wrapper.loss is not None and wrapper.loss.order == 0:
        return "model"
    if wrapper.update is not None and wrapper.update.optimizer is not None:
        return "optimizer"
    return "gradient" if wrapper.arrow == "grad" else wrapper.arrow


def test_the_table_of_the_readme_has_every_wrapper_and_what_it_works_on():
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    rows = re.findall(r"^\| \[(.+)\]\(docs/wrappers\.md#[^)]+\) \| ([a-z, ]+) \|", readme, re.MULTILINE)
    listed = set()
    for calls, parts in rows:
        for name in re.findall(r"`(\w+)\(", calls):
            listed |= {(name, part) for part in parts.split(", ")}
    assert listed == {(entry.factory.__name__, entry.part or works_on(entry.make())) for entry in EVERY}


@pytest.mark.parametrize("name", NAMES)
def test_an_entry_describes_its_wrapper(name):
    wrapper = ENTRIES[name].make()
    assert wrapper.name == ENTRIES[name].factory.__name__
    assert wrapper.may_refuse_updates or not ENTRIES[name].guards


@pytest.mark.parametrize("name", [name for name in NAMES if ENTRIES[name].not_inside])
def test_a_wrapper_that_may_not_be_outside_is_refused(name):
    for outer in ENTRIES[name].not_inside:
        with pytest.raises(ComposeError, match=f"{ENTRIES[name].factory.__name__}: {outer}"):
            build((name, outer))


@pytest.mark.parametrize("name", ["sam", "spikes", "spikes_clip", "clip", "clip_value", "accumulate"])
def test_the_oracle_applies_the_wrapper(name):
    """With a wrapper that the oracle does not know, its parameters would be those of the plain step."""
    batches = [make_batch(0), make_batch(1)]
    plain = oracle.run(make_model(), (), batches)
    wrapped = oracle.run(make_model(), (name,), batches)
    assert any(not value.equal(plain["params"][key]) for key, value in wrapped["params"].items())
