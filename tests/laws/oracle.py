"""What every pipeline must compute, written by hand with torch alone: slow, plain, and without ftrain's engine."""

import copy

import torch
import torch.nn.functional as F

import ftrain as ft

LR, DECAY, EMA, SWA, MAX_NORM, MAX_VALUE = 0.05, 0.1, 0.8, 1, 0.05, 0.002


def wrappers():
    """Every variant of every wrapper that changes what is computed, by the name the oracle knows it by."""
    return {
        "bf16": ft.with_amp("bf16"),
        "fp16": ft.with_amp("fp16"),
        "precision": ft.matmul_precision("high"),
        "remat": ft.remat(),
        "remat_dots": ft.remat("dots"),
        "accumulate": ft.accumulate(2),
        "clip": ft.clip(MAX_NORM),
        "clip_value": ft.clip(value=MAX_VALUE),
        "ema": ft.ema(EMA),
        "swa": ft.swa(SWA),
        "empty_cache": ft.empty_cache(2),
        "skip": ft.skip_nonfinite(3),
    }


def run(model, names, batches, *, seed=0, poison=()):
    """Train a copy of `model` and return its parameters, buffers, optimizer moments and averages.

    Args:
        model: the module to start from.
        names: the wrappers in order, innermost first.
        batches: one for each step.
        seed: of the state.
        poison: steps whose gradient is made NaN.
    """
    model = copy.deepcopy(model).train()
    decayed = [p for p in model.parameters() if p.ndim >= 2]
    others = [p for p in model.parameters() if p.ndim < 2]
    groups = [{"params": decayed, "weight_decay": DECAY}, {"params": others, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, lr=LR, foreach=False)
    average = {name: p.detach().clone() for name, p in model.named_parameters()}
    plain, updates = copy.deepcopy(average), 0
    scale = 2.0**16
    key = ft.random.words(ft.random.key(seed))
    losses = []
    for index, batch in enumerate(batches):
        before = copy.deepcopy((model.state_dict(), optimizer.state_dict()))
        torch.manual_seed(ft.random.seed_of(ft.random.fold_in_words(key, index)))
        value, finite = _gradients(model, names, batch, scale if "fp16" in names else 1.0, poison=index in poison)
        losses.append(value)
        guarded = "fp16" in names or "skip" in names
        if guarded and not finite:
            model.load_state_dict(before[0])
            scale /= 2
            continue
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
    }


def _gradients(model, names, batch, scale, *, poison):
    """Leave the gradient of the mean token loss in ``.grad``, as the wrappers shape it."""
    pieces = 2 if "accumulate" in names else 1
    order = [name for name in names if name in ("accumulate", "clip", "clip_value")]
    clip_first = order[: order.index("accumulate")] if "accumulate" in order else []
    clip_last = order[order.index("accumulate") + 1 :] if "accumulate" in order else order
    total, weight, finite, unit = 0.0, 0.0, True, None
    params = list(model.parameters())
    sums = [torch.zeros_like(p) for p in params]
    for tokens, labels in zip(batch["tokens"].chunk(pieces), batch["labels"].chunk(pieces), strict=True):
        loss, count = _token_loss(model, names, tokens, labels)
        if poison:
            loss = loss * float("nan")
        for p in params:
            p.grad = None
        # Narrow gradients are rounded in units of the mean of the first piece, or of the largest so far where they are
        # scaled, unless each is a mean that is clipped.
        largest = count * pieces if unit is None or "fp16" in names else unit
        unit = count if clip_first else max(unit or 0, largest)
        loss.backward(gradient=(1 / unit * scale).to(loss.dtype))
        finite = finite and bool(loss.isfinite()) and all(bool(p.grad.isfinite().all()) for p in params)
        for p in params:
            p.grad /= scale
        _clip(params, clip_first)
        for piece, p in zip(sums, params, strict=True):
            piece += p.grad * unit
        total, weight = total + float(loss.detach()), weight + float(count)
    for piece, p in zip(sums, params, strict=True):
        p.grad = piece / weight
    _clip(params, clip_last)
    return total / weight, finite


def _token_loss(model, names, tokens, labels):
    dtype = {"bf16": torch.bfloat16, "fp16": torch.float16}
    amp = next((dtype[name] for name in names if name in dtype), None)
    with torch.autocast("cpu", dtype=amp or torch.bfloat16, enabled=amp is not None):
        logits = model(tokens)
        wide = logits.to(torch.promote_types(logits.dtype, torch.float32)).flatten(0, 1)
        loss = F.cross_entropy(wide, labels.flatten(), reduction="sum")
    return loss, (labels != -100).sum().to(wide.dtype)


def _clip(params, names):
    if "clip" in names:
        torch.nn.utils.clip_grad_norm_(params, MAX_NORM)
    if "clip_value" in names:
        torch.nn.utils.clip_grad_value_(params, MAX_VALUE)
