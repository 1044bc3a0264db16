"""A training loop written by hand in plain torch: the reference that every pipeline of wrappers must equal."""

import copy
import math
from dataclasses import dataclass, replace

import torch
import torch.nn.functional as F

import ftrain as ft
from tests.laws.registry import EMA, EMA_SCHEDULE, MAX_NORM, MAX_VALUE, RHO, SPIKES, SWA

LR, DECAY = 0.05, 0.1


def run(model, names, batches, *, seed=0):
    """Train a copy of `model` and return its parameters, buffers, optimizer moments and averages.

    Args:
        model: the module to start from.
        names: the wrappers in order, innermost first.
        batches: one for each step.
        seed: of the state.
    """
    model = copy.deepcopy(model).train()
    decayed = [p for p in model.parameters() if p.ndim >= 2]
    others = [p for p in model.parameters() if p.ndim < 2]
    groups = [{"params": decayed, "weight_decay": DECAY}, {"params": others, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, lr=LR, foreach=False)
    ema = {name: p.detach().clone() for name, p in model.named_parameters()}
    swa = copy.deepcopy(ema)
    updates = 0
    scale = 2.0**16
    norms, losses, spikes = [], [], []
    key = ft.random.key_data(ft.random.key(seed))
    for index, batch in enumerate(batches):
        before = copy.deepcopy(model.state_dict())
        torch.manual_seed(ft.random.seed_of(ft.random.fold_in_key_data(key, index)))
        computed = Oracle(model, names, scale if "fp16" in names else 1.0, norms).gradient(batch)
        losses.append(computed.total / computed.weight)
        spikes.append(computed.spike)
        if computed.norm is not None and math.isfinite(computed.norm):
            norms.append(computed.norm)
        is_refused = ("fp16" in names or "skip" in names) and not computed.finite
        if is_refused:
            scale /= 2
        if is_refused or ("spikes" in names and computed.spike):
            model.load_state_dict(before)
            continue
        for p, grad in zip(model.parameters(), computed.grads, strict=True):
            p.grad = grad
        optimizer.step()
        updates += 1
        decay = EMA_SCHEDULE(index) if "ema_schedule" in names else EMA
        for name, p in model.named_parameters():
            ema[name] = decay * ema[name] + (1 - decay) * p.detach()
            swa[name] = swa[name] + (p.detach() - swa[name]) / max(updates - SWA, 1)
    return {
        "params": {name: p.detach() for name, p in model.named_parameters()},
        "buffers": dict(model.named_buffers()),
        "mu": {n: optimizer.state[p]["exp_avg"] for n, p in model.named_parameters() if p in optimizer.state},
        "nu": {n: optimizer.state[p]["exp_avg_sq"] for n, p in model.named_parameters() if p in optimizer.state},
        "ema": ema,
        "swa": swa,
        "scale": scale,
        "losses": losses,
        "spikes": spikes,
    }


@dataclass
class Computed:
    """The gradient of a mean loss.

    Args:
        grads: one tensor for each parameter.
        total: the sum of the losses of the tokens.
        weight: the number of tokens that are not padding.
        finite: whether the loss and all gradients are finite.
        norm: of the gradient, where `skip_spikes` measured it.
        spike: whether that norm was above the limit.
    """

    grads: list
    total: float
    weight: float
    finite: bool
    norm: float | None = None
    spike: bool = False


class Oracle:
    """Computes gradients and applies the wrappers of the gradient to them, in their order.

    Args:
        model: the module; its buffers are updated.
        names: the wrappers in order, innermost first.
        scale: the loss scale.
        norms: the finite gradient norms of earlier steps.
    """

    def __init__(self, model, names, scale, norms):
        self.model, self.names, self.scale, self.norms = model, names, scale, norms
        self.params = list(model.parameters())
        of_gradient = ("accumulate", "clip", "clip_value", "sam", "spikes", "spikes_clip")
        self.order = [name for name in names if name in of_gradient]

    def gradient(self, batch, depth=None):
        """Return the gradient after the first `depth` wrappers. Default: all."""
        depth = len(self.order) if depth is None else depth
        if depth == 0:
            return self.summed(batch, 1)
        name = self.order[depth - 1]

        def inner(part):
            return self.gradient(part, depth - 1)

        if name == "accumulate":
            return self.summed(batch, 2) if depth == 1 else self.averaged(batch, inner)
        if name == "sam":
            return self.sharpness_aware(batch, inner)
        computed = inner(batch)
        if name.startswith("spikes"):
            return self.watched(computed, name)
        for p, grad in zip(self.params, computed.grads, strict=True):
            p.grad = grad.clone()
        if name == "clip":
            torch.nn.utils.clip_grad_norm_(self.params, MAX_NORM)
        else:
            torch.nn.utils.clip_grad_value_(self.params, MAX_VALUE)
        return replace(computed, grads=[p.grad for p in self.params])

    def summed(self, batch, pieces):
        """Return the gradient of the mean token loss, summed over `pieces` microbatches."""
        total, weight = 0.0, 0.0
        finite = True
        unit = 0
        sums = [torch.zeros_like(p) for p in self.params]
        for tokens, labels in cut(batch, pieces):
            loss, count = self.token_loss(tokens, labels)
            for p in self.params:
                p.grad = None
            # `accumulate` divides the loss of each piece by a weight before its backward pass: that of the first piece,
            # or with a loss scale the largest so far. In 16 bits the divisor changes how gradients are rounded.
            if unit == 0 or "fp16" in self.names:
                unit = max(unit, count * pieces)
            loss.backward(gradient=(1 / unit * self.scale).to(loss.dtype))
            finite = finite and bool(loss.isfinite()) and all(bool(p.grad.isfinite().all()) for p in self.params)
            for grad_sum, p in zip(sums, self.params, strict=True):
                grad_sum += p.grad / self.scale * unit
            total += float(loss.detach())
            weight += float(count)
        return Computed([grad_sum / weight for grad_sum in sums], total, weight, finite)

    def averaged(self, batch, inner):
        """Return the weighted mean of the gradients that `inner` returns for two microbatches."""
        pieces = [inner({"tokens": tokens, "labels": labels}) for tokens, labels in cut(batch, 2)]
        weight = sum(piece.weight for piece in pieces)
        total = sum(piece.total for piece in pieces)
        first, second = pieces
        grads = [
            (a * first.weight + b * second.weight) / weight for a, b in zip(first.grads, second.grads, strict=True)
        ]
        return Computed(grads, total, weight, first.finite and second.finite)

    def sharpness_aware(self, batch, inner):
        """Return the gradient at ``params + RHO * g / norm(g)``; both passes have the same dropout and buffers."""
        before = copy.deepcopy(dict(self.model.named_buffers()))
        random_state = torch.get_rng_state()
        first = inner(batch)
        after = copy.deepcopy(dict(self.model.named_buffers()))
        params = [p.detach().clone() for p in self.params]
        norm = global_norm(first.grads)
        torch.set_rng_state(random_state)
        with torch.no_grad():
            for p, grad in zip(self.params, first.grads, strict=True):
                p += RHO * grad / norm
            self.set_buffers(before)
        second = inner(batch)
        with torch.no_grad():
            for p, value in zip(self.params, params, strict=True):
                p.copy_(value)
            self.set_buffers(after)
        return replace(first, grads=second.grads, finite=first.finite and second.finite)

    def set_buffers(self, values):
        for name, buffer in self.model.named_buffers():
            buffer.copy_(values[name])

    def watched(self, computed, name):
        """Compare the norm with the median of the last steps; "spikes_clip" scales a larger one down to the limit."""
        norm = global_norm(computed.grads)
        recent = sorted(self.norms[-SPIKES["window"] :])
        if len(self.norms) < SPIKES["warmup"] or not math.isfinite(norm):
            return replace(computed, norm=norm)
        limit = SPIKES["factor"] * recent[(len(recent) - 1) // 2]
        grads = computed.grads
        if norm > limit and name == "spikes_clip":
            grads = [grad * limit / norm for grad in grads]
        return replace(computed, grads=grads, norm=norm, spike=norm > limit)

    def token_loss(self, tokens, labels):
        """Return the sum of the losses of the tokens, and the number of tokens that are not padding."""
        dtypes = {"bf16": torch.bfloat16, "fp16": torch.float16}
        amp = next((dtypes[name] for name in self.names if name in dtypes), None)
        with torch.autocast("cpu", dtype=amp or torch.bfloat16, enabled=amp is not None):
            logits = self.model(tokens)
            wide = logits.to(torch.promote_types(logits.dtype, torch.float32)).flatten(0, 1)
            loss = F.cross_entropy(wide, labels.flatten(), reduction="sum")
        return loss, (labels != -100).sum().to(wide.dtype)


def cut(batch, pieces):
    """Yield the tokens and labels of each microbatch."""
    return zip(batch["tokens"].chunk(pieces), batch["labels"].chunk(pieces), strict=True)


def global_norm(grads):
    """Return the norm of all gradients together, computed in float64."""
    return math.sqrt(sum(float(grad.double().square().sum()) for grad in grads))
