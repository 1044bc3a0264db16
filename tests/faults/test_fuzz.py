"""Manifests and headers that nobody has written: refused by what reads them, quickly and in little memory.

A manifest is changed as a tree and signed again, so that what is tested are the checks and not the digest.
"""

import copy
import itertools
import json
import os
import random
import resource
import time

import pytest

from ftrain.checkpoint import load, save, verify
from ftrain.checkpoint.__main__ import inspection
from ftrain.checkpoint.layout import TensorInfo, layout
from ftrain.checkpoint.manifest import DTYPES, parse, signed
from ftrain.checkpoint.ranks import Ranks
from ftrain.checkpoint.reading import load_checkpoint
from ftrain.errors import CheckpointError, StructureError
from tests.faults.figures import tally, times
from tests.faults.forks import forked, quiet_forks
from tests.faults.specimens import everything, state

MANIFEST, MODEL, STATE = "MANIFEST.json", "params/model.safetensors", "state.safetensors"
SECONDS, MEMORY = 1.0, 64 * 2**20
SHARDS = 4
"""Children of one test, each with its own seed: what one of them leaks does not hide what another does."""

PARTS = {"state": state(), "run": everything()}


def like():
    return PARTS


# Pieces that a manifest may hold instead of what it should

NUMBERS = [0, -1, 1, 2, 7, 2**31, 2**32, 2**53, 2**61, 2**62, 2**63, 2**64, -(2**63), 10**400, 10**4400]
FLOATS = [0.0, -0.0, 0.5, 1e308, float("nan"), float("inf"), -float("inf")]
NAMES = [
    *("", ".", "..", "/", "../x", "a/../b", "/etc/passwd", "./a", "a//b", "a/", ".hidden", "x.safetensors"),
    *("MANIFEST.json", "state.safetensors", "params/model.safetensors", "params", "__metadata__", "a\0b", "a\nb"),
    *("\ud800", "ü", "x" * 5000, "os.system", "ftrain.types.TrainState", "ftrain.types.Mean", "dict", "tuple"),
    *("TrainState", "Mean", "Gradients", "namedtuple Mean", "namedtuple ", "namedtuple dict", "types.TrainState"),
    *(
        "torch.float32",
        "float32",
        "float64",
        "int64",
        "complex64",
        "bool",
        "quint8",
        "F32",
        "0" * 64,
        "f" * 64,
        "F" * 64,
    ),
    *("\uff10" * 64, "\u0660" * 64, "NaN", "__class__", "__init__", "kind", "step", "digest"),
]
SCALARS = [
    *({"float": x} for x in ("0x1p0", "nan", "inf", "0x1p99999", "1e5", "", 3, None, [], "0x" + "f" * 9999)),
    *({"complex": x} for x in (["0x1p0", "nan"], ["1"], "ab", "abc", 3, None, [[], []], {"a": 1})),
    *({"bytes": x} for x in ("00ff", "0", "zz", 3, None, [1], "00" * 9999)),
    *({"tensor": x} for x in (0, 1, 10, -1, 10**30, 0.0, True, "0", None, [])),
    *({"tensor": 0, "kind": "dict"}, {"tensor": 0, "float": "nan"}, {"other": 1}, {}),
]
CONTAINERS = [
    {"kind": "dict", "keys": [True, 1], "nodes": [{"tensor": 0}, {"tensor": 1}]},
    {"kind": "dict", "keys": ["a", "a"], "nodes": [None, None]},
    {"kind": "dict", "keys": ["a"], "nodes": []},
    {"kind": "dict", "keys": [None], "nodes": [None]},
    {"kind": "dict", "keys": [[]], "nodes": [None]},
    {"kind": "dict", "keys": [0.5], "nodes": [None]},
    {"kind": "tuple", "keys": ["x", "y"], "nodes": [None, {"tensor": 3}]},
    {"kind": "list", "keys": 3, "nodes": "abc"},
    {"kind": "list", "keys": "ab", "nodes": [1, 2]},
    {"kind": ["list"], "keys": [], "nodes": []},
    {"kind": {}, "keys": [], "nodes": []},
    {"kind": "os.system", "keys": ["command"], "nodes": ["true"]},
    {"kind": "builtins.eval", "keys": [], "nodes": [], "static": ["1"]},
    {"kind": "ftrain.types.Mean", "keys": ["total", "weight"], "nodes": [1, 2], "static": [False]},
    {"kind": "ftrain.types.Mean", "keys": ["total", "weight"], "nodes": [1, 2], "static": []},
    {"kind": "ftrain.types.Mean", "keys": ["weight", "other"], "nodes": [1, 2], "static": [False]},
    {"kind": "ftrain.types.Mean", "keys": ["total", "weight"], "nodes": [1, 2], "static": [{"a": []}]},
    {"kind": "ftrain.types.TrainState", "keys": [], "nodes": []},
    {"kind": "ftrain.types.TrainState", "keys": ["step", True], "nodes": [None, None]},
    {"kind": "dict"},
    {"kind": None},
    {"kind": "Mean", "keys": ["total", "weight"], "nodes": [1, 2], "static": [False]},
    {"kind": "Mean", "keys": ["total", "weight"], "nodes": [1, 2], "static": []},
    {"kind": "Mean", "keys": ["weight", "other"], "nodes": [1, 2], "static": [False]},
    {"kind": "Mean", "keys": ["total", "weight"], "nodes": [1, 2], "static": [{"a": []}]},
    {"kind": "TrainState", "keys": [], "nodes": []},
    {"kind": "TrainState", "keys": ["step", True], "nodes": [None, None]},
    {"kind": "namedtuple Mean", "keys": ["total", "weight"], "nodes": [1, 2]},
]
SHAPES = [
    *([-1], [2**62], [2**61, 0], [0, 2**61, 2**61], [2**61, 2**61, 0], [2**33, 2**33], [2**31] * 2 + [0], [0] * 64),
    *([1] * 64, [1] * 65, [2] * 64, [1] * 5000, [True], [3.0], ["3"], [[3]], [None], {"0": 3}, 3, "33", [2**62 - 1, 0]),
    *([1, 0, 2**62 - 1], [4, 6], [24], [2, 2, 2, 3], [3], [0, 3], [6, 4]),
]


def deep(depth, piece=None):
    """A tree of lists, and one of containers, as deep as that."""
    for _ in range(depth):
        piece = {"kind": "list", "keys": [0], "nodes": [piece]} if depth % 2 else [piece]
    return piece


def piece(draw):
    """Something to put where it does not belong."""
    source = draw.choice([NUMBERS, FLOATS, NAMES, SCALARS, CONTAINERS, SHAPES, [None, True, False, [], {}]])
    if draw.random() < 0.02:
        return deep(draw.choice([50, 51, 400, 401, 3001, 3000]))
    return copy.deepcopy(draw.choice(source))


def places(tree, actual):
    """All containers of a tree, with their keys."""
    stack = [tree]
    while stack:
        node = stack.pop()
        inside = list(node.items() if isinstance(node, dict) else enumerate(node) if isinstance(node, list) else ())
        actual += [(node, key) for key, _ in inside]
        stack += [child for _, child in inside]
    return actual


def copied(tree):
    try:
        return copy.deepcopy(tree)
    except RecursionError:
        # What was made deep before; once of it is enough.
        return None


def mutate(body, draw):
    """Change a manifest in one to three places, at any depth of it."""
    for _ in range(draw.choice([1, 1, 1, 2, 3])):
        if draw.random() < 0.4:
            one(body, draw)
            continue
        actual = places(body, [])
        if not actual:
            return
        node, key = draw.choice(actual)
        what = draw.random()
        if what < 0.6:
            node[key] = piece(draw)
        elif what < 0.75:
            del node[key]
        elif what < 0.85:
            other, at = draw.choice(actual)
            node[key] = copied(other[at]) if _within(at, other) else None
        elif isinstance(node, dict):
            node[draw.choice(NAMES)] = node.pop(key)
        else:
            node.insert(key, copied(node[key]))


def _within(key, node):
    return key in node if isinstance(node, dict) else isinstance(key, int) and key < len(node)


def one(body, draw):
    """Change a field that is checked by itself."""
    if not isinstance(body.get("tensors"), list) or not body["tensors"]:
        return
    item = draw.choice(body["tensors"])
    if not isinstance(item, dict) or not item:
        return
    field = draw.choice(["shape", "stride", "dtype", "file", "key", "sha256", "path", "node"])
    if field in ("shape", "stride"):
        item[field] = copy.deepcopy(draw.choice(SHAPES))
    elif field == "dtype":
        item[field] = draw.choice([*DTYPES, "object", "", 3])
    elif field == "node":
        body["tree"] = copy.deepcopy(draw.choice([*CONTAINERS, *SCALARS]))
    else:
        item[field] = draw.choice([*NAMES, *NUMBERS])


# Text that no tree of Python's gives


def text(data, draw):
    """Change a manifest as text."""
    start = draw.randrange(len(data))
    other = draw.randrange(len(data))
    return draw.choice(
        [
            lambda: data[:start] + draw.randbytes(draw.randint(1, 8)) + data[start:],
            lambda: data[:start] + data[other:],
            lambda: data[:start] + data[min(start, other) : max(start, other)] + data[start:],
            lambda: b"\xef\xbb\xbf" + data,
            lambda: data.decode().encode("utf-16"),
            lambda: b"[" * draw.choice([10, 5000, 200_000]),
            lambda: b'{"a":' * draw.choice([10, 5000, 200_000]),
            lambda: b"[" * 5000 + b"]" * 5000,
            lambda: b"1" * 100_000,
            lambda: b'"' + b"\\u0000" * 50_000 + b'"',
            lambda: data.replace(b'"step": 3', b'"step": 3, "step": 4'),
            lambda: data.replace(b'"step": 3', draw.choice([b'"step": NaN', b'"step": 1e999', b'"step": -0'])),
            lambda: data.replace(b'"step": 3', b'"step": ' + b"9" * draw.choice([19, 4000, 5000])),
            lambda: data.replace(b'"shape": []', b'"shape": [], "shape": [1]', 1),
            lambda: data.replace(b'"kind": "dict"', b'"kind": "dict", "kind": "list"', 1),
            lambda: data + draw.choice([b" ", b"\0", b"{}", b"}"]),
            lambda: b"",
            lambda: b"null",
            lambda: b"[]",
            lambda: b"{}",
        ]
    )()


def header(data, draw):
    """Change the header of a safetensors file, and sometimes its length."""
    length = int.from_bytes(data[:8], "little")
    before, rest = data[8 : 8 + length], data[8 + length :]
    if draw.random() < 0.3:
        wrong = draw.choice([0, 1, 7, length - 1, length + 1, len(data), 2**31, 2**63, 2**64 - 1])
        return wrong.to_bytes(8, "little") + data[8:]
    if draw.random() < 0.3:
        body = text(before, draw)
    else:
        actual = json.loads(before)
        mutate(actual, draw)
        try:
            body = json.dumps(actual, separators=(",", ":")).encode()
        except (RecursionError, ValueError):
            body = before[::-1]
        body += b" " * (length - len(body))
    return len(body).to_bytes(8, "little") + body + rest


# What is tried, with what came of it


class Victim:
    """A checkpoint, of which one file is changed and put back."""

    def __init__(self, path):
        self.path = path
        self.whole = {name: (path / name).read_bytes() for name in (MANIFEST, MODEL, STATE)}
        self.body = json.loads(self.whole[MANIFEST])
        self.body.pop("digest")

    def put(self, name, data):
        (self.path / name).write_bytes(data)

    def mend(self, names):
        for name in names:
            self.put(name, self.whole[name])


def change_manifest(victim, draw):
    """A manifest with a digest that is right; its tensors may have the headers that go with it."""
    body = copy.deepcopy(victim.body)
    mutate(body, draw)
    try:
        data = signed(json.dumps(body, indent=1).removesuffix("\n}").encode())
    except (RecursionError, ValueError):
        return []
    victim.put(MANIFEST, data)
    return [MANIFEST, *([] if draw.random() < 0.5 else lay(victim, data))]


def lay(victim, data):
    """Write the headers that a manifest asks for, if it can be read."""
    try:
        manifest = parse(data)
    except CheckpointError:
        return []
    changed = []
    for name in (MODEL, STATE):
        kinds = [TensorInfo(item.key, DTYPES[item.dtype], item.shape) for item in manifest.tensors if item.file == name]
        before = victim.whole[name]
        plan = layout(kinds)
        tail = before[8 + int.from_bytes(before[:8], "little") :]
        if plan.size - len(plan.header) < 2**20:
            victim.put(
                name, plan.header + tail.ljust(plan.size - len(plan.header), b"\0")[: plan.size - len(plan.header)]
            )
            changed.append(name)
    return changed


def change_text(victim, draw):
    """A manifest that is no longer what JSON writes; its digest is right where there is one."""
    data = text(victim.whole[MANIFEST], draw)
    cut = data.rfind(b',\n "digest"')
    if cut >= 0 and draw.random() < 0.7:
        data = signed(data[:cut])
    victim.put(MANIFEST, data)
    return [MANIFEST]


def change_header(victim, draw):
    name = draw.choice([MODEL, STATE])
    victim.put(name, header(victim.whole[name], draw))
    return [name]


def load_parts(path):
    """Load as a run does that has saved `PARTS` at step 3."""
    return load_checkpoint(path, 3, {"state": like()["state"]}, Ranks("load"), on_host=False, accept=None)


CHANGES = {"manifest": change_manifest, "text": change_text, "header": change_header}
ROUTES = {
    "load": (load, CheckpointError),
    "load like": (lambda path: load(path, like=like()), (CheckpointError, StructureError)),
    "load partial": (lambda path: load(path, like=like(), partial=True), (CheckpointError, StructureError)),
    "load parts": (load_parts, (CheckpointError, StructureError)),
    "verify": (verify, CheckpointError),
    "inspect": (lambda path: list(inspection(path)), CheckpointError),
}


def peak():
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def fuzzed(tell, change, path, seed, tries):
    """Change and read as often as told; say how many were accepted, and what should not have been."""
    victim, draw = Victim(path), random.Random(seed)
    # Whoever looks at the manifest alone does not see the headers.
    routes = itertools.cycle(
        [(name, route) for name, route in ROUTES.items() if (change, name) != ("header", "inspect")]
    )
    for read, _ in ROUTES.values():
        read(path)
    accepted, wrong, slowest, memory = 0, [], 0.0, 0
    for number, (name, (read, errors)) in zip(range(tries), routes, strict=False):
        changed = CHANGES[change](victim, draw)
        untouched = all((path / file).read_bytes() == victim.whole[file] for file in changed)
        # Not what the change took: text of a deep tree has megabytes of spaces.
        began, before = time.process_time(), peak()
        try:
            read(path)
            accepted += not untouched
        except errors as error:
            # These are errors of what is read, and none of the machine.
            if untouched or isinstance(error.__cause__, MemoryError) or "allocate" in str(error):
                wrong.append((number, name, repr(error)[:300]))
        except BaseException as error:
            wrong.append((number, name, repr(error)[:300]))
        took = time.process_time() - began
        memory += peak() - before
        slowest = max(slowest, took)
        if took > SECONDS:
            wrong.append((number, name, f"{took:.1f} s"))
        victim.mend(changed)
    if memory > MEMORY:
        wrong.append((tries, change, f"{memory / 2**20:.0f} MB"))
    tell({"accepted": accepted, "wrong": wrong, "slowest": slowest, "memory": memory})


@quiet_forks
@pytest.mark.parametrize("change", CHANGES)
def test_only_errors_of_checkpoints_come_of_malformed_files(change, tmp_path):
    count = times({"manifest": 70_000, "text": 15_000, "header": 15_000}[change], 100) // SHARDS
    actual = []
    with tally(f"fuzz: {change}") as tries:
        for shard in range(SHARDS):
            path = tmp_path / f"step-{shard}"
            save(path, PARTS, step=3)
            tries.runs += count
            actual.append(forked(fuzzed, change, path, f"{change} {shard}", count))
            tries.failures += actual[-1]["wrong"]
        accepted = sum(each["accepted"] for each in actual)
        slowest, memory = max(each["slowest"] for each in actual), max(each["memory"] for each in actual) / 2**20
        tries.note = f"{accepted} were good after all; the slowest took {slowest:.2f} s, all of them {memory:.0f} MB"
        # Of a header nothing but the very bytes is good; of a manifest much is that somebody has signed.
        assert (accepted > 0) == (change != "header")


# What of trees is no tree, and would otherwise lose a leaf or mean another one
NONSENSE = {
    "keys that a dict takes for one": CONTAINERS[0],
    "a key twice": CONTAINERS[1],
    "fewer nodes than keys": CONTAINERS[2],
    "a key that is none": CONTAINERS[3],
    "a key that is a list": CONTAINERS[4],
    "a key that is a float": CONTAINERS[5],
    "a tuple of names": CONTAINERS[6],
    "a list from 1 on": {"kind": "list", "keys": [1, 2], "nodes": [None, {"tensor": 3}]},
    "a class that is a list": CONTAINERS[9],
    "a function": CONTAINERS[11],
    "a builtin": CONTAINERS[12],
    "a class without its static fields": CONTAINERS[14],
    "a class of other fields": CONTAINERS[15],
    "a class without fields": CONTAINERS[17],
    "no keys": CONTAINERS[19],
    "a tag without its static fields": CONTAINERS[22],
    "a tag of other fields": CONTAINERS[23],
    "a tag without fields": CONTAINERS[25],
    "a tag with a key that is a bool": CONTAINERS[26],
    "a tensor that is not there": {"tensor": 10**30},
    "a tensor by a bool": {"tensor": True},
    "a tensor and something": {"tensor": 0, "float": "nan"},
    "a number that is none": {"float": "much"},
    "a number too large": {"float": "0x1p99999"},
    "a complex number of one": {"complex": ["0x1p0"]},
    "an object of nothing": {},
    "a list that is no container": [1],
}


@pytest.mark.parametrize("tree", NONSENSE.values(), ids=NONSENSE)
def test_nonsense_in_a_manifest_is_refused(tree, tmp_path):
    save(tmp_path / "a", PARTS)
    victim = Victim(tmp_path / "a")
    victim.body["tree"]["nodes"][1] = tree
    victim.put(MANIFEST, signed(json.dumps(victim.body, indent=1).removesuffix("\n}").encode()))
    with pytest.raises(CheckpointError, match=r"(?i)manifest"):
        load(tmp_path / "a")


STRIDES = [
    [0, 0],
    [6, 0],
    [0, 1],
    [1, 1],
    [7, 1],
    [2**40, 1],
    [1, 2**61],
    [6, -1],
    [12, 2],
    [6],
    [6, 1, 1],
    [6.0, 1],
    "61",
    {},
]


@pytest.mark.parametrize("stride", STRIDES, ids=map(str, range(len(STRIDES))))
def test_strides_that_do_not_fill_a_memory_once_are_refused(stride, tmp_path):
    """Of a tensor whose bytes and digest are right: it would overlap, or take more memory than the file."""
    save(tmp_path / "a", PARTS)
    victim = Victim(tmp_path / "a")
    item = next(item for item in victim.body["tensors"] if item["shape"] == [4, 6])
    item["stride"] = stride
    victim.put(MANIFEST, signed(json.dumps(victim.body, indent=1).removesuffix("\n}").encode()))
    with pytest.raises(CheckpointError, match="MANIFEST"):
        load(tmp_path / "a")


def test_a_manifest_that_is_too_large_is_not_read(tmp_path):
    save(tmp_path / "a", {"x": state().rng})
    os.truncate(tmp_path / "a" / MANIFEST, 2**36)
    before = peak()
    with pytest.raises(CheckpointError, match=r"MANIFEST.json.*more than|more than.*MANIFEST.json"):
        load(tmp_path / "a")
    assert peak() - before < MEMORY
