"""A compiler that fails: the step falls back with a log line and the right results; other errors are raised."""

import logging
import threading

import pytest
import torch
from torch._dynamo import register_backend
from torch._inductor.exc import CppCompileError

import ftrain as ft
from ftrain._torch import FakeTensorMode, active_modes
from ftrain.transforms.compile import capture, log_if_slow
from tests.bits import assert_same_bits
from tests.faults.problem import batch, make, params, squares

# A warning of Dynamo where it resumes after a graph break.
pytestmark = pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf:UserWarning")

FAILURES = {
    "ftrain_broken": RuntimeError("the linker is gone\nand more"),
    "ftrain_full": torch.OutOfMemoryError("out of memory"),
    "ftrain_stopped": KeyboardInterrupt(),
    "ftrain_wordy": RuntimeError("a " * 5000 + "missing bracket"),
    "ftrain_headers": CppCompileError(["g++"], "a.cpp:1:1: note\n a.cpp:1:10: fatal error: Python.h: No such file\n"),
}


@pytest.fixture(autouse=True, scope="module")
def _backends():
    """Registers compilers that fail, one that fails only on whole steps, and one whose code fails when it runs."""
    from torch._dynamo.backends import registry

    # torch registers its own backends at the first call only.
    torch.compiler.list_backends()
    before = dict(registry._COMPILER_FNS), dict(registry._BACKENDS)

    def failing(error):
        def compiler(graph, inputs):
            raise error

        return compiler

    def refuse_whole_steps(graph, inputs):
        targets = " ".join(str(node.target) for node in graph.graph.nodes)
        # The mean is of the loss, and the root of the update.
        if "mean" in targets and "sqrt" in targets:
            raise RuntimeError("too much at once")
        return graph

    def compile_to_bad_code(graph, inputs):
        def code(*arguments):
            raise RuntimeError("no such view")

        return code

    for name, error in FAILURES.items():
        register_backend(failing(error), name=name)
    register_backend(refuse_whole_steps, name="ftrain_partly")
    register_backend(compile_to_bad_code, name="ftrain_bad_code")
    yield
    for registered, kept in zip((registry._COMPILER_FNS, registry._BACKENDS), before, strict=True):
        registered.clear()
        registered.update(kept)
    torch._dynamo.reset()


def compiled_and_eager(caplog, loss=squares, **options):
    """Compare three compiled steps with three eager ones; return the compiled step and our log lines."""
    step, eager = make(loss, ft.compiled(**options)), make(loss)
    state, expected = step.init(params()), eager.init(params())
    with caplog.at_level(logging.WARNING, "ftrain"):
        for _ in range(3):
            (state, metrics), (expected, expected_metrics) = step(state, batch()), eager(expected, batch())
    assert_close(
        (state.params, state.opt_state, metrics["loss"]),
        (expected.params, expected.opt_state, expected_metrics["loss"]),
    )
    return step, [record.getMessage() for record in caplog.records if record.name == "ftrain"]


def assert_close(actual, expected):
    torch.testing.assert_close(ft.tree.leaves(actual), ft.tree.leaves(expected), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("donate", [False, True])
def test_a_whole_step_that_the_compiler_fails_on_is_split(donate, caplog):
    step, lines = compiled_and_eager(caplog, backend="ftrain_partly", donate=donate)
    assert "compiled(split" in repr(step)
    (line,) = lines
    assert "RuntimeError: too much at once (lowering='whole' raises the whole error)" in line


@pytest.mark.parametrize("donate", [False, True])
def test_a_split_step_that_the_compiler_fails_on_runs_eagerly(donate, caplog):
    step, lines = compiled_and_eager(caplog, backend="ftrain_broken", donate=donate)
    assert "compiled(eager" in repr(step)
    assert ["split into" in line for line in lines] == [True, False]
    assert "runs eagerly" in lines[1]
    assert "the linker is gone" in lines[1]
    assert "lowering='split' raises the whole error" in lines[1]


def test_a_long_reason_is_cut_in_the_repr_and_whole_in_the_log(caplog):
    step, lines = compiled_and_eager(caplog, backend="ftrain_wordy")
    assert "RuntimeError: a a a a" in repr(step)
    assert len(repr(step)) < 1000
    assert "missing bracket" in lines[-1]


def test_a_dynamic_step_that_the_compiler_fails_on_runs_eagerly(caplog):
    step, (line,) = compiled_and_eager(caplog, backend="ftrain_broken", dynamic=True)
    assert "compiled(eager" in repr(step)
    assert "the linker is gone" in line


def test_an_update_in_backward_that_cannot_be_compiled_runs_eagerly(caplog):
    step, eager = (
        make(squares, ft.update_in_backward(), *more) for more in ([ft.compiled(backend="ftrain_broken")], [])
    )
    state, _ = step(step.init(params()), batch())
    expected, _ = eager(eager.init(params()), batch())
    assert_same_bits(state.params, expected.params)
    assert "runs eagerly" in caplog.text


def test_a_step_whose_compiled_code_fails_in_its_first_run_runs_eagerly(caplog):
    step, lines = compiled_and_eager(caplog, backend="ftrain_bad_code")
    assert "compiled(eager" in repr(step)
    assert "no such view" in lines[-1]


def test_compiled_code_that_fails_and_may_have_written_to_the_state_is_an_error():
    step = make(squares, ft.compiled(backend="ftrain_bad_code", donate=True))
    with pytest.raises(RuntimeError, match="no such view"):
        step(step.init(params()), batch())


@pytest.mark.parametrize("lowering", ["whole", "split"])
def test_a_lowering_that_was_asked_for_shows_the_error(lowering):
    step = make(squares, ft.compiled(backend="ftrain_broken", lowering=lowering))
    state = step.init(params())
    before = ft.tree.clone(state)
    with pytest.raises(RuntimeError, match="the linker is gone\nand more"):
        step(state, batch())
    assert_same_bits(state, before)


@pytest.mark.parametrize("name", ["ftrain_full", "ftrain_stopped"])
def test_an_interrupt_and_a_lack_of_memory_are_raised(name, caplog):
    step = make(squares, ft.compiled(backend=name, donate=True))
    state = step.init(params())
    before = ft.tree.clone(state)
    with pytest.raises(type(FAILURES[name])):
        step(state, batch())
    assert_same_bits(state, before)
    assert not [record for record in caplog.records if record.name == "ftrain"]


def test_an_error_of_the_loss_is_raised(caplog):
    def loss(params, batch):
        if batch["x"].sum() > 0:  # Splits the step.
            raise KeyError("the user's own")
        return squares(params, batch)

    step = make(loss, ft.compiled(backend="eager"))
    state = step.init(params())
    for _ in range(2):
        with pytest.raises(KeyError, match="the user's own"):
            step(state, batch())
    assert "eagerly" not in caplog.text
    good, _ = step(state, {name: -leaf for name, leaf in batch().items()})
    assert int(good.step) == 1


def test_lower_says_that_a_step_runs_eagerly(caplog):
    step = make(squares, ft.compiled(backend="ftrain_broken", donate=True))
    state = step.init(params())
    lowered = step.lower(state, batch())
    assert (lowered.lowering, lowered.graphs) == ("eager", 0)
    (new, _), (expected, _) = step(state, batch()), make()(make().init(params()), batch())
    assert_same_bits(new.params, expected.params)


def test_a_plain_function_that_cannot_be_compiled_runs_uncompiled(caplog):
    def step(state, batch):
        return state + batch.sum(), {}

    compiled = ft.compiled(backend="ftrain_broken", donate=True)(step)
    assert float(compiled(torch.zeros(()), torch.ones(2))[0]) == 2
    assert "step runs uncompiled, since it cannot be compiled: RuntimeError: the linker is gone" in caplog.text


def test_an_optimizer_whose_state_is_elsewhere_and_a_loss_that_cannot_be_compiled(tmp_path, caplog):
    wrappers = ft.offload("opt_state", directory=tmp_path), ft.compiled(backend="ftrain_broken", donate=True)
    step, eager = make(squares, *wrappers), make(squares)
    state, expected = step.init(params()), eager.init(params())
    for _ in range(2):
        (state, _), (expected, _) = step(state, batch()), eager(expected, batch())
    assert_close(state.params, expected.params)
    assert "compiled(eager, donate)" in repr(step)


def test_without_a_c_compiler_a_step_runs_eagerly(tmp_path, caplog):
    from torch._inductor import config

    with config.patch({"cpp.cxx": (str(tmp_path / "no-such-compiler"),)}):
        step, lines = compiled_and_eager(caplog, cache_dir=tmp_path)
    assert "compiled(eager" in repr(step)
    assert "no-such-compiler" in lines[-1] or "C++" in lines[-1]


def test_the_log_line_has_the_error_of_the_c_compiler(caplog):
    step, lines = compiled_and_eager(caplog, backend="ftrain_headers")
    assert "compiled(eager" in repr(step)
    assert "CppCompileError: C++ compile error: a.cpp:1:10: fatal error: Python.h: No such file (" in lines[-1]


def test_a_step_runs_eagerly_if_dynamo_cannot_be_imported(monkeypatch, caplog):
    # With a `TORCHINDUCTOR_CACHE_DIR` that cannot be made, its import fails.
    def importing(**options):
        raise PermissionError(13, "Permission denied", "/read-only")

    monkeypatch.setattr(capture, "CaptureFakeTensorMode", importing)
    step, lines = compiled_and_eager(caplog, backend="ftrain_broken")
    assert "compiled(eager" in repr(step)
    assert "cannot be compiled: PermissionError: [Errno 13] Permission denied: '/read-only'" in lines[0]


@pytest.mark.parametrize("slow", [False, True])
@pytest.mark.parametrize("lowering", ["whole", "split"])
def test_a_log_line_says_which_graph_is_compiled_when_that_takes_long(lowering, slow, monkeypatch):
    lines, has_logged = [], threading.Event()

    class RecordingHandler(logging.Handler):
        def emit(self, record):
            lines.append(record.getMessage())
            has_logged.set()

    class WaitsForTheLog(torch.nn.Linear):
        def forward(self, x):
            if slow and len(lines) == 0:
                assert has_logged.wait(60)
            return super().forward(x)

    monkeypatch.setattr(log_if_slow, "SLOW", 0.0 if slow else 1e6)
    handler, logger = RecordingHandler(), logging.getLogger("ftrain.compiling")
    logger.addHandler(handler)
    try:
        model = torch.nn.Sequential(
            torch.nn.Sequential(WaitsForTheLog(3, 3)), torch.nn.Sequential(WaitsForTheLog(3, 3))
        )
        loss = ft.from_module(model, lambda model, x: model(x).square().mean())
        step = ft.compiled(lowering=lowering, backend="eager")(ft.train_step(loss, ft.optim.sgd(0.1)))
        state = step.init()
        for _ in range(2):
            state, _ = step(state, torch.ones(2, 3))
    finally:
        logger.removeHandler(handler)
    if not slow:
        assert lines == []
        return
    first, last = lines
    assert first.startswith("compiled: compiling the graph of loss(Sequential), since ")
    assert last.startswith("compiled: the graph of loss(Sequential) took ")


def test_an_interrupt_while_a_mode_of_torch_is_entered_does_not_leave_it_active(monkeypatch):
    step, entered = make(squares, ft.compiled(backend="eager")), FakeTensorMode.__enter__
    state = step.init(params())

    def interrupted(mode):
        entered(mode)
        raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        patched.setattr(FakeTensorMode, "__enter__", interrupted)
        with pytest.raises(KeyboardInterrupt):
            step(state, batch())
    assert not active_modes()
    step(state, batch())
