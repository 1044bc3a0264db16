"""Hostile paths: files outside of a checkpoint are not opened, and rotation does not remove them."""

import json
import os
import shutil
import stat
import threading

import pytest

import ftrain as ft
from ftrain.checkpoint import files, load, save, verify
from ftrain.checkpoint.manifest import signed
from ftrain.checkpoint.reading import read_manifest
from ftrain.errors import CheckpointError, OptionError
from tests.faults.figures import record
from tests.faults.specimens import have_same_bits, state

MODEL, STATE, TEXT, MANIFEST = "params/model.safetensors", "state.safetensors", "params/config.json", "MANIFEST.json"
SECONDS = 20
READERS = {"load": load, "verify": verify, "read_manifest": read_manifest}


class Watched:
    """Stands for the module `os` in `ftrain.checkpoint.files`; notes which paths are opened, and which successfully."""

    def __init__(self):
        self.opened, self.succeeded = [], []

    def __getattr__(self, name):
        return getattr(os, name)

    def open(self, path, flags, *arguments):
        self.opened.append(os.path.realpath(path))
        descriptor = os.open(path, flags, *arguments)
        self.succeeded.append(os.path.realpath(path))
        return descriptor


@pytest.fixture(scope="module")
def tests_run():
    """The names of the tests of this file that have run."""
    return []


@pytest.fixture(scope="module", autouse=True)
def _figures(request, tests_run):
    """Records one row for all tests of this file; not with xdist, where no process knows all of them."""
    before = request.session.testsfailed
    yield
    if "PYTEST_XDIST_WORKER" not in os.environ:
        record("hostile paths", runs=len(tests_run), failures=request.session.testsfailed - before)


@pytest.fixture(autouse=True)
def _counted(request, tests_run):
    tests_run.append(request.node.name)


@pytest.fixture
def watched(monkeypatch):
    watched_os = Watched()
    monkeypatch.setattr(files, "os", watched_os)
    return watched_os


@pytest.fixture(scope="module")
def template(tmp_path_factory):
    path = tmp_path_factory.mktemp("template") / "checkpoint"
    save(path, {"state": state()}, texts={TEXT: "{}"})
    return path


@pytest.fixture
def checkpoint(tmp_path, template):
    # A copy, since syncing takes most of the time of a save.
    return shutil.copytree(template, tmp_path / "checkpoint")


@pytest.fixture
def secret(tmp_path):
    path = tmp_path / "elsewhere" / "secret.safetensors"
    path.parent.mkdir()
    path.write_bytes(b"secret")
    return path


def error_of(function, *arguments):
    """Call a function that must not block, for example on a FIFO; return its error, or None."""
    caught = []

    def call():
        try:
            function(*arguments)
        except Exception as error:
            caught.append(error)

    thread = threading.Thread(target=call, daemon=True)
    thread.start()
    thread.join(SECONDS)
    assert not thread.is_alive(), "it blocks"
    return caught[0] if caught else None


def refusal_of(function, *arguments):
    """Return the text of the CheckpointError that a function must raise, without blocking."""
    error = error_of(function, *arguments)
    assert type(error) is CheckpointError, error
    return str(error)


def sign(checkpoint, change):
    """Change a manifest, and give it a right digest."""
    body = json.loads((checkpoint / MANIFEST).read_text())
    body.pop("digest")
    change(body)
    (checkpoint / MANIFEST).write_bytes(signed(json.dumps(body, indent=1).removesuffix("\n}").encode()))


# Names in a manifest

BAD = {
    "above": "../elsewhere/secret.safetensors",
    "absolute": "{}",
    "through above": "params/../../elsewhere/secret.safetensors",
    "dot": "./secret.safetensors",
    "slash": "params//secret.safetensors",
    "hidden": ".secret.safetensors",
    "backslash": "..\\elsewhere\\secret.safetensors",
    "null": "secret\0.safetensors",
    "newline": "secret.safetensors\n",
    "drive": "C:secret.safetensors",
    "home": "~/secret.safetensors",
    "empty": "",
    "itself": "MANIFEST.json",
    "unicode": "\u2025/secret.safetensors",
}


@pytest.mark.parametrize("read", READERS.values(), ids=READERS)
@pytest.mark.parametrize("name", BAD.values(), ids=BAD)
@pytest.mark.parametrize("field", ["tensors", "files"])
def test_names_that_lead_elsewhere_are_refused(checkpoint, secret, watched, field, name, read):
    name = name.format(secret)

    def change(body):
        if field == "files":
            body["files"] = {name: body["files"][TEXT]}
        else:
            for item in body["tensors"]:
                item["file"] = name

    sign(checkpoint, change)
    assert MANIFEST in refusal_of(read, checkpoint)
    assert watched.opened == [str(checkpoint / MANIFEST)]


@pytest.mark.parametrize("name", [name for name in BAD.values() if name != "{}"])
def test_texts_that_lead_elsewhere_are_not_saved(tmp_path, secret, name):
    before = sorted(tmp_path.rglob("*"))
    with pytest.raises(OptionError, match="texts"):
        save(tmp_path / "a", {"state": state()}, texts={name: "x"})
    assert sorted(tmp_path.rglob("*")) == before
    assert secret.read_bytes() == b"secret"


# Each of these functions puts something at a path that is not a regular file.


def linked(path, secret):
    path.symlink_to(secret)


def linked_to_its_own_bytes(path, secret):
    path.symlink_to(secret.parent / "kept")


def linked_to_nothing(path, secret):
    path.symlink_to(secret.parent / "nothing")


def linked_to_itself(path, secret):
    path.symlink_to(path)


def linked_to_a_directory(path, secret):
    path.symlink_to(secret.parent)


def linked_to_a_device(path, secret):
    path.symlink_to("/dev/zero")


def fifo(path, secret):
    os.mkfifo(path)


def directory(path, secret):
    path.mkdir()


def socket(path, secret):
    os.mknod(path, stat.S_IFSOCK | 0o600)


IRREGULAR = (
    linked,
    linked_to_its_own_bytes,
    linked_to_nothing,
    linked_to_itself,
    linked_to_a_directory,
    linked_to_a_device,
    fifo,
    directory,
    socket,
)
irregular = pytest.mark.parametrize("put", IRREGULAR, ids=[put.__name__ for put in IRREGULAR])


@pytest.mark.parametrize("read", [load, verify], ids=["load", "verify"])
@irregular
@pytest.mark.parametrize("name", [MODEL, STATE, TEXT, MANIFEST])
def test_a_path_that_is_not_a_regular_file_is_refused_before_it_is_opened(checkpoint, secret, watched, name, put, read):
    shutil.copy(checkpoint / name, secret.parent / "kept")
    os.unlink(checkpoint / name)
    put(checkpoint / name, secret)
    assert name in refusal_of(read, checkpoint)
    inside = {str(checkpoint / other) for other in (MODEL, STATE, TEXT, MANIFEST) if other != name}
    assert set(watched.opened) <= inside


def test_a_device_is_refused_before_it_is_opened(checkpoint, watched, monkeypatch):
    """Simulated by `lstat`, since only root may make a device."""
    device = os.stat_result((stat.S_IFBLK | 0o600, *os.lstat(checkpoint / STATE)[1:]))

    def lstat(path):
        return device if path.name == STATE else os.lstat(path)

    monkeypatch.setattr(watched, "lstat", lstat, raising=False)
    assert "regular file" in refusal_of(load, checkpoint)
    assert str(checkpoint / STATE) not in watched.opened


@pytest.mark.parametrize("put", [linked, fifo], ids=["link", "fifo"])
def test_a_file_that_is_replaced_after_lstat_is_not_read(checkpoint, secret, watched, monkeypatch, put):
    """Another process may replace a file between `lstat` and `open`."""

    def lstat(path):
        result = os.lstat(path)
        if path.name == STATE and stat.S_ISREG(result.st_mode):
            os.unlink(path)
            put(path, secret)
        return result

    monkeypatch.setattr(watched, "lstat", lstat, raising=False)
    monkeypatch.setattr(files, "is_directory", lambda path: os.path.isdir(path))
    refusal_of(load, checkpoint)


@pytest.mark.parametrize("folder", ["params", "more"])
def test_a_directory_that_is_a_link_is_not_looked_into(checkpoint, secret, watched, folder):
    """Whether it has the expected files, or others."""
    if folder == "params":
        shutil.move(checkpoint / "params", secret.parent / "params")
        (checkpoint / "params").symlink_to(secret.parent / "params")
    else:
        (checkpoint / "more").symlink_to(secret.parent)
    assert folder in refusal_of(load, checkpoint)
    assert watched.opened == [str(checkpoint / MANIFEST)]


@pytest.mark.parametrize("put", [put for put in IRREGULAR if put is not directory], ids=lambda put: put.__name__)
def test_a_checkpoint_that_is_no_directory_is_refused_before_it_is_opened(checkpoint, secret, watched, put):
    put(checkpoint.parent / "other", secret)
    assert "is not a directory" in refusal_of(load, checkpoint.parent / "other")
    assert watched.opened == []


@irregular
def test_a_path_that_the_manifest_does_not_list_is_refused_before_it_is_opened(checkpoint, secret, watched, put):
    (checkpoint / "more").mkdir()
    put(checkpoint / "more" / "name", secret)
    if put is directory:
        # An empty directory is allowed.
        load(checkpoint)
        return
    assert "more/name" in refusal_of(load, checkpoint)
    assert watched.opened == [str(checkpoint / MANIFEST)]


# The directory of a run


def run_in(path, **options):
    return ft.Checkpoints(path, every=1, async_=False, **options)


def everything_in(path):
    """Return the bytes of all files below a path, None for what is not a file."""
    return {inner: inner.read_bytes() if inner.is_file() else None for inner in sorted(path.rglob("*"))}


def test_a_run_in_a_directory_that_is_a_link_goes_on(tmp_path):
    (tmp_path / "disk").mkdir()
    (tmp_path / "runs").symlink_to(tmp_path / "disk")
    parts = {"state": state()}
    with run_in(tmp_path / "runs", keep=2) as checkpoints:
        for step in (1, 2, 3):
            checkpoints.save(step, parts)
    assert run_in(tmp_path / "runs").steps() == [2, 3]
    assert have_same_bits(run_in(tmp_path / "runs").latest().parts, parts)


@irregular
def test_rotation_leaves_paths_that_are_not_checkpoints(tmp_path, secret, put):
    """A link with the name of a step is not a checkpoint of the run: it is not counted, and not removed."""
    shutil.copy(secret, secret.parent / "kept")
    before = everything_in(secret.parent)
    with run_in(tmp_path / "run", keep=1) as checkpoints:
        put(checkpoints.path(1), secret)
        for step in (2, 3, 4):
            checkpoints.save(step, {"state": state(step)})
        assert os.path.lexists(checkpoints.path(1)) or put is directory
        assert checkpoints.latest().step == 4
    assert not checkpoints.path(3).exists()
    assert everything_in(secret.parent) == before


def test_rotation_does_not_follow_a_link_to_a_checkpoint_elsewhere(tmp_path):
    with run_in(tmp_path / "other") as other:
        other.save(1, {"state": state()})
    before = everything_in(tmp_path / "other")
    with run_in(tmp_path / "run", keep=1) as checkpoints:
        checkpoints.path(1).symlink_to(other.path(1))
        for step in (2, 3):
            checkpoints.save(step, {"state": state(step)})
        assert checkpoints.steps() == [3]
        # A save of step 1 renames the link, and takes its name.
        checkpoints.save(1, {"state": state(5)})
    assert everything_in(tmp_path / "other") == before


def test_links_inside_a_checkpoint_are_removed_and_not_followed(tmp_path, secret):
    shutil.copy(secret, secret.parent / "kept")
    before = everything_in(secret.parent)
    with run_in(tmp_path / "run", keep=1) as checkpoints:
        checkpoints.save(1, {"state": state()})
        for put in IRREGULAR:
            put(checkpoints.path(1) / put.__name__, secret)
        (checkpoints.path(1) / "params" / "up").symlink_to(tmp_path)
        checkpoints.save(2, {"state": state()})
        assert checkpoints.steps() == [2]
    assert [path.name for path in (tmp_path / "run").iterdir() if "000000000001" in path.name] == []
    assert everything_in(secret.parent) == before


@irregular
def test_remains_of_a_save_that_lead_elsewhere_are_left(tmp_path, secret, watched, put):
    shutil.copy(secret, secret.parent / "kept")
    before = everything_in(secret.parent)
    (tmp_path / "run").mkdir()
    put(tmp_path / "run" / f".step-000000000001.{'0' * 32}.tmp", secret)
    with run_in(tmp_path / "run") as checkpoints:
        checkpoints.save(2, {"state": state()})
    assert checkpoints.steps() == [2]
    assert everything_in(secret.parent) == before
    # With O_NOFOLLOW, opening a link fails.
    assert not [path for path in watched.succeeded if path.startswith((str(secret.parent), "/dev"))]


@pytest.mark.parametrize("put", [linked, linked_to_nothing, fifo, directory, socket], ids=lambda put: put.__name__)
def test_a_lock_that_is_no_file_is_an_error(tmp_path, secret, put):
    (tmp_path / "run").mkdir()
    put(tmp_path / "run" / ".lock", secret)
    assert ".lock" in refusal_of(run_in(tmp_path / "run").__enter__) or put is fifo
    assert secret.read_bytes() == b"secret"
    assert not (secret.parent / "nothing").exists()


@pytest.mark.parametrize("put", [linked, linked_to_nothing, fifo], ids=lambda put: put.__name__)
def test_a_pin_that_is_no_file_pins_and_touches_nothing_else(tmp_path, secret, put):
    with run_in(tmp_path / "run", keep=1) as checkpoints:
        checkpoints.save(1, {"state": state()})
        put(tmp_path / "run" / "step-000000000001.pinned", secret)
        for step in (2, 3):
            checkpoints.save(step, {"state": state()})
        assert checkpoints.steps() == [1, 3]
    assert secret.read_bytes() == b"secret"
    assert not (secret.parent / "nothing").exists()


@pytest.mark.parametrize("name", ["step-0000000000007", "step-٠٠٠٠٠٠٠٠٠٠٠٧", "step-7", "step-000000000007.tmp"])
def test_names_that_are_almost_those_of_a_step_are_ignored(tmp_path, name):
    with run_in(tmp_path / "run", keep=2) as checkpoints:
        for step in (6, 7):
            checkpoints.save(step, {"state": state()})
        shutil.copytree(checkpoints.path(7), tmp_path / "run" / name)
        checkpoints.save(8, {"state": state()})
        assert checkpoints.steps() == [7, 8]
    assert (tmp_path / "run" / name).is_dir()
