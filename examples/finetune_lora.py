"""Fine-tune a language model of transformers with low-rank adapters, and load the adapters with peft.

The base is a small Llama, which is first trained for a short time on the source code of Python's standard library.
Then adapters of a few percent of its size are fine-tuned on English text: Python's own help pages. They are saved in
the format of peft. If peft is installed, it loads them, and its logits are compared. Needs no download; batches are
drawn as in `train_lm.py`.

    python examples/finetune_lora.py            # some minutes on a laptop CPU
    python examples/finetune_lora.py --dora --rank 4
    python examples/finetune_lora.py --help
"""

from __future__ import annotations

import argparse
import copy
import importlib.util
import sysconfig
import tempfile
import time
import warnings
import zlib
from pathlib import Path
from pydoc_data.topics import topics
from typing import Any

import torch
import train_lm
from torch import Tensor, nn
from train_lm import VOCABULARY, Parser, RandomWindows, as_tensor, sample, spread_windows
from transformers import LlamaConfig, LlamaForCausalLM

import ftrain as ft

TARGETS = ["*.q_proj", "*.k_proj", "*.v_proj", "*.o_proj", "*.gate_proj", "*.up_proj", "*.down_proj"]


# The model and its loss ----------------------------------------------------------------------------------------------


def llama(width: int, layers: int, length: int) -> nn.Module:
    """Return a Llama with random weights and attention heads of 32 features."""
    config = LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=width,
        intermediate_size=3 * width,
        num_hidden_layers=layers,
        num_attention_heads=max(1, width // 32),
        max_position_embeddings=length,
        use_cache=False,
    )
    return LlamaForCausalLM(config)


def predict_bytes(model: nn.Module, batch: dict[str, Tensor]) -> tuple[ft.Mean, dict[str, ft.Mean]]:
    """Return the cross-entropy of every byte given the earlier ones, in nats, and in bits as the metric `bpb`."""
    return train_lm.predict_bytes(lambda tokens: model(input_ids=tokens).logits, batch)


# The texts -----------------------------------------------------------------------------------------------------------


def source_code() -> Tensor:
    """Return the top-level modules of the standard library, one file after the other, as uint8."""
    files = sorted(Path(sysconfig.get_path("stdlib")).glob("*.py"))
    return as_tensor([path.read_bytes() for path in files])


def help_pages() -> tuple[Tensor, Tensor]:
    """Return the pages of Python's `help` about keywords and topics: those to train on, and one in ten held out."""
    train: list[bytes] = []
    held_out: list[bytes] = []
    for name, text in sorted(topics.items()):
        is_held_out = zlib.crc32(name.encode()) % 10 == 0
        (held_out if is_held_out else train).append(text.encode())
    return as_tensor(train), as_tensor(held_out)


# The run -------------------------------------------------------------------------------------------------------------


def options() -> argparse.Namespace:
    """Read the command line."""
    parser = Parser(__doc__)
    add = parser.add
    add("rank", 8, "rank of the adapters")
    add("alpha", 16.0, "scale of the adapters, times the rank")
    add("dropout", 0.0, "rate at which inputs of the adapters are dropped")
    parser.add_argument("--dora", action="store_true", help="give each output a magnitude of its own")
    parser.add_argument("--rslora", action="store_true", help="scale by the root of the rank")
    add("base-steps", 500, "steps of the base, on source code")
    add("steps", 400, "steps of the adapters, on help pages")
    add("batch", 16, "windows in a batch")
    add("length", 64, "bytes in a window")
    add("width", 128, "features of a byte; a multiple of 32")
    add("layers", 3, "number of layers")
    add("sample", 240, "bytes to sample before and after")
    parser.add_argument("--out", type=Path, help="directory to save the adapters in; default: a temporary one")
    options = parser.parse_args()
    parser.require_positive(options, "base-steps", "steps", "batch", "length", "layers")
    if options.rank < 1 or options.width < 1 or options.width % 32:
        parser.error(f"--rank {options.rank} must be at least 1, and --width {options.width} a multiple of 32")
    return options


def report(name: str, text: str) -> None:
    """Print a line of the report."""
    print(f"{name:<10}{text}", flush=True)


def bytes_of(tree: Any) -> int:
    """Return the bytes of the tensors of a tree."""
    return sum(leaf.nbytes for leaf in ft.tree.leaves(tree))


def compare(base: ft.TrainState, state: ft.TrainState) -> None:
    """Print what training holds in memory: all parameters compared with adapters only."""
    print(f"\n{'':<28}{'all parameters':>16}{'adapters':>14}")
    full, adapters = (sum(leaf.numel() for leaf in ft.tree.leaves(params)) for params in (base.params, state.params))
    print(f"{'trained parameters':<28}{full:>16,}{adapters:>14,}   {adapters / full:.1%}")
    for name, full_tree, adapters_tree in (
        ("gradients, MB", base.params, state.params),  # a gradient has the size of its parameter
        ("optimizer state, MB", base.opt_state, state.opt_state),
    ):
        full, adapters = bytes_of(full_tree), bytes_of(adapters_tree)
        print(f"{name:<28}{full / 1e6:>16.2f}{adapters / 1e6:>14.2f}   {adapters / full:.1%}")
    print(flush=True)


def reload_with_peft(base: nn.Module, directory: Path, batch: Tensor, ours: Tensor) -> None:
    """Load the adapters with peft, and print by how much its logits differ from `ours`."""
    if importlib.util.find_spec("peft") is None:
        report("peft", "is not installed; pip install peft, to see it load these adapters")
        return
    from peft import PeftModel

    with warnings.catch_warnings():  # peft may call functions that are deprecated in transformers.
        warnings.simplefilter("ignore")
        theirs = PeftModel.from_pretrained(copy.deepcopy(base), directory).eval()
    with torch.no_grad():
        difference = (theirs(input_ids=batch).logits - ours).abs().max()
    report(
        "peft",
        f"loads them; its logits differ by {float(difference):.1e} at most, of up to {float(ours.abs().max()):.0f}",
    )


def main() -> None:
    """Train a base, fine-tune it with adapters, save these and load them with peft."""
    o = options()
    torch.manual_seed(0)
    start = time.perf_counter()
    model = llama(o.width, o.layers, o.length)
    loss_fn = ft.from_module(model, predict_bytes)
    code, (prose, held_out) = source_code(), help_pages()
    held_out_batches = spread_windows(held_out, o.batch, o.length, batches=20)
    report("base", f"Llama, {sum(p.numel() for p in model.parameters()):,} parameters")
    report("texts", f"{len(code) / 1e6:.1f} MB of source code, then {len(prose) / 1e6:.2f} MB of help pages\n")

    # The base, which one would usually download.
    schedule = ft.schedules.warmup_cosine(6e-3, warmup=o.base_steps // 10, total=o.base_steps)
    pretrain = ft.compose(ft.train_step(loss_fn, ft.optim.adamw(schedule, b2=0.95, weight_decay=0.1)), ft.clip(1.0))
    base, _ = ft.fit(pretrain, pretrain.init(), RandomWindows(code, o.batch, o.length, seed=0), steps=o.base_steps)
    ft.to_module(model, base)
    before = ft.evaluate(ft.eval_step(loss_fn), base, held_out_batches)["bpb"]

    schedule = ft.schedules.warmup_cosine(5e-3, warmup=o.steps // 10, total=o.steps)
    step = ft.compose(
        ft.train_step(loss_fn, ft.optim.adamw(schedule, b2=0.95)),
        ft.lora(o.rank, o.alpha, targets=TARGETS, dropout=o.dropout, dora=o.dora, rslora=o.rslora),
        ft.clip(1.0),
    )
    print(f"\n{step}\n", flush=True)
    state, _ = ft.fit(step, step.init(), RandomWindows(prose, o.batch, o.length, seed=0), steps=o.steps)
    after = ft.evaluate(ft.eval_step(step.loss), state, held_out_batches)["bpb"]
    compare(base, state)

    merged = ft.adapters.merge(step, state)
    tuned = ft.to_module(copy.deepcopy(model), merged).eval()
    model.eval()
    for name, language_model in (("the base", model), ("with adapters", tuned)):
        text = sample(
            lambda tokens, llm=language_model: llm(input_ids=tokens).logits, "The ", o.sample, o.length, seed=0
        )
        print(f"--- {name} {'-' * (60 - len(name))}\n{text}\n", flush=True)

    directory = (o.out or Path(tempfile.mkdtemp())) / "adapter"
    ft.adapters.save(directory, step, state, task_type="CAUSAL_LM")
    with torch.no_grad():
        ours = tuned(input_ids=held_out_batches[0]["bytes"]).logits
    base_bytes = bytes_of(model.state_dict())
    saved = sum(file.stat().st_size for file in directory.iterdir())
    report("result", f"{before:.3f} bits a byte of held-out help pages, with adapters {after:.3f}")
    bpb = ft.evaluate(ft.eval_step(loss_fn), merged, held_out_batches)["bpb"]
    report("merged", f"{bpb:.3f} bits a byte, without adapters")
    report("saved", f"{directory}, {saved / 1e3:.0f} kB; the base has {base_bytes / 1e3:,.0f}")
    reload_with_peft(model, directory, held_out_batches[0]["bytes"], ours)
    report("time", f"{time.perf_counter() - start:.0f} s")


if __name__ == "__main__":
    main()
