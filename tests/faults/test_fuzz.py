"""Malformed manifests and headers: refused with a CheckpointError, quickly and in little memory.

A changed manifest gets a right digest, so that the checks are tested and not the digest.
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
"""Child processes of a test, each with its own seed: the peak of memory of one does not hide that of another."""

PARTS = {"state": state(), "run": everything()}


def like():
    return PARTS


# Pieces that are put into a manifest

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
    """Return a nested tree of this depth: of lists if it is even, of containers if it is odd."""
    for _ in range(depth):
        piece = {"kind": "list", "keys": [0], "nodes": [piece]} if depth % 2 else [piece]
    return piece


def piece(draw):
    """Return a random piece to put into a manifest."""
    source = draw.choice([NUMBERS, FLOATS, NAMES, SCALARS, CONTAINERS, SHAPES, [None, True, False, [], {}]])
    if draw.random() < 0.02:
        return deep(draw.choice([50, 51, 400, 401, 3001, 3000]))
    return copy.deepcopy(draw.choice(source))


def places(tree, actual):
    """Append (container, key) for each node of a tree."""
    stack = [tree]
    while stack:
        node = stack.pop()
        items = list(node.items() if isinstance(node, dict) else enumerate(node) if isinstance(node, list) else ())
        actual += [(node, key) for key, _ in items]
        stack += [child for _, child in items]
    return actual


def copied(tree):
    try:
        return copy.deepcopy(tree)
    except RecursionError:
        # An earlier change has put a deep tree there.
        return None


def mutate(body, draw):
    """Change a manifest at one to three random nodes."""
    for _ in range(draw.choice([1, 1, 1, 2, 3])):
        if draw.random() < 0.4:
            one(body, draw)
            continue
        actual = places(body, [])
        if not actual:
            return
        node, key = draw.choice(actual)
        choice = draw.random()
        if choice < 0.6:
            node[key] = piece(draw)
        elif choice < 0.75:
            del node[key]
        elif choice < 0.85:
            other, key_of_other = draw.choice(actual)
            node[key] = copied(other[key_of_other]) if _within(key_of_other, other) else None
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


# Changes of the text


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


# Reading changed checkpoints


class Victim:
    """A checkpoint whose files are changed and mended again."""

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
    """Write a changed manifest with a right digest, sometimes with matching headers; return the changed files."""
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
        infos = [TensorInfo(item.key, DTYPES[item.dtype], item.shape) for item in manifest.tensors if item.file == name]
        before = victim.whole[name]
        plan = layout(infos)
        rest = before[8 + int.from_bytes(before[:8], "little") :]
        if plan.size - len(plan.header) < 2**20:
            victim.put(
                name, plan.header + rest.ljust(plan.size - len(plan.header), b"\0")[: plan.size - len(plan.header)]
            )
            changed.append(name)
    return changed


def change_text(victim, draw):
    """Write a manifest with a changed text, often with a right digest; return the changed files."""
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
    """Load as a run does that resumes from `PARTS` at step 3."""
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


def fuzzed(send, change, path, seed, tries):
    """Change and read a checkpoint many times; send how many were accepted, and the wrong results."""
    victim, draw = Victim(path), random.Random(seed)
    # `inspect` reads only the manifest, so it does not see a changed header.
    routes = itertools.cycle(
        [(name, route) for name, route in ROUTES.items() if (change, name) != ("header", "inspect")]
    )
    for read, _ in ROUTES.values():
        read(path)
    accepted, problems, slowest, memory = 0, [], 0.0, 0
    for number, (name, (read, errors)) in zip(range(tries), routes, strict=False):
        changed = CHANGES[change](victim, draw)
        untouched = all((path / file).read_bytes() == victim.whole[file] for file in changed)
        # Measured without the change itself: the text of a deep tree has megabytes of spaces.
        start, before = time.process_time(), peak()
        try:
            read(path)
            accepted += not untouched
        except errors as error:
            # A good file must load, and a lack of memory is a wrong reason to refuse a file.
            if untouched or isinstance(error.__cause__, MemoryError) or "allocate" in str(error):
                problems.append((number, name, repr(error)[:300]))
        except BaseException as error:
            problems.append((number, name, repr(error)[:300]))
        seconds = time.process_time() - start
        memory += peak() - before
        slowest = max(slowest, seconds)
        if seconds > SECONDS:
            problems.append((number, name, f"{seconds:.1f} s"))
        victim.mend(changed)
    if memory > MEMORY:
        problems.append((tries, change, f"{memory / 2**20:.0f} MB"))
    send({"accepted": accepted, "wrong": problems, "slowest": slowest, "memory": memory})


@quiet_forks
@pytest.mark.parametrize("change", CHANGES)
def test_only_errors_of_checkpoints_come_of_malformed_files(change, tmp_path):
    count = times({"manifest": 70_000, "text": 15_000, "header": 15_000}[change], 100) // SHARDS
    results = []
    with tally(f"fuzz: {change}") as tries:
        for shard in range(SHARDS):
            path = tmp_path / f"step-{shard}"
            save(path, PARTS, step=3)
            tries.runs += count
            results.append(forked(fuzzed, change, path, f"{change} {shard}", count))
            tries.failures += results[-1]["wrong"]
        accepted = sum(result["accepted"] for result in results)
        slowest, memory = (
            max(result["slowest"] for result in results),
            max(result["memory"] for result in results) / 2**20,
        )
        tries.note = f"{accepted} were good after all; the slowest took {slowest:.2f} s, all of them {memory:.0f} MB"
        # A changed header is never accepted; a changed manifest with a right digest may be a valid one.
        assert (accepted > 0) == (change != "header")


# Malformed trees that would lose a leaf, or give it another path, if they were accepted
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
    """The bytes and the digest of the tensor are right, but it would overlap itself or need more memory."""
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
