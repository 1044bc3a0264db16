"""Train a byte-level GPT on the source code of Python's own standard library, with a full pipeline of wrappers.

Mixed precision, accumulation, clipping, averaging and compilation are wrappers around one pure step; `ft.fit` runs it,
shows and records it, and evaluates the averaged weights on whole files that were held out. Needs no download: the text
is the standard library of the interpreter that runs it.

    python examples/train_lm.py            # a few minutes on a laptop CPU
    python examples/train_lm.py --help
    torchrun --nproc-per-node=4 examples/train_lm.py --shard 4   # the same on four devices

Writes ``metrics.jsonl`` (a record a step), ``model.safetensors`` (the averaged weights) and checkpoints into ``--out``.
Stop it with Ctrl-C or with kill -9: the same command resumes the run, which ends with the same bits (as long as the
number of threads stays the same).
"""

from __future__ import annotations

import argparse
import math
import sysconfig
import time
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from einops import rearrange, reduce
from safetensors.torch import save_file
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.nn import functional as F

import ftrain as ft

VOCABULARY = 256
"""A token is a byte."""

NEIGHBOURS = 4
"""The vector of a byte is made from this many bytes: itself and those right before it."""


# The model -----------------------------------------------------------------------------------------------------------


class GPT(nn.Module):
    """A transformer decoder: ``tokens (batch, time)`` to ``logits (batch, time, 256)`` of the bytes that follow."""

    def __init__(self, *, width: int, layers: int, heads: int) -> None:
        super().__init__()
        self.embed = Embedding(width)
        self.blocks = nn.ModuleList(Block(width, heads) for _ in range(layers))
        self.norm = nn.RMSNorm(width)
        self.head = linear(width, VOCABULARY, zero=True)

    def forward(self, tokens: Tensor) -> Tensor:
        """Return the logits; those of a position depend on no later byte."""
        x = self.embed(tokens)
        for block in self.blocks:
            x = block(x)
        logits: Tensor = self.head(self.norm(x))
        return logits


class Embedding(nn.Module):
    """Map each byte and those right before it into one vector: ``(batch, time) -> (batch, time, width)``.

    A causal convolution over one-hot bytes. Without this layer, the first blocks mostly combine neighbouring bytes, and
    the same model needs many more steps for the same loss.
    """

    def __init__(self, width: int) -> None:
        super().__init__()
        self.table = nn.Embedding(NEIGHBOURS * VOCABULARY, width)
        nn.init.normal_(self.table.weight, std=NEIGHBOURS**-0.5)

    def forward(self, tokens: Tensor) -> Tensor:
        """Sum the rows of a byte and of those before it; each of these positions has its own rows."""
        first_rows = VOCABULARY * torch.arange(NEIGHBOURS, device=tokens.device)
        neighbours = F.pad(tokens, (NEIGHBOURS - 1, 0)).unfold(1, NEIGHBOURS, 1)  # batch, time, neighbour
        vectors: Tensor = reduce(
            self.table(neighbours + first_rows), "batch time neighbour width -> batch time width", "sum"
        )
        return vectors


class Block(nn.Module):
    """Attention, then a perceptron: each gets normalised ``x (batch, time, width)``, and its output is added to x."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.norm1, self.attention = nn.RMSNorm(width), Attention(width, heads)
        self.norm2, self.perceptron = nn.RMSNorm(width), Perceptron(width)

    def forward(self, x: Tensor) -> Tensor:
        """Return `x` plus the outputs of both."""
        x = x + self.attention(self.norm1(x))
        return x + self.perceptron(self.norm2(x))


class Attention(nn.Module):
    """Causal self-attention with rotary positions and normalised queries and keys (Henry et al., arXiv:2010.04245)."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.qkv, self.out = linear(width, 3 * width), linear(width, width, zero=True)

    def forward(self, x: Tensor) -> Tensor:
        """Mix ``x (batch, time, width)`` over time."""
        q, k, v = rearrange(self.qkv(x), "b t (qkv heads d) -> qkv b heads t d", qkv=3, heads=self.heads).unbind()
        q, k = (rotate(F.rms_norm(heads, heads.shape[-1:])) for heads in (q, k))
        x = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        mixed: Tensor = self.out(rearrange(x, "b heads t d -> b t (heads d)"))
        return mixed


def rotate(x: Tensor) -> Tensor:
    """Turn pairs of features of ``x (..., time, d)`` by angles that grow with time (RoPE, arXiv:2104.09864)."""
    time, d = x.shape[-2:]
    slowness = 1000.0 ** torch.linspace(0, 1, d // 2, device=x.device)
    angles = torch.arange(time, device=x.device)[:, None] / slowness  # time, d / 2
    cos, sin = angles.cos().to(x.dtype), angles.sin().to(x.dtype)
    first, second = x.chunk(2, dim=-1)
    return torch.cat([first * cos - second * sin, first * sin + second * cos], dim=-1)


class Perceptron(nn.Module):
    """Two linear maps with a squared ReLU between them (So et al., arXiv:2109.08668)."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.up, self.down = linear(width, 4 * width), linear(4 * width, width, zero=True)

    def forward(self, x: Tensor) -> Tensor:
        """Map each vector of ``x (batch, time, width)``."""
        y: Tensor = self.down(F.relu(self.up(x)).square())
        return y


def linear(inputs: int, outputs: int, *, zero: bool = False) -> nn.Linear:
    """Make a linear map without bias; `zero` weights at the start allow a high learning rate at once."""
    layer = nn.Linear(inputs, outputs, bias=False)
    if zero:
        nn.init.zeros_(layer.weight)
    return layer


def predict_bytes(model: Callable[[Tensor], Tensor], batch: dict[str, Tensor]) -> tuple[ft.Mean, dict[str, ft.Mean]]:
    """Return the cross-entropy of every byte given the earlier ones, in nats, and in bits as the metric `bpb`."""
    windows = batch["bytes"]  # batch, time + 1
    loss = ft.losses.cross_entropy(model(windows[:, :-1]), windows[:, 1:])
    return loss, {"bpb": ft.Mean(loss.total / math.log(2), loss.weight)}


# The data ------------------------------------------------------------------------------------------------------------


def standard_library() -> tuple[list[bytes], list[bytes]]:
    """Return the source files to train on, and one in twenty held out, chosen by a hash of the name.

    Tests are excluded, since some interpreters are installed without them.
    """
    root = Path(sysconfig.get_path("stdlib"))
    excluded = {"site-packages", "dist-packages", "test", "tests", "idle_test"}
    train: list[bytes] = []
    held_out: list[bytes] = []
    for path in sorted(root.rglob("*.py")):
        name = path.relative_to(root)
        if excluded.isdisjoint(name.parts):
            is_held_out = zlib.crc32(name.as_posix().encode()) % 20 == 0
            (held_out if is_held_out else train).append(path.read_bytes())
    if not train or not held_out:
        raise SystemExit(f"found no source files of the standard library under {root}")
    return train, held_out


def as_tensor(files: list[bytes]) -> Tensor:
    """Return the files one after the other as uint8."""
    return torch.frombuffer(bytearray(b"\n".join(files)), dtype=torch.uint8)


class RandomWindows:
    """Endless batches of random windows of a text. Batch k depends only on the seed and on k, which is the position."""

    def __init__(self, text: Tensor, batch: int, length: int, seed: int) -> None:
        self.windows = text.unfold(0, length + 1, 1)  # a view of all windows; only drawn windows are copied
        self.batch, self.key, self.k = batch, ft.random.key(seed), 0

    def __iter__(self) -> Iterator[dict[str, Tensor]]:
        while True:
            indices = ft.random.randint(ft.random.fold_in(self.key, self.k), (self.batch,), 0, len(self.windows))
            self.k += 1
            yield {"bytes": self.windows[indices].long()}

    def state_dict(self) -> dict[str, int]:
        """Return the position, for checkpoints."""
        return {"k": self.k}

    def load_state_dict(self, state: dict[str, int]) -> None:
        """Continue from a position."""
        self.k = state["k"]


def spread_windows(text: Tensor, batch: int, length: int, batches: int) -> list[dict[str, Tensor]]:
    """Return at most `batches` batches of windows that do not overlap, spread evenly over a text."""
    windows = text.unfold(0, length + 1, length)
    indices = torch.linspace(0, len(windows) - 1, min(batch * batches, len(windows))).long()
    return [{"bytes": rows} for rows in windows[indices].long().split(batch)]


# The run -------------------------------------------------------------------------------------------------------------


class Parser(argparse.ArgumentParser):
    """A command line whose help shows the defaults."""

    def __init__(self, description: str) -> None:
        super().__init__(
            description=description.partition("\n")[0], formatter_class=argparse.ArgumentDefaultsHelpFormatter
        )

    def add(self, name: str, default: Any, text: str, **more: Any) -> None:
        """Add an option that has the type of its default."""
        self.add_argument(f"--{name}", type=type(default), default=default, help=text, **more)

    def require_positive(self, options: argparse.Namespace, *names: str) -> None:
        """End the program with an error if one of these options is not positive."""
        for name in names:
            value = getattr(options, name.replace("-", "_"))
            if value <= 0:
                self.error(f"--{name} {value} is not a positive number")


def options() -> argparse.Namespace:
    """Read the command line."""
    parser = Parser(__doc__)
    add = parser.add
    add("steps", 600, "optimizer steps")
    add("batch", 32, "windows in a batch")
    add("accumulate", 1, "microbatches per batch")
    add("length", 128, "bytes in a window")
    add("width", 128, "features of a byte; a multiple of twice the heads")
    add("layers", 4, "blocks")
    add("heads", 2, "attention heads")
    add("lr", 5e-3, "peak learning rate")
    add("decay", 0.1, "weight decay of the matrices")
    add("ema", 0.98, "decay of the average of the weights")
    add("clip", 1.0, "largest norm of the gradient")
    add("seed", 0, "seed of the weights and of the windows")
    add("device", ft.backends.default().name, "where to train")
    add(
        "amp",
        "auto",
        "dtype to compute in; auto is bf16 if the device computes in it natively; weights stay float32",
        choices=["auto", "bf16", "fp16", "none"],
    )
    parser.add_argument(
        "--remat", action="store_true", help="compute the activations of blocks again instead of keeping them"
    )
    add("shard", 1, "ranks that divide the state; start them with torchrun")
    add("replicate", 1, "copies of the state, each divided over --shard ranks")
    add("level", 3, "what is divided over ranks, as the levels of ZeRO; 0 copies the whole state", choices=range(4))
    parser.add_argument("--no-compile", action="store_true", help="run the step operation by operation")
    add("eval-batches", 100, "batches of held-out text to evaluate on")
    add("prompt", "def ", "what the sampled text continues")
    add("sample", 400, "bytes to sample")
    add("save-every", 200, "steps between checkpoints")
    add("out", Path("runs/lm"), "directory of the run; a run found there is resumed")
    options = parser.parse_args()
    numbers = "steps", "batch", "accumulate", "length", "shard", "replicate", "eval-batches", "save-every"
    parser.require_positive(options, *numbers)
    if options.heads < 1 or options.width < 1 or options.width % (2 * options.heads):
        parser.error(f"--width {options.width} is not a multiple of twice --heads {options.heads}")
    return options


def pipeline(model: nn.Module, o: argparse.Namespace, mesh: DeviceMesh | None) -> ft.Step:
    """Return the training step with its wrappers; with a mesh, it is sharded over the ranks."""

    def identity(step: ft.Step) -> ft.Step:
        """Take the place of a wrapper that is switched off."""
        return step

    schedule = ft.schedules.warmup_cosine(o.lr, warmup=min(50, o.steps // 10), total=o.steps)
    optimizer = ft.optim.adamw(schedule, b2=0.99, weight_decay=o.decay)
    step: ft.Step = ft.compose(
        ft.train_step(ft.from_module(model, predict_bytes), optimizer),
        ft.remat(blocks=[Block]) if o.remat else identity,
        ft.with_amp(o.amp) if o.amp != "none" else identity,
        ft.accumulate(o.accumulate),
        ft.clip(o.clip),
        ft.ema(o.ema),
        ft.sharded(mesh, o.level) if mesh else identity,
        ft.compiled() if not o.no_compile else identity,
    )
    return step


@torch.no_grad()
def sample(
    model: Callable[[Tensor], Tensor],
    prompt: str,
    count: int,
    length: int,
    seed: int,
    *,
    device: str = "cpu",
    temperature: float = 0.7,
) -> str:
    """Continue a prompt by `count` bytes, each drawn from the prediction of the model for the last `length` bytes."""
    tokens, key = torch.tensor(list(prompt.encode()), device=device), ft.random.key(seed)
    for k in range(count):
        logits = model(tokens[None, -length:])[0, -1]
        # The index of the smallest time / probability, with exponential times, is distributed as the probabilities.
        times = ft.random.exponential(ft.random.fold_in(key, k), logits.shape).to(device)
        tokens = torch.cat([tokens, (logits / temperature - times.log()).argmax(keepdim=True)])
    text = bytes(tokens.tolist()).decode(errors="replace")
    return "".join(
        letter if letter.isprintable() or letter in "\n\t" else "\N{REPLACEMENT CHARACTER}" for letter in text
    )


def main() -> None:
    """Train, evaluate, sample and save."""
    o = options()
    # First, because it chooses the device of this rank.
    mesh = ft.parallel.mesh(replicate=o.replicate, shard=o.shard) if o.shard * o.replicate > 1 else None
    is_first_rank = mesh is None or mesh.get_rank() == 0
    torch.manual_seed(o.seed)
    model = GPT(width=o.width, layers=o.layers, heads=o.heads).to(o.device)
    step = pipeline(model, o, mesh)

    train_files, held_out_files = standard_library()
    train, held_out = as_tensor(train_files), as_tensor(held_out_files)
    o.out.mkdir(parents=True, exist_ok=True)
    metrics, checkpoints = o.out / "metrics.jsonl", ft.Checkpoints(o.out / "checkpoints", every=o.save_every, keep=2)
    if is_first_rank and not checkpoints.steps():
        metrics.unlink(missing_ok=True)

    def report(name: str, text: str) -> None:
        if is_first_rank:
            print(f"{name:<9}{text}", flush=True)

    report("text", f"{len(train_files)} files, {len(train) / 1e6:.1f} MB of Python's standard library")
    report("held out", f"{len(held_out_files)} files, {len(held_out) / 1e6:.2f} MB")
    report("model", f"{sum(p.numel() for p in model.parameters()) / 1e6:.2f} M parameters")
    report("device", ft.backends.of(o.device).describe())
    if saved := checkpoints.steps():
        report("resumed", f"after step {saved[-1]}, from {checkpoints.directory}")
    state = step.init(seed=o.seed)
    # Printed after init, so that it shows the dtype that with_amp("auto") takes on this device.
    if is_first_rank:
        print(f"\n{step}\n", flush=True)

    eval_step = ft.eval_step(step.loss)
    windows = spread_windows(held_out, o.batch, o.length, o.eval_batches)

    def evaluate(state: ft.TrainState) -> dict[str, float]:
        return ft.evaluate(eval_step, ft.averaged(state), windows, dtype=None if o.amp == "none" else o.amp)

    start = time.perf_counter()
    state, history = ft.fit(
        step,
        state,
        RandomWindows(train, o.batch, o.length, o.seed),
        steps=o.steps,
        evaluate=evaluate,
        checkpoints=checkpoints,
        loggers=[ft.loggers.jsonl(metrics)],
        throughput={"tokens": lambda batch: batch["bytes"].shape[0] * (batch["bytes"].shape[1] - 1)},
    )
    seconds = time.perf_counter() - start

    averaged = ft.parallel.whole(ft.averaged(state))  # Gathers the shards of each weight.
    if not is_first_rank:
        return
    save_file({name: weight.contiguous() for name, weight in averaged.params.items()}, o.out / "model.safetensors")
    text = sample(ft.to_module(model, averaged), o.prompt, o.sample, o.length, o.seed, device=o.device)
    print(f"\n{text}\n")
    bpb, steps = history["eval_bpb"][-1], len(history["loss"])
    report("result", f"{bpb:.3f} bits per byte held out, after {steps} steps and {seconds:.0f} s")
    report("saved", f"{o.out / 'model.safetensors'}, {metrics}")


if __name__ == "__main__":
    main()
