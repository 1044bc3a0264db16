"""`fit(on_oom="split")`: a run splits its batches further until they fit, keeps that number, resumes and replays."""

import signal

import pytest
import torch

import ftrain as ft
from ftrain.backends.oom import is_out_of_memory
from ftrain.errors import CheckpointError, ComposeError, ConsumedError, DeviceError, LossError, OptionError
from tests.training.out_of_memory import (
    assert_close,
    batches,
    count_operations,
    fit,
    loss_that_fits,
    loss_without_dropout,
    make_step,
    out_of_memory_at,
    params,
    splits,
    train_by_hand,
)
from tests.training.problem import assert_bitwise


def test_a_run_splits_until_the_pieces_fit_and_says_so_once(capsys):
    data = [*batches(3), *batches(1, 1)]
    state, history = fit(make_step(loss=loss_that_fits(2)), data, progress=True)
    assert_close(state, train_by_hand(make_step(loss=loss_without_dropout), data))
    assert splits(history) == {1: 4}
    output = capsys.readouterr()
    assert (output.out + output.err).count("out of memory") == 1


def test_a_later_batch_that_is_larger_splits_further():
    data = [*batches(2, 4), *batches(2, 12), *batches(1, 5)]
    state, history = fit(make_step(loss=loss_that_fits(3)), data)
    assert splits(history) == {1: 2, 3: 4}
    assert_close(state, train_by_hand(make_step(loss=loss_without_dropout), data))


@pytest.mark.parametrize("every", [1, 2])
def test_a_resumed_run_keeps_its_split(tmp_path, every):
    lengths = []
    step, data = make_step(loss=loss_that_fits(3, lengths=lengths)), batches(4)
    expected, _ = fit(step, data, steps=4)
    fit(step, data, steps=2, checkpoints=ft.Checkpoints(tmp_path, every=every))
    lengths.clear()
    state, history = fit(step, data, steps=4, checkpoints=ft.Checkpoints(tmp_path, every=every))
    assert_bitwise(state, expected)
    assert lengths == [3] * 4, "what does not fit is tried again"
    assert splits(history) == {1: 2}
    assert history["step"] == [1, 2, 3, 4]


def test_a_metric_called_split_is_an_error_only_if_the_run_may_split():
    """A resumed run would take it for the number of pieces."""

    def loss_with_metric(params, batch):
        return loss_without_dropout(params, batch)[0], {"split": torch.tensor(2)}

    step = make_step(loss=loss_with_metric)
    with pytest.raises(LossError, match="fit: a metric is called 'split'"):
        fit(step, batches(3))
    assert fit(step, batches(3), on_oom="raise").history["split"] == [2, 2, 2]


def test_a_signal_ends_the_run_before_a_step_is_tried_again(tmp_path):
    lengths = []

    def loss(params, batch):
        """Fits in the first call only; a signal comes in the third, which is the first with half a batch."""
        lengths.append(len(batch["x"]))
        if len(lengths) == 3:
            signal.raise_signal(signal.SIGTERM)
        if len(lengths) > 1:
            raise torch.OutOfMemoryError("out of memory")
        return loss_without_dropout(params, batch)

    checkpoints = ft.Checkpoints(tmp_path, every=9)
    with pytest.raises(SystemExit) as caught:
        fit(make_step(loss=loss), batches(3), checkpoints=checkpoints)
    assert caught.value.code == 143
    assert lengths == [6, 6, 3]
    assert checkpoints.steps() == [1]


@pytest.mark.parametrize(("every", "keep"), [(2, 9), (3, 1), (7, 1)])
def test_a_replay_makes_steps_in_as_many_pieces(tmp_path, every, keep):
    """Also from a checkpoint that was saved before the split, and from the beginning."""
    step, data = make_step(), batches(7)
    initial = step.init(params())
    states = [ft.tree.clone(initial)]
    checkpoints = ft.Checkpoints(tmp_path, every=every, keep=keep)

    def record_state(state):
        states.append(ft.tree.clone(state))
        return {}

    with out_of_memory_at(4, 5):
        _, history = fit(step, data, checkpoints=checkpoints, evaluate=record_state, evaluate_every=1)
    assert splits(history) == {5: 2}
    for at in range(1, 8):
        state, batch = ft.replay(step, initial, data, checkpoints, at=at)
        assert_bitwise(state, states[at - 1])
        assert_bitwise(batch, data[at - 1])
    # Without the pieces the rounding differs, so that the comparison above can fail.
    with pytest.raises(AssertionError):
        assert_bitwise(train_by_hand(step, data), states[7])


def test_a_reload_takes_back_history_log_and_position(tmp_path):
    """The run continues from the checkpoint of step 4 after memory has run out in step 6."""

    def make_loader():
        return ft.data.loader(ft.data.arrays(batches(1, 24)[0] | {"scale": torch.ones(24)}), 6, seed=3)

    step = make_step()
    expected_checkpoints = ft.Checkpoints(tmp_path / "a", every=2)
    expected, _ = fit(step, make_loader(), steps=7, checkpoints=expected_checkpoints, on_oom="raise")
    with out_of_memory_at(5, count_operations(step, 1) - 1) as mode:
        state, history = fit(
            step,
            make_loader(),
            steps=7,
            log_every=3,
            checkpoints=ft.Checkpoints(tmp_path / "b", every=2),
            loggers=[ft.loggers.jsonl(tmp_path / "log")],
        )
    assert mode.remaining == 0
    assert splits(history) == {5: 2}
    assert history["step"] == [1, 2, 3, 4, 5, 6, 7]
    assert history["seconds"] == sorted(history["seconds"])
    assert len((tmp_path / "log").read_text().splitlines()) == 7
    assert_close(state, expected)


def test_a_reload_needs_data_that_can_be_iterated_again(tmp_path):
    step = make_step()
    with (
        out_of_memory_at(1, count_operations(step, 1) - 1),
        pytest.raises(DeviceError, match="can be iterated only once"),
    ):
        fit(step, iter(batches(3)), checkpoints=ft.Checkpoints(tmp_path, every=1))


def test_a_reload_from_damaged_checkpoints_is_an_error(tmp_path):
    class DamagingData:
        """Data that empties the files of all checkpoints before each batch after the first."""

        def __iter__(self):
            first, *later = batches(3)
            yield first
            for batch in later:
                for file in tmp_path.rglob("*.safetensors"):
                    file.write_bytes(b"")
                yield batch

    step = make_step()
    checkpoints = ft.Checkpoints(tmp_path, every=1, async_=False)
    with out_of_memory_at(1, count_operations(step, 1) - 1) as mode, pytest.raises(CheckpointError) as caught:
        fit(step, DamagingData(), checkpoints=checkpoints)
    assert mode.remaining == 0
    with pytest.raises(ConsumedError):
        _ = caught.value.result.state.params


def test_a_single_example_that_does_not_fit_is_an_error():
    with pytest.raises(DeviceError, match="one example at a time") as caught:
        fit(make_step(loss=loss_that_fits(0)), batches(1))
    assert is_out_of_memory(caught.value.__cause__)


def test_the_error_of_a_single_example_says_what_would_need_less_memory():
    # So many parameters that the state takes most of the memory, and the report proposes smaller optimizer state.
    wide = {
        "w1": torch.randn(3, 1 << 20, dtype=torch.float64),
        "w2": torch.randn(1 << 20, dtype=torch.float64),
    }
    step = make_step(loss=loss_without_dropout)
    text = r"(?s)optimizer state.*What would need less.*ft\.optim\.adamw_8bit"
    with out_of_memory_at(0, 3, times=100), pytest.raises(DeviceError, match=text) as caught:
        fit(step, batches(1), step.init(wide))
    assert int(caught.value.result.state.step) == 0


def test_a_batch_that_cannot_be_split_is_an_error():
    with pytest.raises(DeviceError, match="cannot be split"):
        fit(make_step(loss=loss_that_fits(0)), [{"x": torch.zeros(3), "y": torch.zeros(4)}])


def test_an_error_that_does_not_say_out_of_memory_is_raised_unchanged():
    error = RuntimeError("shapes cannot be multiplied")

    def failing_loss(params, batch):
        raise error

    with pytest.raises(RuntimeError) as caught:
        fit(make_step(loss=failing_loss), batches(1))
    assert caught.value is error


def test_on_oom_raise_raises_the_error_of_the_device():
    with pytest.raises(torch.OutOfMemoryError):
        fit(make_step(loss=loss_that_fits(2)), batches(1), on_oom="raise")


def test_an_unknown_on_oom_is_refused():
    with pytest.raises(OptionError, match="on_oom"):
        fit(make_step(), batches(1), on_oom="skip")


def test_a_plain_function_cannot_be_split():
    with pytest.raises(ComposeError, match="needs a Step"):
        fit(lambda state, batch: (state, {}), batches(1), make_step().init(params()))


def test_an_error_of_a_model_in_a_small_piece_gets_a_note_about_the_split():
    """BatchNorm needs two examples, and a piece has one."""
    net = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.BatchNorm1d(4))

    def criterion(model, batch):
        if len(batch["x"]) > 2:
            raise torch.OutOfMemoryError("out of memory")
        return model(batch["x"]).square().mean()

    step = make_step(loss=ft.from_module(net, criterion))
    with pytest.raises(ValueError, match="more than 1 value per channel") as caught:
        fit(step, [{"x": torch.randn(8, 3)}, {"x": torch.randn(5, 3)}], step.init())
    notes = " ".join(caught.value.__notes__)
    assert "split the batch into pieces of 1 and 2 examples, because memory had run out" in notes
