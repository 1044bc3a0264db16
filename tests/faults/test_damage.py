"""Damaged files: each damage is detected and named, and a run goes back to an older checkpoint.

Also how many flipped bits other formats detect.
"""

import itertools
import json
import os
import random
import re
import warnings

import pytest
import safetensors.torch
import torch
import torch.distributed.checkpoint as dcp

import ftrain as ft
from ftrain.checkpoint import load, save, verify
from ftrain.checkpoint.manifest import parse
from ftrain.errors import CheckpointError
from tests.faults.figures import tally, times
from tests.faults.forks import forked, quiet_forks
from tests.faults.specimens import everything, have_same_bits, state

MODEL, STATE, TEXT, MANIFEST = "params/model.safetensors", "state.safetensors", "params/config.json", "MANIFEST.json"
FILES = MODEL, STATE, TEXT, MANIFEST
OLD, NEW = 1, 2


class Run:
    """Two checkpoints of a run; the tests damage the newer one and restore it."""

    def __init__(self, directory):
        self.parts = {step: {"state": state(step), "run": everything(step)} for step in (OLD, NEW)}
        self.checkpoints = ft.Checkpoints(directory, every=1, async_=False, texts={TEXT: '{"layers": 2}'})
        with self.checkpoints:
            for step, parts in self.parts.items():
                self.checkpoints.save(step, parts)
        self.new, self.old = self.checkpoints.path(NEW), self.checkpoints.path(OLD)
        self.original = {name: (self.new / name).read_bytes() for name in FILES}
        self.older = {name: (self.old / name).read_bytes() for name in FILES}
        self.tensors = {name: list(tensors(self.original, name)) for name in (MODEL, STATE)}

    def restore(self):
        for name, data in self.original.items():
            put(self.new / name, data)


def tensors(files, name):
    """Yield start and end of each tensor in a file, from its header, and the path of the tensor in the tree."""
    data = files[name]
    length = int.from_bytes(data[:8], "little")
    paths = {(item["file"], item["key"]): item["path"] for item in json.loads(files[MANIFEST])["tensors"]}
    for key, entry in json.loads(data[8 : 8 + length]).items():
        if key != "__metadata__":
            start, end = entry["data_offsets"]
            yield 8 + length + start, 8 + length + end, paths[name, key]


def put(path, data):
    path.write_bytes(data)


def named(run, file, places):
    """Return what an error about damaged bytes must name: the file, and one of these tensors.

    There are none in a file of text, or if the header is damaged too.
    """
    spans = run.tensors.get(file, [])
    if not spans or min(places) < min(start for start, _, _ in spans):
        return file, ()
    return file, [path for start, end, path in spans if any(start <= place < end for place in places)]


# Each function damages the newer checkpoint, and returns what the error must name: a file, and one of several tensors.


def flipped(run, draw):
    file = draw.choices(FILES, [len(run.original[name]) for name in FILES])[0]
    data = bytearray(run.original[file])
    place = draw.randrange(len(data))
    data[place] ^= 1 << draw.randrange(8)
    put(run.new / file, data)
    return named(run, file, [place])


def cut(run, draw):
    file = draw.choice(FILES)
    put(run.new / file, run.original[file][: draw.randrange(len(run.original[file]))])
    return file, ()


def grown(run, draw):
    file = draw.choice(FILES)
    put(run.new / file, run.original[file] + draw.randbytes(draw.randint(1, 9)))
    return file, ()


def blanked(run, draw):
    """Replace a block of a file by zeros, as a disk may do; not one that is zeros already."""
    while True:
        file = draw.choice(FILES)
        data = bytearray(run.original[file])
        size = draw.choice([8, 64, 512, 4096])
        start = draw.randrange(0, len(data), size)
        data[start : start + size] = bytes(len(data[start : start + size]))
        places = [
            place for place in range(start, min(start + size, len(data))) if data[place] != run.original[file][place]
        ]
        if places:
            put(run.new / file, data)
            return named(run, file, places)


def moved(run, draw):
    """Exchange two pieces of a file that differ."""
    while True:
        file = draw.choice([MODEL, STATE])
        data = bytearray(run.original[file])
        size = draw.choice([4, 8, 16])
        first, second = sorted(draw.sample(range(0, len(data) - size, size), 2))
        data[first : first + size], data[second : second + size] = (
            data[second : second + size],
            data[first : first + size],
        )
        places = [place for place in range(len(data)) if data[place] != run.original[file][place]]
        if places:
            put(run.new / file, data)
            return named(run, file, places)


def swapped(run, draw):
    pair = draw.sample(FILES, 2)
    for file, source in zip(pair, reversed(pair), strict=True):
        put(run.new / file, run.original[source])
    # The manifest is read first, then the other texts.
    first_read = next(name for name in (MANIFEST, TEXT, MODEL, STATE) if name in pair)
    return first_read, ()


def missing(run, draw):
    file = draw.choice(FILES)
    os.unlink(run.new / file)
    return file, ()


def mixed(run, draw):
    """Put files of the older checkpoint into the newer one; not the text, which is the same in both."""
    files = draw.sample([MODEL, STATE, MANIFEST], draw.randint(1, 2))
    for file in files:
        put(run.new / file, run.older[file])
    # The manifest of the older one is intact; then the tensors are wrong that do not belong to it.
    wrong = {MODEL, STATE} - set(files) if MANIFEST in files else set(files)
    return "|".join(sorted(wrong)), ()


DAMAGES = flipped, cut, grown, blanked, moved, swapped, missing, mixed


def warning_of_latest(run):
    """Return the warning with which `latest` goes back to the older checkpoint; None if it loads the newer one."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        actual = run.checkpoints.latest({"state": run.parts[OLD]["state"]})
    if actual.step == NEW:
        return None
    assert have_same_bits(actual.parts, run.parts[OLD])
    assert len(caught) == 1
    assert f"going back to step {OLD}" in str(caught[0].message)
    return str(caught[0].message)


def error_of(read):
    """Return a function that reads from a run, and returns the text of the error; None without one."""

    def read_and_return_error(run):
        try:
            read(run)
        except CheckpointError as error:
            return str(error)
        return None

    return read_and_return_error


ROUTES = {
    "load": error_of(lambda run: load(run.new)),
    "load like": error_of(lambda run: load(run.new, like=run.parts[NEW])),
    "verify": error_of(lambda run: verify(run.new)),
    "latest": warning_of_latest,
}


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    return Run(tmp_path_factory.mktemp("damage"))


@pytest.mark.parametrize("damage", DAMAGES, ids=[damage.__name__ for damage in DAMAGES])
def test_damage_is_found_and_named(run, damage):
    count = times(20_000 // len(DAMAGES), 15)
    draw, routes = random.Random(damage.__name__), itertools.cycle(ROUTES.items())
    silent = []
    with tally(f"damage: {damage.__name__}") as tries:
        for number, (route, read) in zip(range(count), routes, strict=False):
            file, paths = damage(run, draw)
            with tries.attempt((number, route, file, paths)):
                try:
                    message = read(run)
                finally:
                    run.restore()
                if message is None:
                    silent.append((number, route, file, paths))
                    continue
                assert str(run.new) in message
                assert re.search(f"(?:{file})".replace(".", r"\."), message)
                assert not paths or any(f"{path}:" in message for path in paths)
        tries.figures["silent"] = len(silent)
        tries.failures += silent
        assert run.checkpoints.latest().step == NEW


def test_every_bit_of_a_manifest_counts(run):
    """Also bits that do not change the parsed JSON, such as the case of the digits of an escaped character."""
    original, bits_per_byte = run.original[MANIFEST], times(8, 1)
    silent = []
    with tally("damage: every bit of a manifest") as tries:
        for place, bit in itertools.product(range(len(original)), range(bits_per_byte)):
            data = bytearray(original)
            data[place] ^= 1 << (bit + 5) % 8
            tries.runs += 1
            try:
                parse(bytes(data))
            except CheckpointError:
                continue
            silent.append((place, bytes(original[place - 9 : place + 9])))
        tries.figures["silent"] = len(silent)
        tries.failures += silent


def test_checkpoints_that_have_changed_places_are_found(tmp_path):
    run = Run(tmp_path)
    aside = tmp_path / "aside"
    os.rename(run.old, aside)
    os.rename(run.new, run.old)
    os.rename(aside, run.new)
    with pytest.raises(CheckpointError, match=r"step-000000000002.*is of step 1[^0-9](.|\n)*is of step 2"):
        run.checkpoints.latest()


def test_a_checkpoint_renamed_to_a_later_step_is_not_loaded(tmp_path):
    run = Run(tmp_path)
    os.rename(run.new, run.checkpoints.path(7))
    with pytest.warns(UserWarning, match=r"going back to step 1(.|\n)*step-000000000007.*is of step 2"):
        assert run.checkpoints.latest().step == OLD
    with run.checkpoints:
        run.checkpoints.save(7, run.parts[NEW])
    assert verify(run.checkpoints.path(7)).step == 7


def test_no_checkpoint_that_is_whole_is_an_error_that_names_all(tmp_path):
    run = Run(tmp_path)
    for path in (run.old, run.new):
        put(path / STATE, b"")
    with pytest.raises(CheckpointError) as caught:
        run.checkpoints.latest()
    assert str(caught.value).count("cut off") == 2
    assert all(str(path) in str(caught.value) for path in (run.old, run.new))


# The same of a bit in other formats


def tree():
    draw = torch.Generator().manual_seed(0)
    return {f"layer{i}": torch.randn(64, 64, generator=draw) for i in range(4)}


def torch_load(path):
    return torch.load(path, weights_only=True)


def dcp_save(tree, path):
    dcp.save(tree, checkpoint_id=path, no_dist=True)


def dcp_load(path):
    actual = {name: torch.zeros_like(leaf) for name, leaf in tree().items()}
    dcp.load(actual, checkpoint_id=path, no_dist=True)
    return actual


FORMATS = {
    "ftrain": (lambda tree, path: save(path, tree), load),
    "torch.save": (torch.save, torch_load),
    "safetensors": (safetensors.torch.save_file, safetensors.torch.load_file),
    "DCP": (dcp_save, dcp_load),
}


def count_flips(send, name, path, tries):
    """Flip bits in files of a format; send how many were detected, loaded as other numbers, or changed nothing."""
    write, read = FORMATS[name]
    expected, draw = tree(), random.Random(0)
    counts = {"found": 0, "silent": 0, "harmless": 0}
    warnings.simplefilter("ignore")
    write(expected, path)
    files = sorted(file for file in (path.rglob("*") if path.is_dir() else [path]) if file.is_file())
    original = {file: file.read_bytes() for file in files}
    for _ in range(tries):
        file = draw.choices(files, [len(original[file]) for file in files])[0]
        data = bytearray(original[file])
        data[draw.randrange(len(data))] ^= 1 << draw.randrange(8)
        put(file, data)
        try:
            actual = read(path)
        except BaseException:
            counts["found"] += 1
        else:
            counts["harmless" if have_same_bits(actual, expected) else "silent"] += 1
        put(file, original[file])
    send(counts)


@quiet_forks
@pytest.mark.parametrize("name", FORMATS)
def test_every_flipped_bit_is_found_and_those_of_other_formats_are_counted(name, tmp_path):
    count = times(200, 20)
    with tally(f"a bit: {name}") as tries:
        tries.runs, tries.note = count, "silent: loaded without an error as other numbers"
        tries.figures = counts = forked(count_flips, name, tmp_path / "file", count)
        assert sum(counts.values()) == count
        if name == "ftrain":
            assert counts["found"] == count
