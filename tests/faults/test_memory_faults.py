"""A host without memory: the error differs from that of damage, and from other errors."""

import mmap
import resource
import threading
from pathlib import Path

import pytest
import torch

import ftrain as ft
from ftrain.backends.oom import is_out_of_memory
from ftrain.checkpoint import load, save
from ftrain.errors import CheckpointError, DeviceError
from tests.faults.forks import forked, quiet_forks

pytestmark = quiet_forks
MIB = 1 << 20


class Limited:
    """Context in which the address space of this process may grow by at most `more` bytes."""

    def __init__(self, more):
        self.more = more

    def __enter__(self):
        self.before = resource.getrlimit(resource.RLIMIT_AS)
        pages = int(Path("/proc/self/statm").read_text().split()[0])
        resource.setrlimit(resource.RLIMIT_AS, (pages * mmap.PAGESIZE + self.more, self.before[1]))

    def __exit__(self, *_):
        resource.setrlimit(resource.RLIMIT_AS, self.before)


def raised(function, *arguments):
    """Return the class and text of the error of a function, and whether it counts as a lack of memory; or None."""
    try:
        function(*arguments)
    except Exception as error:
        return [type(error).__name__, str(error), is_out_of_memory(error)]
    return None


def reading(send, path, stack):
    threading.stack_size(stack)
    with Limited(64 * MIB):
        error = raised(load, path)
    threading.stack_size(0)
    send([error, raised(load, path)])


# There is no memory for the stack of a thread, or none for the tensor alone.
@pytest.mark.parametrize(("stack", "expected"), [(128 * MIB, "can't start new thread"), (0, "can't allocate memory")])
def test_a_sound_checkpoint_is_not_called_damaged_where_memory_is_short(stack, expected, tmp_path):
    save(tmp_path / "there", {"w": torch.ones(32 * MIB)})
    (error_class, text, is_memory), without_limit = forked(reading, tmp_path / "there", stack)
    assert (error_class, is_memory) == ("DeviceError", True), text
    assert "memory ran out while it was read" in text
    assert expected in text
    assert without_limit is None


def going_on(send, directory):
    with Limited(64 * MIB):
        error = raised(ft.Checkpoints(directory, every=1).latest)
    send([error, ft.Checkpoints(directory, every=1).latest().step])


def test_a_run_does_not_go_back_to_an_older_checkpoint_for_want_of_memory(tmp_path):
    with ft.Checkpoints(tmp_path, every=1, async_=False) as checkpoints:
        for step, size in ((1, 8), (2, 32 * MIB)):
            checkpoints.save(step, {"state": {"w": torch.ones(size)}})
    (error_class, text, _), step = forked(going_on, tmp_path)
    assert error_class == "DeviceError", text
    assert step == 2


def test_damage_is_an_error_of_the_checkpoint_and_not_of_memory(tmp_path):
    save(tmp_path / "there", {"w": torch.ones(8)})
    (file,) = tmp_path.rglob("*.safetensors")
    file.write_bytes(file.read_bytes()[:-1])
    with pytest.raises(CheckpointError, match="cut off"):
        load(tmp_path / "there")


def fail_without_a_reason():
    raise RuntimeError("could not create a primitive")


def short_of_memory(send):
    results = [raised(fail_without_a_reason)[2]]
    with Limited(64 * MIB):
        results += [raised(fail_without_a_reason)[2], raised(mmap.mmap, -1, 256 * MIB), raised(bytearray, 256 * MIB)]
    send(results)


def test_an_error_of_onednn_without_a_reason_counts_as_memory_only_where_memory_is_short():
    roomy, short, mapped, allocated = forked(short_of_memory)
    assert (roomy, short) == (False, True)
    assert [mapped[0], mapped[2]] == ["OSError", True]
    assert [allocated[0], allocated[2]] == ["MemoryError", True]


def test_an_error_of_onednn_in_a_step_is_not_taken_for_a_lack_of_memory():
    lengths = []

    def loss(params, batch):
        lengths.append(len(batch))
        fail_without_a_reason()

    step = ft.train_step(loss, ft.optim.sgd(0.1))
    with pytest.raises(RuntimeError, match="could not create a primitive") as caught:
        ft.fit(step, step.init({"w": torch.ones(1)}), [torch.ones(8)], on_oom="split", progress=False)
    assert not isinstance(caught.value, DeviceError)
    assert lengths == [8]
