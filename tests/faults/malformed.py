"""Malformed manifests and headers, drawn at random, and a checkpoint whose files are replaced by them.

A changed manifest gets a right digest, so that the checks are tested and not the digest.
"""

import copy
import json

from ftrain.checkpoint.layout import TensorInfo, layout
from ftrain.checkpoint.manifest import DTYPES, parse, signed
from ftrain.errors import CheckpointError
from tests.faults.specimens import everything, state

MANIFEST, MODEL, STATE = "MANIFEST.json", "params/model.safetensors", "state.safetensors"
PARTS = {"state": state(), "run": everything()}
"""What the checkpoint holds."""

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
MALFORMED_CONTAINERS = {
    "keys that a dict takes for one": {"kind": "dict", "keys": [True, 1], "nodes": [{"tensor": 0}, {"tensor": 1}]},
    "a key twice": {"kind": "dict", "keys": ["a", "a"], "nodes": [None, None]},
    "fewer nodes than keys": {"kind": "dict", "keys": ["a"], "nodes": []},
    "a key that is none": {"kind": "dict", "keys": [None], "nodes": [None]},
    "a key that is a list": {"kind": "dict", "keys": [[]], "nodes": [None]},
    "a key that is a float": {"kind": "dict", "keys": [0.5], "nodes": [None]},
    "a tuple of names": {"kind": "tuple", "keys": ["x", "y"], "nodes": [None, {"tensor": 3}]},
    "a list from 1 on": {"kind": "list", "keys": [1, 2], "nodes": [None, {"tensor": 3}]},
    "a class that is a list": {"kind": ["list"], "keys": [], "nodes": []},
    "a function": {"kind": "os.system", "keys": ["command"], "nodes": ["true"]},
    "a builtin": {"kind": "builtins.eval", "keys": [], "nodes": [], "static": ["1"]},
    "a class without its static fields": {
        "kind": "ftrain.types.Mean",
        "keys": ["total", "weight"],
        "nodes": [1, 2],
        "static": [],
    },
    "a class of other fields": {
        "kind": "ftrain.types.Mean",
        "keys": ["weight", "other"],
        "nodes": [1, 2],
        "static": [False],
    },
    "a class without fields": {"kind": "ftrain.types.TrainState", "keys": [], "nodes": []},
    "no keys": {"kind": "dict"},
    "a tag without its static fields": {"kind": "Mean", "keys": ["total", "weight"], "nodes": [1, 2], "static": []},
    "a tag of other fields": {"kind": "Mean", "keys": ["weight", "other"], "nodes": [1, 2], "static": [False]},
    "a tag without fields": {"kind": "TrainState", "keys": [], "nodes": []},
    "a tag with a key that is a bool": {"kind": "TrainState", "keys": ["step", True], "nodes": [None, None]},
}
"""Containers that would lose a leaf, or give it another path, if they were accepted."""

CONTAINERS = [
    *MALFORMED_CONTAINERS.values(),
    {"kind": "list", "keys": 3, "nodes": "abc"},
    {"kind": "list", "keys": "ab", "nodes": [1, 2]},
    {"kind": {}, "keys": [], "nodes": []},
    {"kind": "ftrain.types.Mean", "keys": ["total", "weight"], "nodes": [1, 2], "static": [False]},
    {"kind": "ftrain.types.Mean", "keys": ["total", "weight"], "nodes": [1, 2], "static": [{"a": []}]},
    {"kind": "ftrain.types.TrainState", "keys": ["step", True], "nodes": [None, None]},
    {"kind": None},
    {"kind": "Mean", "keys": ["total", "weight"], "nodes": [1, 2], "static": [False]},
    {"kind": "Mean", "keys": ["total", "weight"], "nodes": [1, 2], "static": [{"a": []}]},
    {"kind": "namedtuple Mean", "keys": ["total", "weight"], "nodes": [1, 2]},
]
SHAPES = [
    *([-1], [2**62], [2**61, 0], [0, 2**61, 2**61], [2**61, 2**61, 0], [2**33, 2**33], [2**31] * 2 + [0], [0] * 64),
    *([1] * 64, [1] * 65, [2] * 64, [1] * 5000, [True], [3.0], ["3"], [[3]], [None], {"0": 3}, 3, "33", [2**62 - 1, 0]),
    *([1, 0, 2**62 - 1], [4, 6], [24], [2, 2, 2, 3], [3], [0, 3], [6, 4]),
]


def deep(depth):
    """Return a nested tree of this depth, whose levels are in turn lists and containers."""
    tree = None
    for level in range(depth):
        tree = [tree] if level % 2 else {"kind": "list", "keys": [0], "nodes": [tree]}
    return tree


def random_piece(draw):
    """Return a random piece to put into a manifest."""
    pieces = draw.choice([NUMBERS, FLOATS, NAMES, SCALARS, CONTAINERS, SHAPES, [None, True, False, [], {}]])
    if draw.random() < 0.02:
        return deep(draw.choice([50, 51, 400, 401, 3001, 3000]))
    return copy.deepcopy(draw.choice(pieces))


def places(tree):
    """Return the (container, key) of every node of a tree but its root."""
    found, stack = [], [tree]
    while stack:
        node = stack.pop()
        if isinstance(node, dict):
            items = list(node.items())
        elif isinstance(node, list):
            items = list(enumerate(node))
        else:
            continue
        found += [(node, key) for key, _ in items]
        stack += [child for _, child in items]
    return found


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
            mutate_field(body, draw)
        elif nodes := places(body):
            mutate_node(*draw.choice(nodes), nodes, draw)


def mutate_node(container, key, nodes, draw):
    """Replace, remove, copy, rename or repeat the node of a container at a key."""
    choice = draw.random()
    if choice < 0.6:
        container[key] = random_piece(draw)
    elif choice < 0.75:
        del container[key]
    elif choice < 0.85:
        source, source_key = draw.choice(nodes)
        container[key] = copied(source[source_key])
    elif isinstance(container, dict):
        container[draw.choice(NAMES)] = container.pop(key)
    else:
        container.insert(key, copied(container[key]))


def mutate_field(body, draw):
    """Change a field of a random tensor, or the tree, which are checked by themselves."""
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


def mutated_text(data, draw):
    """Return a manifest that is changed as text."""
    start = draw.randrange(len(data))
    end = draw.randrange(len(data))
    return draw.choice(
        [
            lambda: data[:start] + draw.randbytes(draw.randint(1, 8)) + data[start:],
            lambda: data[:start] + data[end:],
            lambda: data[:start] + data[min(start, end) : max(start, end)] + data[start:],
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


def mutated_header(data, draw):
    """Return a safetensors file with another header, or another length of its header."""
    length = int.from_bytes(data[:8], "little")
    before, rest = data[8 : 8 + length], data[8 + length :]
    if draw.random() < 0.3:
        wrong = draw.choice([0, 1, 7, length - 1, length + 1, len(data), 2**31, 2**63, 2**64 - 1])
        return wrong.to_bytes(8, "little") + data[8:]
    if draw.random() < 0.3:
        body = mutated_text(before, draw)
    else:
        tensors = json.loads(before)
        mutate(tensors, draw)
        try:
            body = json.dumps(tensors, separators=(",", ":")).encode()
        except (RecursionError, ValueError):
            body = before[::-1]
        body += b" " * (length - len(body))
    return len(body).to_bytes(8, "little") + body + rest


# Changes of the files


class ChangedCheckpoint:
    """A checkpoint whose files are replaced and restored.

    `original` has the bytes of its files, and `body` the values of its manifest without the digest.
    """

    def __init__(self, path):
        self.path = path
        self.original = {name: (path / name).read_bytes() for name in (MANIFEST, MODEL, STATE)}
        self.body = json.loads(self.original[MANIFEST])
        self.body.pop("digest")

    def write(self, name, data):
        (self.path / name).write_bytes(data)

    def restore(self, names):
        for name in names:
            self.write(name, self.original[name])


def manifest_of(body):
    """Return the text of a manifest with these values and a right digest."""
    return signed(json.dumps(body, indent=1).removesuffix("\n}").encode())


def change_manifest(checkpoint, draw):
    """Write a changed manifest with a right digest, sometimes with matching headers; return the changed files."""
    body = copy.deepcopy(checkpoint.body)
    mutate(body, draw)
    try:
        data = manifest_of(body)
    except (RecursionError, ValueError):
        return []
    checkpoint.write(MANIFEST, data)
    return [MANIFEST, *([] if draw.random() < 0.5 else write_headers(checkpoint, data))]


def write_headers(checkpoint, manifest_data):
    """Write the headers that a manifest asks for, if it can be read; return the changed files."""
    try:
        manifest = parse(manifest_data)
    except CheckpointError:
        return []
    changed = []
    for name in (MODEL, STATE):
        infos = [TensorInfo(item.key, DTYPES[item.dtype], item.shape) for item in manifest.tensors if item.file == name]
        plan = layout(infos)
        size = plan.size - len(plan.header)
        if size < 2**20:
            original = checkpoint.original[name]
            tensors = original[8 + int.from_bytes(original[:8], "little") :]
            checkpoint.write(name, plan.header + tensors.ljust(size, b"\0")[:size])
            changed.append(name)
    return changed


def change_text(checkpoint, draw):
    """Write a manifest with a changed text, often with a right digest; return the changed files."""
    data = mutated_text(checkpoint.original[MANIFEST], draw)
    end = data.rfind(b',\n "digest"')
    if end >= 0 and draw.random() < 0.7:
        data = signed(data[:end])
    checkpoint.write(MANIFEST, data)
    return [MANIFEST]


def change_header(checkpoint, draw):
    """Write one of the files of tensors with a changed header; return the changed files."""
    name = draw.choice([MODEL, STATE])
    checkpoint.write(name, mutated_header(checkpoint.original[name], draw))
    return [name]
