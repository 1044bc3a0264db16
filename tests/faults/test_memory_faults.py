"""A host without memory: what fails is told from damage, and from faults of other kinds."""

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
    """Context in which this process may have so many more bytes of addresses than it has now."""

    def __init__(self, more):
        self.more = more

    def __enter__(self):
        self.before = resource.getrlimit(resource.RLIMIT_AS)
        pages = int(Path("/proc/self/statm").read_text().split()[0])
        resource.setrlimit(resource.RLIMIT_AS, (pages * mmap.PAGESIZE + self.more, self.before[1]))

    def __exit__(self, *_):
        resource.setrlimit(resource.RLIMIT_AS, self.before)


def raised(function, *given):
    try:
        function(*given)
    except Exception as error:
        return [type(error).__name__, str(error), is_out_of_memory(error)]
    return None


def reading(tell, path, stack):
    threading.stack_size(stack)
    with Limited(64 * MIB):
        failed = raised(load, path)
    threading.stack_size(0)
    tell([failed, raised(load, path)])


# There is no memory for the stack of a thread, or none for the tensor alone.
@pytest.mark.parametrize(("stack", "said"), [(128 * MIB, "can't start new thread"), (0, "can't allocate memory")])
def test_a_sound_checkpoint_is_not_called_damaged_where_memory_is_short(stack, said, tmp_path):
    save(tmp_path / "there", {"w": torch.ones(32 * MIB)})
    (kind, text, out), without_limit = forked(reading, tmp_path / "there", stack)
    assert (kind, out) == ("DeviceError", True), text
    assert "memory ran out while it was read" in text
    assert said in text
    assert without_limit is None


def going_on(tell, directory):
    with Limited(64 * MIB):
        failed = raised(ft.Checkpoints(directory, every=1).latest)
    tell([failed, ft.Checkpoints(directory, every=1).latest().step])


def test_a_run_does_not_go_back_to_an_older_checkpoint_for_want_of_memory(tmp_path):
    with ft.Checkpoints(tmp_path, every=1, async_=False) as checkpoints:
        for step, size in ((1, 8), (2, 32 * MIB)):
            checkpoints.save(step, {"state": {"w": torch.ones(size)}})
    (kind, text, _), step = forked(going_on, tmp_path)
    assert kind == "DeviceError", text
    assert step == 2


def test_damage_is_damage_still(tmp_path):
    save(tmp_path / "there", {"w": torch.ones(8)})
    (file,) = tmp_path.rglob("*.safetensors")
    file.write_bytes(file.read_bytes()[:-1])
    with pytest.raises(CheckpointError, match="cut off"):
        load(tmp_path / "there")


def unsaid():
    raise RuntimeError("could not create a primitive")


def short_of_memory(tell):
    results = [raised(unsaid)[2]]
    with Limited(64 * MIB):
        results += [raised(unsaid)[2], raised(mmap.mmap, -1, 256 * MIB), raised(bytearray, 256 * MIB)]
    tell(results)


def test_what_onednn_leaves_unsaid_is_memory_only_where_the_host_is_short_of_it():
    roomy, short, mapped, allocated = forked(short_of_memory)
    assert (roomy, short) == (False, True)
    assert [mapped[0], mapped[2]] == ["OSError", True]
    assert [allocated[0], allocated[2]] == ["MemoryError", True]


def test_a_fault_of_a_primitive_comes_through_as_it_is():
    tried = []

    def loss(params, batch):
        tried.append(len(batch))
        unsaid()

    step = ft.train_step(loss, ft.optim.sgd(0.1))
    with pytest.raises(RuntimeError, match="could not create a primitive") as caught:
        ft.fit(step, step.init({"w": torch.ones(1)}), [torch.ones(8)], on_oom="split", progress=False)
    assert not isinstance(caught.value, DeviceError)
    assert tried == [8]
