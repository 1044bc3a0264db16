"""Options with a fixed set of choices: the message lists them."""

import pytest
import torch

import ftrain as ft
from ftrain.errors import OptionError
from ftrain.transforms.compile.capture import require_backend
from tests.faults.problem import batch, failing, make, params, squares


@pytest.mark.parametrize("dtype", ["int8", "float", torch.int8, torch.float32, 16, None])
def test_an_unknown_dtype_is_an_error(dtype):
    with failing(OptionError, "with_amp", repr(dtype), "bf16, fp16, tf32"):
        ft.with_amp(dtype)


@pytest.mark.parametrize(
    ("dtype", "text"), [("bfloat16", "bf16"), ("float16", "fp16"), (torch.bfloat16, "bf16"), (torch.float16, "fp16")]
)
def test_a_dtype_may_have_the_name_of_torch_or_be_one_of_torch(dtype, text):
    assert ft.with_amp(dtype).text == f"with_amp({text})"


@pytest.mark.parametrize("dtype", ["int8", "tf32", torch.int8])
def test_an_unknown_dtype_of_an_evaluation_is_an_error(dtype):
    with failing(OptionError, "evaluate", repr(dtype), "bf16, fp16"):
        ft.evaluate(ft.eval_step(squares), make().init(params()), [batch()], dtype=dtype)


def test_an_unknown_policy_is_an_error():
    with failing(OptionError, "remat", "'some'", "full, dots"):
        ft.remat("some")


def test_an_unknown_lowering_is_an_error():
    with failing(OptionError, "compiled", "'half'", "auto, whole, split"):
        ft.compiled(lowering="half")


def test_an_unknown_backend_of_compiled_is_an_error():
    with failing(OptionError, "compiled", "'nvcc'", "inductor", "eager", "aot_eager"):
        ft.compiled(backend="nvcc")


def test_an_unknown_mode_of_compiled_is_an_error():
    with failing(OptionError, "compiled", "'fast'", "default", "max-autotune"):
        ft.compiled(mode="fast")


@pytest.mark.parametrize("settings", [{"mode": "max-autotune"}, {"options": {"max_autotune": True}}])
def test_settings_of_inductor_for_another_backend_are_an_error(settings):
    with failing(OptionError, "compiled", "Inductor", "'eager'"):
        ft.compiled(backend="eager", **settings)


def test_a_mode_of_inductor_brings_no_cuda_graphs_of_its_own():
    """Inductor's CUDA graphs need to be called by Dynamo, and a whole graph is not."""
    for mode in ("max-autotune", "reduce-overhead"):
        assert "triton.cudagraphs" not in require_backend("inductor", mode, {})
    assert require_backend("inductor", "max-autotune", {})["max_autotune"]


def test_an_unknown_option_of_inductor_and_one_of_another_lowering_are_an_error():
    with failing(OptionError, "compiled", "'no_such_option'"):
        ft.compiled(no_such_option=1)
    with failing(OptionError, "compiled", "dynamic", "lowering='split'"):
        ft.compiled(dynamic=True, lowering="whole")


@pytest.mark.parametrize("value", [0, -1, True, 1.0, "8", None])
def test_an_interval_of_empty_cache_that_is_no_positive_whole_number_is_an_error(value):
    with failing(OptionError, "empty_cache", "every", repr(value), "at least 1"):
        ft.empty_cache(value)


@pytest.mark.parametrize("value", [0, -1, 1.5, "8", None])
def test_max_graphs_that_is_no_positive_whole_number_is_an_error(value):
    with failing(OptionError, "compiled", "max_graphs", repr(value)):
        ft.compiled(max_graphs=value)
