"""What every pipeline must compute, written by hand with torch alone: slow, plain, and without ftrain's engine."""

import copy
import math
from dataclasses import dataclass, replace

import torch
import torch.nn.functional as F

import ftrain as ft
from tests.laws.registry import EMA, MAX_NORM, MAX_VALUE, RHO, SPIKES, SWA

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
    average = {name: p.detach().clone() for name, p in model.named_parameters()}
    plain, updates = copy.deepcopy(average), 0
    scale, norms = 2.0**16, []
    key = ft.random.key_data(ft.random.key(seed))
    losses, spikes = [], []
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
        for name, p in model.named_parameters():
            average[name] = EMA * average[name] + (1 - EMA) * p.detach()
            plain[name] = plain[name] + (p.detach() - plain[name]) / max(updates - SWA, 1)
    return {
        "params": {name: p.detach() for name, p in model.named_parameters()},
        "buffers": dict(model.named_buffers()),
        "mu": {n: optimizer.state[p]["exp_avg"] for n, p in model.named_parameters() if p in optimizer.state},
        "nu": {n: optimizer.state[p]["exp_avg_sq"] for n, p in model.named_parameters() if p in optimizer.state},
        "ema": average,
        "swa": plain,
        "scale": scale,
        "losses": losses,
        "spikes": spikes,
    }


@dataclass
class Computed:
    """The gradient of a mean loss, the loss as total and weight, and what was seen of its norm."""

    grads: list
    total: float
    weight: float
    finite: bool
    norm: float | None = None
    spike: bool = False


class Oracle:
    """Gradients as the wrappers of the gradient shape them, in their order.

    Args:
        model: the module, whose buffers move.
        names: the wrappers in order, innermost first.
        scale: what the loss is multiplied with.
        norms: finite gradient norms of the steps before.
    """

    def __init__(self, model, names, scale, norms):
        self.model, self.names, self.scale, self.norms = model, names, scale, norms
        self.params = list(model.parameters())
        by_hand = ("accumulate", "clip", "clip_value", "sam", "spikes", "spikes_clip")
        self.order = [name for name in names if name in by_hand]

    def gradient(self, batch, depth=None):
        """Return the gradient after the first `depth` wrappers. Default: all."""
        depth = len(self.order) if depth is None else depth
        if depth == 0:
            return self.summed(batch, 1)
        name, inner = self.order[depth - 1], lambda part: self.gradient(part, depth - 1)
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
        """The gradient of the mean token loss, added up over pieces."""
        total, weight, finite, unit = 0.0, 0.0, True, 0
        sums = [torch.zeros_like(p) for p in self.params]
        for tokens, labels in cut(batch, pieces):
            loss, count = self.token_loss(tokens, labels)
            for p in self.params:
                p.grad = None
            # Narrow gradients are rounded in units of the mean of the first piece, or of the largest so far where they
            # are scaled.
            unit = max(unit, count * pieces) if unit == 0 or "fp16" in self.names else unit
            loss.backward(gradient=(1 / unit * self.scale).to(loss.dtype))
            finite = finite and bool(loss.isfinite()) and all(bool(p.grad.isfinite().all()) for p in self.params)
            for piece, p in zip(sums, self.params, strict=True):
                piece += p.grad / self.scale * unit
            total, weight = total + float(loss.detach()), weight + float(count)
        return Computed([piece / weight for piece in sums], total, weight, finite)

    def averaged(self, batch, inner):
        """The weighted mean of what was done to the gradient of each piece."""
        pieces = [inner({"tokens": tokens, "labels": labels}) for tokens, labels in cut(batch, 2)]
        weight = sum(piece.weight for piece in pieces)
        columns = zip(*(piece.grads for piece in pieces), strict=True)
        grads = [sum(g * p.weight for g, p in zip(column, pieces, strict=True)) / weight for column in columns]
        return Computed(grads, sum(piece.total for piece in pieces), weight, all(piece.finite for piece in pieces))

    def sharpness_aware(self, batch, inner):
        """The gradient at parameters that are moved along the gradient, with the draws and the buffers of before."""
        before, drawn = copy.deepcopy(dict(self.model.named_buffers())), torch.get_rng_state()
        first = inner(batch)
        after, params = copy.deepcopy(dict(self.model.named_buffers())), [p.detach().clone() for p in self.params]
        norm = math.sqrt(sum(float(grad.double().square().sum()) for grad in first.grads))
        torch.set_rng_state(drawn)
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
        """Compare the norm with the median of the last steps."""
        norm = math.sqrt(sum(float(grad.double().square().sum()) for grad in computed.grads))
        recent = sorted(self.norms[-SPIKES["window"] :])
        if len(self.norms) < SPIKES["warmup"] or not math.isfinite(norm):
            return replace(computed, norm=norm)
        limit = SPIKES["factor"] * recent[(len(recent) - 1) // 2]
        grads = [grad * limit / norm for grad in computed.grads] if norm > limit else computed.grads
        return replace(
            computed, grads=grads if name == "spikes_clip" else computed.grads, norm=norm, spike=norm > limit
        )

    def token_loss(self, tokens, labels):
        dtype = {"bf16": torch.bfloat16, "fp16": torch.float16}
        amp = next((dtype[name] for name in self.names if name in dtype), None)
        with torch.autocast("cpu", dtype=amp or torch.bfloat16, enabled=amp is not None):
            logits = self.model(tokens)
            wide = logits.to(torch.promote_types(logits.dtype, torch.float32)).flatten(0, 1)
            loss = F.cross_entropy(wide, labels.flatten(), reduction="sum")
        return loss, (labels != -100).sum().to(wide.dtype)


def cut(batch, pieces):
    """Tokens and labels of each piece of a batch."""
    return zip(batch["tokens"].chunk(pieces), batch["labels"].chunk(pieces), strict=True)
