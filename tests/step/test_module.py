"""Modules as pure losses: the numbers of a plain torch loop, and a module that is left unchanged."""

import copy
import itertools
import warnings

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.utils import parametrizations
from torch.utils.checkpoint import checkpoint

import ftrain as ft
from ftrain.errors import ComposeError, OptionError, StructureError, TraceError
from ftrain.step.forward import Forward
from ftrain.step.value_and_grad import ValueAndGrad

LR = 0.1
STEPS = 3


class Net(nn.Module):
    """BatchNorm, dropout and tied weights."""

    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(7, 4)
        self.norm = nn.BatchNorm1d(4)
        self.drop = nn.Dropout(0.4)
        self.head = nn.Linear(4, 7, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, tokens):
        return self.head(self.drop(self.norm(self.embed(tokens))))


class Recurrent(nn.Module):
    def __init__(self, layer_class=nn.LSTM):
        super().__init__()
        self.inner = layer_class(4, 5, 2, dropout=0.2, batch_first=True)
        self.head = nn.Linear(5, 3)

    def forward(self, x):
        return self.head(self.inner(x)[0])


class Counting(nn.Module):
    """Assigns new tensors to its buffers in the forward, also to one of a submodule."""

    def __init__(self):
        super().__init__()
        self.inner = nn.Linear(4, 3)
        self.inner.register_buffer("seen", torch.zeros(()))
        self.register_buffer("largest", torch.zeros(()), persistent=False)

    def forward(self, x):
        self.inner.seen = self.inner.seen + 1
        self.largest = torch.maximum(self.largest, x.detach().max())
        return self.inner(x) * self.largest / self.inner.seen


class Growing(nn.Module):
    """Has a buffer that is None until the first batch."""

    def __init__(self):
        super().__init__()
        self.inner = nn.Linear(4, 3)
        self.register_buffer("first", None)

    def forward(self, x):
        if self.first is None:
            self.first = x.detach().mean()
        return self.inner(x) * self.first


def floats(*shape, seed=0):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def tokens(seed=0):
    return torch.randint(7, (8,), generator=torch.Generator().manual_seed(seed))


def squares(model, batch):
    return model(batch).square().mean()


def entropy(model, batch):
    return F.cross_entropy(model(batch), batch.flip(0))


CASES = {
    "net": (Net, tokens, entropy),
    "lstm": (Recurrent, lambda seed=0: floats(2, 6, 4, seed=seed), squares),
    "gru": (lambda: Recurrent(nn.GRU), lambda seed=0: floats(2, 6, 4, seed=seed), squares),
    "attention": (
        lambda: nn.TransformerEncoderLayer(4, 2, 8, batch_first=True),
        lambda seed=0: floats(2, 6, 4, seed=seed),
        squares,
    ),
    "weight_norm": (
        lambda: nn.Sequential(parametrizations.weight_norm(nn.Linear(4, 3)), nn.Tanh()),
        lambda seed=0: floats(8, 4, seed=seed),
        squares,
    ),
    "spectral_norm": (
        lambda: nn.Sequential(parametrizations.spectral_norm(nn.Linear(4, 3)), nn.Tanh()),
        lambda seed=0: floats(8, 4, seed=seed),
        squares,
    ),
    "reassigned": (Counting, lambda seed=0: floats(8, 4, seed=seed), squares),
}
cases = pytest.mark.parametrize("name", CASES)


def make(name):
    build, batch, criterion = CASES[name]
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return build().double(), batch, criterion


def step_of(module, criterion, *wrappers, optimizer=None, **options):
    step = ft.train_step(ft.from_module(module, criterion), optimizer or ft.optim.sgd(LR), **options)
    return ft.compose(step, *wrappers)


def reseed(index, seed=0):
    """Seed torch as a step does, so that stock dropout draws the same."""
    words = ft.random.fold_in_key_data(ft.random.key_data(ft.random.key(seed)), index)
    torch.manual_seed(ft.random.seed_of(words))


def by_hand(module, batch, criterion, steps=STEPS):
    """Train a copy in a plain torch loop, and return it and the gradients of the first step."""
    module = copy.deepcopy(module).train()
    grads = {}
    with torch.random.fork_rng():
        for index in range(steps):
            module.zero_grad()
            reseed(index)
            criterion(module, batch(index)).backward()
            with torch.no_grad():
                for name, param in module.named_parameters():
                    grads.setdefault(name, param.grad.clone())
                    param -= LR * param.grad
    return module, grads


def same(one, other):
    return all(torch.equal(a, b) for a, b in zip(ft.tree.leaves(one), ft.tree.leaves(other), strict=True))


def tensors(module):
    return {**dict(module.named_parameters()), **dict(module.named_buffers())}


def snapshot(module):
    """Return what a step must not change in a module: identities and values of tensors, flags, and attributes."""
    return {
        "ids": {name: id(tensor) for name, tensor in module.named_parameters(remove_duplicate=False)}
        | {name: id(tensor) for name, tensor in module.named_buffers(remove_duplicate=False)},
        "values": {name: tensor.detach().clone() for name, tensor in tensors(module).items()},
        "versions": {name: tensor._version for name, tensor in tensors(module).items()},
        "requires_grad": {name: tensor.requires_grad for name, tensor in tensors(module).items()},
        "grads": {name: tensor.grad for name, tensor in module.named_parameters()},
        "training": [part.training for part in module.modules()],
        "attributes": [sorted(vars(part)) for part in module.modules()],
        "buffers": [{key: value is None for key, value in part._buffers.items()} for part in module.modules()],
        "types": [type(part) for part in module.modules()],
    }


def assert_unchanged(module, before):
    """Check a module against its snapshot, which this call uses up."""
    after = snapshot(module)
    values, expected_values = after.pop("values"), before.pop("values")
    for name, value in expected_values.items():
        torch.testing.assert_close(values[name], value, rtol=0, atol=0)
    assert after == before


@cases
def test_a_step_is_what_torch_computes(name):
    module, batch, criterion = make(name)
    expected, grads = by_hand(module, batch, criterion)
    step = step_of(module, criterion)
    state = step.init(seed=0)
    first, _ = step(state, batch(0))
    for key, grad in grads.items():
        torch.testing.assert_close((state.params[key] - first.params[key]) / LR, grad, rtol=1e-9, atol=1e-12)
    for index in range(STEPS):
        state, metrics = step(state, batch(index))
    assert list(state.params) == [key for key, _ in expected.named_parameters()]
    for key, param in expected.named_parameters():
        torch.testing.assert_close(state.params[key], param.detach(), rtol=1e-12, atol=1e-14)
    assert sorted(state.buffers) == sorted(key for key, _ in expected.named_buffers())
    for key, buffer in expected.named_buffers():
        torch.testing.assert_close(state.buffers[key], buffer, rtol=1e-12, atol=1e-14)
    assert metrics["loss"].dtype == torch.float64


# Where Dynamo resumes after a graph break (a recurrent net is one), it asks every tensor for its gradient.
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf:UserWarning")
@pytest.mark.parametrize(
    ("name", "lowering"),
    [
        # Not those with dropout: in a whole graph it draws from the key, and in eager mode from torch's generator.
        *((name, "whole") for name in CASES if name not in ("net", "lstm", "gru", "attention")),
        *((case, "split") for case in ("attention", "reassigned", "lstm")),
        *(pytest.param(case, "split", marks=pytest.mark.exhaustive) for case in ("net", "gru", "spectral_norm")),
        pytest.param("weight_norm", "split", marks=pytest.mark.exhaustive),
    ],
)
def test_a_compiled_step_computes_the_same(name, lowering):
    module, batch, criterion = make(name)
    eager = step_of(module, criterion)
    compiled = step_of(module, criterion, ft.compiled(backend="eager", lowering=lowering))
    state, expected = compiled.init(), eager.init()
    before = snapshot(module)
    for index in range(STEPS):
        state, _ = compiled(state, batch(index))
        expected, _ = eager(expected, batch(index))
    for key in expected.params:
        torch.testing.assert_close(state.params[key], expected.params[key], rtol=1e-9, atol=1e-12)
    for key in expected.buffers:
        torch.testing.assert_close(state.buffers[key], expected.buffers[key], rtol=1e-9, atol=1e-12)
    assert_unchanged(module, before)


def test_the_gradient_function_gives_torchs_gradients():
    module, batch, criterion = make("net")
    _, grads = by_hand(module, batch, criterion, steps=1)
    loss = ft.from_module(module, criterion)
    state = ft.train_step(loss, ft.optim.sgd(LR)).init()
    with torch.random.fork_rng(), loss.scope(True):
        reseed(0)
        gradients = ValueAndGrad(Forward(loss.fn, "loss", {}), "loss")(state, batch(0), None)
    assert sorted(gradients.grads) == sorted(grads)
    for name, grad in grads.items():
        assert torch.equal(gradients.grads[name], grad)


def test_tied_weights_are_one_parameter():
    module, batch, criterion = make("net")
    step = step_of(module, criterion)
    state = step.init()
    assert "head.weight" not in state.params
    assert sorted(state.params) == ["embed.weight", "norm.bias", "norm.weight"]
    state, _ = step(state, batch())
    trained = ft.to_module(module, state)
    assert trained.head.weight is trained.embed.weight


@pytest.mark.parametrize("shares", [True, False])
def test_params_may_not_be_a_state_dict_with_more_than_the_parameters(shares):
    module = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3) if shares else nn.BatchNorm1d(3))
    if shares:
        module[1].weight = module[0].weight
    name = r"1\.weight" if shares else r"1\.running_mean, 1\.running_var, 1\.num_batches_tracked"
    with pytest.raises(StructureError, match=rf"Step\.init: params has {name}, which .*load_state_dict"):
        step_of(module, squares).init(module.state_dict())


def test_a_module_with_two_names_has_one_parameter():
    class Twice(nn.Module):
        def __init__(self):
            super().__init__()
            self.a = nn.Linear(4, 4, bias=False)
            self.b = self.a

        def forward(self, x):
            return self.b(torch.tanh(self.a(x)))

    module = Twice().double()
    batch = lambda seed=0: floats(8, 4, seed=seed)  # noqa: E731
    _, grads = by_hand(module, batch, squares, steps=1)
    step = step_of(module, squares)
    state = step.init()
    new, _ = step(state, batch())
    assert list(state.params) == ["a.weight"]
    torch.testing.assert_close((state.params["a.weight"] - new.params["a.weight"]) / LR, grads["a.weight"])


@cases
@pytest.mark.parametrize("training", [True, False])
def test_the_module_is_left_as_it_was(name, training):
    module, batch, criterion = make(name)
    module.train(training)
    if name == "net":
        module.drop.training = not training
    before = snapshot(module)
    step = step_of(module, criterion, ft.ema(0.9), ft.donated())
    state = step.init()
    for index in range(STEPS):
        state, _ = step(state, batch(index))
    ft.evaluate(ft.eval_step(ft.from_module(module, criterion)), state, [batch(9)])
    assert_unchanged(module, before)


WRAPPED = [(ft.with_amp("bf16"), ft.ema(0.9)), (ft.compiled(backend="eager", lowering="whole"),)]


@pytest.mark.parametrize(("name", "wrappers"), [*[(name, ()) for name in CASES], *[("net", w) for w in WRAPPED]])
def test_the_module_is_left_as_it_was_by_an_exception(name, wrappers):
    module, batch, criterion = make(name)
    module.eval()
    before = snapshot(module)

    def failing(model, batch):
        criterion(model, batch)
        raise ZeroDivisionError("on purpose")

    step = step_of(module, failing, *wrappers)
    # A captured step raises an error of another class, which names this one.
    with pytest.raises(Exception, match="on purpose"):
        step(step.init(), batch())
    with pytest.raises(ZeroDivisionError, match="on purpose"):
        ft.evaluate(ft.eval_step(ft.from_module(module, failing)), step.init(), [batch()])
    assert_unchanged(module, before)


@pytest.mark.parametrize("policy", ["full", "dots"])
@pytest.mark.parametrize("fails", [False, True])
def test_remat_leaves_the_module_as_it_was(policy, fails):
    blocks = [nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Dropout(0.3)) for _ in range(3)]
    module = nn.Sequential(*blocks).double()
    before = snapshot(module)

    def criterion(model, batch):
        loss = squares(model, batch)
        if fails:
            raise ZeroDivisionError("on purpose")
        return loss

    step = step_of(module, criterion, ft.remat(policy))
    if fails:
        with pytest.raises(ZeroDivisionError, match="on purpose"):
            step(step.init(), floats(8, 4))
    else:
        actual, _ = step(step.init(), floats(8, 4))
        plain = step_of(module, criterion)
        expected, _ = plain(plain.init(), floats(8, 4))
        for name in expected.params:
            assert torch.equal(actual.params[name], expected.params[name])
    assert_unchanged(module, before)


def test_a_buffer_that_appears_in_the_forward_does_not_stay_in_the_module():
    # If it stayed, the second step would depend on a tensor that is not in the TrainState.
    module = Growing().double()
    before = snapshot(module)
    step = step_of(module, squares)
    state = step.init()
    first, _ = step(state, floats(8, 4))
    assert_unchanged(module, before)
    step(state, floats(8, 4, seed=1))
    again, _ = step(state, floats(8, 4))
    for name in first.params:
        assert torch.equal(again.params[name], first.params[name])


def test_a_module_compiled_by_torch_is_left_as_it_was():
    inner = nn.Sequential(nn.Linear(4, 3), nn.Dropout(0.5)).double()
    module = torch.compile(inner, backend="eager")
    before = sorted(vars(module))
    step = step_of(module, squares)
    step(step.init(), floats(8, 4))
    assert sorted(vars(module)) == before
    module.eval()
    assert not inner[1].training
    assert not module.training


def test_training_and_evaluation_modes():
    module, batch, criterion = make("net")
    modes = []

    def recording(model, batch):
        modes.append({part.training for part in model.modules()})
        return criterion(model, batch)

    loss = ft.from_module(module.eval(), recording)
    step, evaluation = ft.train_step(loss, ft.optim.sgd(LR)), ft.eval_step(loss)
    state, _ = step(step.init(), batch())
    kept = ft.tree.clone(state)
    random_state = torch.get_rng_state()
    means = evaluation(state, batch())
    assert modes == [{True}, {False}]
    assert torch.equal(torch.get_rng_state(), random_state)
    for a, b in zip(ft.tree.leaves(state), ft.tree.leaves(kept), strict=True):
        assert torch.equal(a, b)
    # Torch computes the same in evaluation mode with the parameters and statistics of the state.
    with torch.no_grad():
        expected = criterion(ft.to_module(copy.deepcopy(module), state).eval(), batch())
    assert float(means["loss"]) == float(expected)


@pytest.mark.parametrize("wrappers", [(), (ft.compiled(backend="eager"),)], ids=["eager", "compiled"])
def test_the_log_says_once_which_part_a_step_takes_out_of_evaluation_mode(wrappers, caplog):
    def make_step(criterion):
        module = nn.ModuleDict({"student": nn.Linear(4, 3), "teacher": nn.Sequential(nn.Linear(4, 3), nn.Dropout(0.5))})
        module["teacher"].eval().requires_grad_(False)
        return step_of(module.double(), criterion)

    def distilled(model, batch):
        return (model["student"](batch) - model["teacher"](batch)).square().mean()

    def with_a_fixed_teacher(model, batch):
        model["teacher"].eval()
        return distilled(model, batch)

    for criterion, is_logged in ((distilled, True), (with_a_fixed_teacher, False)):
        caplog.clear()
        step = ft.compose(make_step(criterion), *wrappers)
        state, _ = step(step.init(), floats(8, 4))
        step(state, floats(8, 4))
        messages = [record.getMessage() for record in caplog.records]
        assert sum("evaluation mode: teacher" in message for message in messages) == is_logged


def test_batchnorm_statistics_are_in_the_state_and_not_in_the_module():
    module, batch, criterion = make("net")
    step = step_of(module, criterion)
    state = step.init()
    assert sorted(state.buffers) == ["norm.num_batches_tracked", "norm.running_mean", "norm.running_var"]
    new, _ = step(state, batch())
    newer, _ = step(new, batch())
    assert [int(s.buffers["norm.num_batches_tracked"]) for s in (state, new, newer)] == [0, 1, 2]
    assert int(module.norm.num_batches_tracked) == 0
    assert torch.equal(state.buffers["norm.running_mean"], torch.zeros(4, dtype=torch.float64))
    assert not torch.equal(new.buffers["norm.running_mean"], newer.buffers["norm.running_mean"])


def test_each_microbatch_updates_the_statistics_of_the_one_before():
    module = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4)).double()
    step = step_of(module, squares, ft.accumulate(2))
    state, _ = step(step.init(), floats(8, 4))
    expected = copy.deepcopy(module).train()
    for piece in floats(8, 4).chunk(2):
        expected(piece)
    for name, buffer in expected.named_buffers():
        torch.testing.assert_close(state.buffers[name], buffer, rtol=1e-12, atol=0)


def test_parameters_that_require_no_gradient_are_frozen():
    module, batch, criterion = make("net")
    module.embed.weight.requires_grad_(False)
    step = step_of(module, criterion, optimizer=ft.optim.adamw(LR, weight_decay=0.5))
    state = step.init()
    new, _ = step(state, batch())
    assert sorted(name for name, leaf in new.params.items() if leaf is not None) == ["norm.bias", "norm.weight"]
    assert torch.equal(new.frozen["embed.weight"], module.embed.weight)
    assert not module.embed.weight.requires_grad
    assert not torch.equal(new.params["norm.weight"], state.params["norm.weight"])
    assert new.opt_state["mu"]["embed.weight"] is None


@pytest.mark.parametrize(
    "trainable",
    [["norm.*"], ("norm.weight", "norm.bias"), lambda name, leaf: leaf.ndim == 1, lambda name, leaf: "norm" in name],
    ids=["pattern", "names", "by leaf", "by name"],
)
def test_trainable_chooses_the_parameters_that_are_trained(trainable):
    module, batch, criterion = make("net")
    step = step_of(module, criterion, trainable=trainable)
    state = step.init()
    new, _ = step(state, batch())
    assert state.params["embed.weight"] is None
    assert torch.equal(new.frozen["embed.weight"], module.embed.weight)
    _, grads = by_hand(module, batch, criterion, steps=1)
    for name in ("norm.weight", "norm.bias"):
        assert new.frozen[name] is None
        torch.testing.assert_close((state.params[name] - new.params[name]) / LR, grads[name], rtol=1e-9, atol=1e-12)


def test_trainable_overrides_requires_grad():
    module, batch, criterion = make("net")
    module.requires_grad_(False)
    step = step_of(module, criterion, trainable=["norm.*"])
    state, _ = step(step.init(), batch())
    assert not torch.equal(state.params["norm.weight"], module.norm.weight)
    assert not module.norm.weight.requires_grad


@pytest.mark.parametrize("how", ["trainable", "requires_grad"])
def test_a_state_that_trains_other_parameters_is_refused(how):
    """A module was frozen or unfrozen between two phases, but its state still says what was trained before."""
    module, batch, criterion = make("net")
    head = ["norm.*"] if how == "trainable" else None
    module.embed.weight.requires_grad_(how == "trainable")
    narrow = step_of(module, criterion, trainable=head)
    of_head, _ = narrow(narrow.init(), batch())
    # Another step that trains the same parameters takes the state.
    step_of(module, criterion, ft.clip(1.0), trainable=head)(of_head, batch())
    module.embed.weight.requires_grad_(True)
    wide = step_of(module, criterion)
    with pytest.raises(
        StructureError, match=r"the state freezes params\.embed\.weight, which this step trains; .*init"
    ):
        wide(of_head, batch())
    with pytest.raises(StructureError, match="freezes"):
        ft.fit(wide, of_head, [batch()], progress=False)
    of_all = wide.init()
    module.embed.weight.requires_grad_(how == "trainable")
    with pytest.raises(StructureError, match=r"the state trains params\.embed\.weight, which this step freezes"):
        step_of(module, criterion, trainable=head)(of_all, batch())


def test_a_criterion_may_take_a_key_and_return_metrics():
    module = nn.Linear(4, 3).double()
    keys = []

    def criterion(model, batch, rng):
        keys.append(rng.tolist())
        out = ft.random.dropout(rng, model(batch), 0.5)
        return ft.Mean(out.square().sum(), torch.tensor(2.0)), {"largest": out.max()}

    step = step_of(module, criterion)
    state, metrics = step(step.init(seed=3), floats(8, 4))
    step(state, floats(8, 4))
    assert set(metrics) == {"loss", "largest", "lr"}
    assert not metrics["largest"].requires_grad
    first, second = (ft.random.fold_in(ft.random.key(3), index).tolist() for index in range(2))
    assert keys == [first, second]


def test_state_and_module_share_no_memory():
    module, batch, criterion = make("net")
    step = step_of(module, criterion, ft.ema(0.9), optimizer=ft.optim.adamw(LR))
    state = step.init()
    pointers = [leaf.untyped_storage().data_ptr() for leaf in ft.tree.leaves(state) if leaf.numel()]
    assert len(set(pointers)) == len(pointers)
    assert not set(pointers) & {leaf.untyped_storage().data_ptr() for leaf in tensors(module).values()}
    new, _ = step(state, batch())
    of_module = {leaf.untyped_storage().data_ptr() for leaf in tensors(module).values()}
    assert not of_module & {leaf.untyped_storage().data_ptr() for leaf in ft.tree.leaves(new)}


@pytest.mark.parametrize("name", CASES)
def test_a_donated_module_gives_its_memory_to_the_state_and_to_module_gives_it_weights(name):
    module, batch, criterion = make(name)
    copied = copy.deepcopy(module)
    step = step_of(module, criterion, optimizer=ft.optim.adamw(LR))
    addresses = {key: leaf.data_ptr() for key, leaf in tensors(module).items()}
    step_of_copy = step_of(copied, criterion, optimizer=ft.optim.adamw(LR))
    state, expected = step.init(seed=1, donate=True), step_of_copy.init(seed=1)
    assert {key: leaf.data_ptr() for key, leaf in {**state.params, **state.buffers}.items()} == addresses
    assert all(leaf.is_meta for leaf in tensors(module).values())
    for count in range(STEPS):
        state, _ = step(state, batch(count))
        expected, _ = step_of_copy(expected, batch(count))
    assert same(state, expected)
    assert all(leaf.is_meta for leaf in tensors(module).values())
    ft.to_module(module, state)
    ft.to_module(copied, expected)
    assert same(dict(module.state_dict()), dict(copied.state_dict()))
    for (key, leaf), other in zip(module.named_parameters(), copied.parameters(), strict=True):
        assert leaf.requires_grad == other.requires_grad, key
    with torch.no_grad():
        assert torch.equal(criterion(module.eval(), batch()), criterion(copied.eval(), batch()))


def test_the_weights_of_a_donated_module_stay_tied_and_frozen_ones_frozen():
    module = Net().requires_grad_(False)
    module.norm.requires_grad_(True)
    step = step_of(module, entropy)
    state, _ = step(step.init(donate=True), tokens())
    assert module.head.weight is module.embed.weight
    ft.to_module(module, state)
    assert module.head.weight is module.embed.weight
    assert [p.requires_grad for p in module.parameters()] == [False, True, True]


def test_a_donated_module_has_no_values_for_another_state():
    step = step_of(Net(), entropy)
    step.init(donate=True)
    with pytest.raises(StructureError, match=r"embed.weight of Embedding has a shape but no values.*to_module"):
        step.init()


def test_a_module_keeps_its_weights_when_the_state_cannot_be_made():
    module = Net()
    step = ft.train_step(ft.from_module(module, entropy), ft.optim.sgd(LR), trainable=["none"])
    with pytest.raises(OptionError, match="no parameter matches"):
        step.init(donate=True)
    assert not any(leaf.is_meta for leaf in tensors(module).values())


def test_donated_parameters_that_share_memory_are_copied():
    base, whole = torch.arange(6.0), torch.ones(3)
    params = {"whole": whole, "twice": whole, "part": base[:3], "other": base[3:]}
    step = ft.train_step(lambda params, batch: sum(p.square().sum() for p in params.values()), ft.optim.sgd(LR))
    state = ft.donated()(step).init(params, donate=True)
    addresses = {name: leaf.data_ptr() for name, leaf in state.params.items()}
    assert len(set(addresses.values())) == len(addresses)
    assert [name for name in params if addresses[name] == params[name].data_ptr()] == ["twice"]
    assert not set(addresses.values()) & {base[:3].data_ptr(), base[3:].data_ptr()}


def test_a_later_change_of_the_module_does_not_reach_the_state():
    module, batch, criterion = make("net")
    step = step_of(module, criterion)
    state = step.init()
    expected, _ = step(state, batch())
    with torch.no_grad():
        for tensor in tensors(module).values():
            tensor.zero_()
    actual, _ = step(state, batch())
    for name in expected.params:
        assert torch.equal(actual.params[name], expected.params[name])


@cases
def test_to_module_is_the_way_back(name):
    module, batch, criterion = make(name)
    step = step_of(module, criterion)
    state = step.init()
    for index in range(STEPS):
        state, _ = step(state, batch(index))
    target = copy.deepcopy(module)
    parameters = list(target.parameters())
    assert ft.to_module(target, state) is target
    assert all(a is b for a, b in zip(target.parameters(), parameters, strict=True))
    for key, tensor in tensors(target).items():
        assert torch.equal(tensor, {**state.params, **state.buffers}[key])
    compiled = torch.compile(copy.deepcopy(module))
    assert ft.to_module(compiled, state) is compiled
    for key, tensor in tensors(compiled._orig_mod).items():
        assert torch.equal(tensor, {**state.params, **state.buffers}[key])
    again = step_of(target, criterion).init()
    assert sorted(again.params) == sorted(state.params)
    for key in state.params:
        assert torch.equal(again.params[key], state.params[key])
    # The module has a copy of the state, which further training does not change.
    kept = {key: tensor.detach().clone() for key, tensor in tensors(target).items()}
    ft.donated(step)(state, batch())
    for key, tensor in tensors(target).items():
        assert torch.equal(tensor, kept[key])


def test_to_module_puts_frozen_parameters_back_too():
    module, batch, criterion = make("net")
    step = step_of(module, criterion, trainable=["norm.*"])
    state, _ = step(step.init(), batch())
    target = ft.to_module(make("net")[0], state)
    assert torch.equal(target.embed.weight, module.embed.weight)
    assert torch.equal(target.norm.weight, state.params["norm.weight"])


def test_to_module_of_the_averages():
    module, batch, criterion = make("net")
    step = step_of(module, criterion, ft.ema(0.5))
    state, _ = step(step.init(), batch())
    target = ft.to_module(make("net")[0], ft.averaged(state))
    expected = (module.norm.weight + state.params["norm.weight"]) / 2
    torch.testing.assert_close(target.norm.weight.detach(), expected.detach())


def test_to_module_casts_to_the_modules_dtype():
    module, batch, criterion = make("net")
    state, _ = step_of(module, criterion)(step_of(module, criterion).init(), batch())
    target = ft.to_module(Net().float(), state)
    assert target.norm.weight.dtype == torch.float32
    torch.testing.assert_close(target.norm.weight.double(), state.params["norm.weight"], rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("not_a_state", [lambda state: state.params, lambda state: nn.Linear(2, 2), lambda state: None])
def test_functions_that_take_a_state_refuse_other_values(not_a_state):
    module, batch, criterion = make("net")
    step = step_of(module, criterion)
    argument, evaluation = not_a_state(step.init()), ft.eval_step(step.loss)
    calls = {
        "to_module": lambda: ft.to_module(module, argument),
        "averaged": lambda: ft.averaged(argument),
        "evaluate": lambda: ft.evaluate(evaluation, argument, [batch()]),
    }
    for name, call in calls.items():
        message = f"{name}: the state is {type(argument).__name__}; needs the TrainState"
        with pytest.raises(StructureError, match=message):
            call()


def test_to_module_that_does_not_fit_changes_nothing():
    module, batch, criterion = make("net")
    step = step_of(module, criterion)
    state, _ = step(step.init(), batch())
    target = nn.ModuleDict({"embed": nn.Embedding(7, 4), "norm": nn.BatchNorm1d(5)}).double()
    before = snapshot(target)
    with pytest.raises(StructureError, match=r"norm\.weight: found \[4\], needs \[5\]"):
        ft.to_module(target, state)
    assert_unchanged(target, before)


def test_two_steps_of_one_module_do_not_disturb_each_other():
    module, batch, criterion = make("net")
    alone = step_of(module, criterion)
    expected, _ = alone(alone.init(), batch())
    first, second = step_of(module, criterion), step_of(module, criterion, ft.clip(0.01))
    first_state, second_state = first.init(), second.init()
    actual, _ = first(first_state, batch())
    second(second_state, batch())
    for name in expected.params:
        assert torch.equal(actual.params[name], expected.params[name])


def test_find_blocks_by_type_and_by_name():
    module = nn.Sequential(*[nn.Sequential(nn.Linear(4, 4), nn.Tanh()) for _ in range(3)]).double()
    texts = {
        None: "blocks=3",
        (nn.Linear,): "blocks=3",
        ("0", "2"): "blocks=2",
        ("0", nn.Tanh): "blocks=4",
    }
    for blocks, text in texts.items():
        step = step_of(module, squares, ft.remat(blocks=list(blocks) if blocks else None))
        assert f"remat({text})" in repr(step)
        step(step.init(), floats(2, 4))
    with pytest.raises(OptionError, match="no block"):
        step_of(module, squares, ft.remat(blocks=["3"]))


def hugging_face(name):
    transformers = pytest.importorskip("transformers")
    transformers.utils.logging.set_verbosity_error()
    with torch.random.fork_rng(), warnings.catch_warnings():
        # Deprecations inside of transformers and what it imports are not ours to fix.
        warnings.simplefilter("ignore", DeprecationWarning)
        torch.manual_seed(0)
        if name == "bert":
            config = transformers.BertConfig(
                vocab_size=17,
                hidden_size=8,
                num_hidden_layers=2,
                num_attention_heads=2,
                intermediate_size=16,
                max_position_embeddings=12,
                num_labels=3,
            )
            return transformers.BertForSequenceClassification(config)
        config = transformers.GPT2Config(
            vocab_size=17, n_embd=8, n_layer=2, n_head=2, n_positions=12, bos_token_id=0, eos_token_id=0
        )
        return transformers.GPT2LMHeadModel(config)


def hugging_face_batch(name, seed):
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(17, (4, 6), generator=generator)
    if name == "gpt2":
        return {"input_ids": ids, "labels": ids}
    mask = (torch.arange(6) < torch.tensor([[6], [4], [5], [2]])).long()
    return {"input_ids": ids, "attention_mask": mask, "labels": torch.randint(3, (4,), generator=generator)}


@pytest.mark.parametrize("name", ["bert", "gpt2"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_a_hugging_face_model_trains_as_in_a_loop_by_hand(name, dtype):
    model = hugging_face(name).to(dtype)
    before = snapshot(model)
    expected = copy.deepcopy(model).train()
    optimizer = torch.optim.AdamW(expected.parameters(), lr=0.01, weight_decay=0.0, fused=True)
    step = ft.train_step(ft.from_module(model), ft.optim.adamw(0.01))
    state = step.init(seed=5)
    for index in range(STEPS):
        batch = hugging_face_batch(name, index)
        with torch.random.fork_rng():
            reseed(index, seed=5)
            loss = expected(**batch).loss
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        state, metrics = step(state, batch)
        assert float(metrics["loss"]) == loss.item()
    assert list(state.params) == [key for key, _ in expected.named_parameters()]
    for key, param in expected.named_parameters():
        assert torch.equal(state.params[key], param), key
    assert_unchanged(model, before)
    assert "lm_head.weight" not in state.params


def test_remat_of_a_hugging_face_model_changes_no_bit():
    model = hugging_face("gpt2")
    steps = [ft.compose(step_of(model, None), *wrappers) for wrappers in ((), (ft.remat(),), (ft.remat("dots"),))]
    assert "blocks=2" in repr(steps[1])
    plain, *rematerialised = [step(step.init(), hugging_face_batch("gpt2", 0))[0] for step in steps]
    for state, name in itertools.product(rematerialised, plain.params):
        assert torch.equal(state.params[name], plain.params[name])


class Recomputing(nn.Module):
    """Calls `torch.utils.checkpoint` in its forward, as models of transformers can."""

    def __init__(self, recomputes, rate=0.0):
        super().__init__()
        self.first, self.recomputes = nn.Linear(4, 4), recomputes
        self.part = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Dropout(rate), nn.Linear(4, 4))

    def forward(self, x):
        x = self.first(x)
        return checkpoint(self.part, x, use_reentrant=False) if self.recomputes else self.part(x)


def trained(*wrappers, recomputes, rate=0.0):
    torch.manual_seed(0)
    model = Recomputing(recomputes, rate)
    loss = ft.from_module(model, lambda model, batch: model(batch["x"]).square().mean())
    step = ft.compose(ft.train_step(loss, ft.optim.sgd(0.5, momentum=0.9)), *wrappers)
    state, before = step.init(), snapshot(model)
    for index in range(3):
        state, _ = step(state, {"x": torch.randn(8, 4, generator=torch.Generator().manual_seed(index))})
    assert_unchanged(model, before)
    return state.params


@pytest.mark.parametrize("rate", [0.0, 0.5])
@pytest.mark.parametrize(
    "wrappers",
    [
        (),
        (ft.accumulate(2),),
        (ft.with_amp("bf16"), ft.clip(0.1)),
        (ft.remat(blocks=["part"]),),
        (ft.update_in_backward(),),
        (ft.donated(), ft.ema(0.9)),
        (ft.compiled(lowering="split", backend="aot_eager"),),
    ],
    ids=lambda wrappers: "+".join(each.text for each in wrappers),
)
def test_a_model_with_a_checkpoint_trains_as_without(wrappers, rate):
    actual, expected = (trained(*wrappers, recomputes=flag, rate=rate) for flag in (True, False))
    for name, leaf in expected.items():
        assert torch.equal(actual[name], leaf), name


class CountingBlock(nn.Module):
    """Counts its calls. Dynamo cannot trace that within a checkpoint, and breaks the graph."""

    def __init__(self):
        super().__init__()
        self.inner, self.calls = nn.Linear(4, 4), 0
        self.register_buffer("offset", torch.ones(4))

    def forward(self, x):
        self.calls += 1
        return torch.tanh(self.inner(x)) + self.offset


class RecomputingBlocks(nn.Sequential):
    def forward(self, x):
        for block in self:
            x = checkpoint(block, x, use_reentrant=False)
        return x


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")  # from Dynamo itself
@pytest.mark.parametrize("wrappers", [(), (ft.accumulate(2),), (ft.lora(2, targets=["*.inner"]),)], ids=len)
def test_a_checkpoint_that_dynamo_does_not_trace_recomputes_with_the_state(wrappers):
    def train(*lowering):
        torch.manual_seed(0)
        model = RecomputingBlocks(CountingBlock(), CountingBlock())
        loss = ft.from_module(model, lambda model, batch: model(batch["x"]).square().mean())
        step = ft.compose(ft.train_step(loss, ft.optim.sgd(0.5)), *wrappers, *lowering)
        state = step.init()
        for index in range(3):
            state, _ = step(state, {"x": torch.randn(8, 4, generator=torch.Generator().manual_seed(index))})
        return state.params

    torch.testing.assert_close(train(ft.compiled(lowering="split", backend="aot_eager")), train())


def test_a_whole_graph_refuses_dropout_within_a_checkpoint():
    """It cannot repeat the random numbers of the first pass."""
    whole = ft.compiled(lowering="whole", backend="aot_eager")
    actual, expected = (trained(whole, recomputes=flag) for flag in (True, False))
    assert all(torch.equal(actual[name], expected[name]) for name in expected)
    for refusing in (whole, ft.compiled(lowering="whole")):
        with pytest.raises(TraceError, match=r"recomputed by torch.utils.checkpoint.*ft.remat\(\) instead"):
            trained(refusing, recomputes=True, rate=0.5)
    split = trained(ft.compiled(backend="aot_eager"), recomputes=True, rate=0.5)
    expected = trained(recomputes=False, rate=0.5)
    torch.testing.assert_close(split, expected, rtol=1e-5, atol=1e-6)


def test_gradient_checkpointing_of_transformers_changes_no_bit():
    states = []
    for checkpointing in (False, True):
        model = hugging_face("gpt2")
        if checkpointing:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore", FutureWarning)
                model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
        step = step_of(model, None)
        state = step.init()
        for index in range(STEPS):
            state, _ = step(state, hugging_face_batch("gpt2", index))
        states.append(state)
    for name, leaf in states[0].params.items():
        assert torch.equal(states[1].params[name], leaf), name


class Registering(nn.Module):
    """Registers a buffer when it first runs."""

    def __init__(self):
        super().__init__()
        self.inner = nn.Linear(4, 4)

    def forward(self, x):
        if not hasattr(self, "scaled"):
            self.register_buffer("scaled", torch.full((4,), 0.5), persistent=False)
        return torch.tanh(self.inner(x) * self.scaled)


@pytest.mark.parametrize("wrappers", [(), (ft.remat(),), (ft.remat("dots"), ft.accumulate(2))], ids=len)
def test_a_buffer_that_a_model_registers_as_it_runs_does_not_stay(wrappers):
    model = nn.Sequential(Registering(), Registering())
    loss = ft.from_module(model, lambda model, batch: model(batch["x"]).square().mean())
    step = ft.compose(ft.train_step(loss, ft.optim.sgd(0.1)), *wrappers)
    state, _ = step(step.init(), {"x": torch.randn(4, 4)})
    assert list(model.named_buffers()) == []
    assert not state.buffers


class Hooking(nn.Module):
    """Hooks itself when it first runs, as models of transformers do to record hidden states."""

    def __init__(self):
        super().__init__()
        self.inner, self.is_hooked, self.recorded = nn.Linear(4, 4), False, []

    def forward(self, x):
        if not self.is_hooked:
            self.inner.register_forward_hook(lambda module, args, output: self.recorded.append(len(args)))
            self.is_hooked = True
        self.recorded.clear()
        return self.inner(x) * len(self.recorded)


def test_a_hook_that_a_model_registers_while_it_is_captured_does_not_stay():
    """Its flag `is_hooked` does not stay either, so that the next run registers one hook, not a second."""
    model = Hooking()
    loss = ft.from_module(model, lambda model, batch: model(batch["x"]).square().mean())
    step = ft.compose(ft.train_step(loss, ft.optim.sgd(0.1)), ft.compiled(lowering="whole", backend="aot_eager"))
    step(step.init(), {"x": torch.randn(2, 4)})
    model(torch.randn(2, 4))
    assert len(model.recorded) == 1


@pytest.mark.parametrize("wrappers", [(), (ft.remat(blocks=["1"]),)], ids=len)
def test_a_loss_may_run_within_itself(wrappers):
    """Such as a teacher: the loss runs the same model with other parameters between two layers."""
    model = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3))
    teacher = {name: torch.full_like(param, 0.1) for name, param in model.named_parameters()}
    inside = []

    def criterion(model, batch):
        out = model[0](batch["x"])
        if not inside:
            inside.append(True)
            with torch.no_grad():
                expected, _, _ = loss.fn(teacher, batch, rng=None, buffers={})
            inside.clear()
            return (model[1](out) - expected.value).square().mean()
        return model[1](out).mean()

    loss = ft.from_module(model, criterion)
    step = ft.compose(ft.train_step(loss, ft.optim.sgd(0.1)), *wrappers)
    state, batch = step.init(), {"x": torch.randn(4, 3)}
    for run in (
        lambda: step(state, batch)[1]["loss"],
        lambda: loss.fn(state.params, batch, rng=None, buffers={})[0].value,
    ):
        x, p = batch["x"], state.params
        layer = lambda x, p, n: F.linear(x, p[f"{n}.weight"], p[f"{n}.bias"])  # noqa: E731
        target = layer(layer(x, teacher, 0), teacher, 1).mean()
        before = snapshot(model)
        torch.testing.assert_close(run(), (layer(layer(x, p, 0), p, 1) - target).square().mean())
        assert_unchanged(model, before)


def test_errors_name_arguments_in_the_wrong_place():
    loss = ft.from_module(nn.Linear(3, 1), lambda model, batch: model(batch).mean())
    step = ft.train_step(loss, ft.optim.adamw(1e-3))
    for params, shown in ((loss.module, "Linear"), (list(loss.module.parameters()), "list"), (0, "int")):
        with pytest.raises(StructureError, match=rf"Step\.init: params is {shown}; leave it out"):
            step.init(params)
    without_module = ft.train_step(lambda model, batch: model(batch).mean(), ft.optim.sgd(0.1))
    for arguments in ((), (loss.module,)):
        with pytest.raises(StructureError, match=r"has no module; .* ft\.from_module\(module, criterion\)"):
            without_module.init(*arguments)
    decay = ft.schedules.cosine(1.0, 100)
    for wrong, shown in (
        (step, "a Step"),
        ([ft.clip(2)], r"\[clip.*\]"),
        (step.optimizer, "adamw.*"),
        (decay, "cosine.*"),
    ):
        with pytest.raises(ComposeError, match=rf"argument 1 is {shown}; needs a wrapper. The step comes first"):
            ft.compose(ft.clip(1.0), wrong)
    with pytest.raises(ComposeError, match="argument 2 returned None; a wrapper returns a step"):
        ft.compose(step, ft.clip(1.0), print)
    with pytest.raises(ComposeError, match=r"and loss\(Linear\) is a Loss"):
        ft.compose(loss, ft.clip(1.0))
    with pytest.raises(
        StructureError, match=r"eval_step: the state is Tensor; needs the TrainState of step\.init\(\)$"
    ):
        ft.eval_step(loss)(torch.ones(3), step.init())
    with pytest.raises(StructureError, match=r"Step: the state is tuple; .* return a pair: state, metrics = step"):
        step(step(step.init(), torch.ones(3)), torch.ones(3))


def test_a_checkpoint_instead_of_a_state_is_refused(tmp_path):
    step = ft.train_step(ft.from_module(nn.Linear(3, 1), lambda model, batch: model(batch).sum()), ft.optim.sgd(0.1))
    with ft.Checkpoints(tmp_path, every=1) as checkpoints:
        checkpoints.save(0, {"state": step.init()}, wait=True)
    loaded = checkpoints.latest()
    with pytest.raises(StructureError, match=r"the state is LoadedCheckpoint; .* in \.parts\['state'\]"):
        step(loaded, torch.ones(3))
    step(loaded.parts["state"], torch.ones(3))


def test_a_loss_and_an_optimizer_print_as_in_the_step():
    step = ft.train_step(ft.from_module(nn.Linear(3, 1), lambda model, batch: model(batch)), ft.optim.adamw(1e-3))
    assert f"{step.loss}, {step.optimizer}" == "loss(Linear), adamw(constant(1e-3))"
    assert f"{ft.optim.adamw(lambda k: 1e-3)}" == "adamw(<lambda>)"


def test_a_deep_copy_of_a_step_is_the_step():
    # Tools deep-copy their configuration and the step in it. The loss would still use the module of the first step.
    module = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 1))
    step = ft.train_step(ft.from_module(module, lambda model, batch: model(batch).sum()), ft.optim.sgd(0.1))
    copied = ft.compose(copy.deepcopy(step), ft.remat(blocks=["0"]))
    batch = torch.ones(3, 2)
    assert torch.equal(copied(copied.init(), batch)[1]["loss"], step(step.init(), batch)[1]["loss"])
