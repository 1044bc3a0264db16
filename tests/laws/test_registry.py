"""Every public wrapper has a law, and every law an entry."""

import inspect
import re
from pathlib import Path

import pytest

import ftrain as ft
from ftrain.errors import ComposeError
from tests.laws import oracle
from tests.laws.models import make_batch, make_model
from tests.laws.registry import ELSEWHERE, ENTRIES, EVERY, NAMES
from tests.laws.test_pipelines import build

ROOT = Path(ft.__file__).parents[1]


def public_wrappers():
    """The names in ``ft.__all__`` of functions that return a wrapper."""
    functions = {name: getattr(ft, name) for name in ft.__all__ if inspect.isfunction(getattr(ft, name))}
    return {name for name, function in functions.items() if function.__annotations__.get("return") == "Wrapper"}


def test_every_public_wrapper_has_a_law():
    assert {entry.factory.__name__ for entry in EVERY} == public_wrappers()


@pytest.mark.parametrize("entry", ELSEWHERE, ids=lambda entry: entry.name)
def test_laws_elsewhere_are_there(entry):
    call = "".join([f"ft.{entry.factory.__name__}(", *map(repr, entry.args)]).replace("'", '"')
    assert call in (ROOT / entry.laws).read_text(encoding="utf-8")


def works_on(wrapper):
    """The part of a step that a wrapper acts on, in the words of the README."""
    if wrapper.loss is not None and wrapper.loss.order == 0:
        return "model"
    if wrapper.update is not None and wrapper.update.optimizer is not None:
        return "optimizer"
    return "gradient" if wrapper.arrow == "grad" else wrapper.arrow


def test_the_table_of_the_readme_has_every_wrapper_and_what_it_works_on():
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    rows = re.findall(r"^\| \[(.+)\]\(docs/wrappers\.md#[^)]+\) \| ([a-z, ]+) \|", readme, re.MULTILINE)
    listed = {
        (name, part) for call, parts in rows for name in re.findall(r"`(\w+)\(", call) for part in parts.split(", ")
    }
    assert listed == {(entry.factory.__name__, entry.part or works_on(entry.make())) for entry in EVERY}


@pytest.mark.parametrize("name", NAMES)
def test_a_wrapper_is_of_its_entry(name):
    wrapper = ENTRIES[name].make()
    assert wrapper.name == ENTRIES[name].factory.__name__
    assert wrapper.may_refuse_updates or not ENTRIES[name].guards


@pytest.mark.parametrize("name", [name for name in NAMES if ENTRIES[name].not_inside])
def test_what_may_not_stand_around_it_is_refused(name):
    for around in ENTRIES[name].not_inside:
        with pytest.raises(ComposeError, match=f"{ENTRIES[name].factory.__name__}: {around}"):
            build((name, around))


@pytest.mark.parametrize("name", ["sam", "spikes", "spikes_clip", "clip", "clip_value", "accumulate"])
def test_the_oracle_knows_it(name):
    """A wrapper of the gradient that the oracle left out would change nothing there."""
    plain, shaped = (oracle.run(make_model(), names, [make_batch(0), make_batch(1)]) for names in ((), (name,)))
    assert any(not value.equal(plain["params"][key]) for key, value in shaped["params"].items())
