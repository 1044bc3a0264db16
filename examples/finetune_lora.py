"""Fine-tune a language model of transformers with low-rank adapters, and load the adapters with peft.

The base is a small Llama made from a config and trained here for a short time on the source code of Python's standard
library. Adapters of a few percent of its size are then fine-tuned on English text: Python's own help pages. They are
saved in the format of peft and, where peft is installed, loaded by it and compared. Needs no download; windows of text
are drawn as `train_lm.py` draws them.

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
    """A Llama with fresh weights; attention heads of 32 features."""
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
    """The modules of the standard library that are single files, one after the other, as uint8."""
    files = sorted(Path(sysconfig.get_path("stdlib")).glob("*.py"))
    return as_tensor([path.read_bytes() for path in files])


def help_pages() -> tuple[Tensor, Tensor]:
    """The pages of Python's `help` about keywords and topics; one in ten is held out."""
    pages: tuple[list[bytes], list[bytes]] = [], []
    for name, text in sorted(topics.items()):
        pages[zlib.crc32(name.encode()) % 10 == 0].append(text.encode())
    return as_tensor(pages[0]), as_tensor(pages[1])


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
    if options.rank < 1 or options.width < 1 or options.width % 32:
        parser.error(f"--rank {options.rank} must be at least 1, and --width {options.width} a multiple of 32")
    return options


def report(name: str, text: str) -> None:
    """Print a line of the report."""
    print(f"{name:<10}{text}", flush=True)


def size(tree: Any) -> int:
    """Bytes of the tensors of a tree."""
    return sum(leaf.nbytes for leaf in ft.tree.leaves(tree))


def compare(base: ft.TrainState, state: ft.TrainState) -> None:
    """Print the memory for training all parameters, and adapters only."""
    print(f"\n{'':<28}{'all parameters':>16}{'adapters':>14}")
    counts = [sum(leaf.numel() for leaf in ft.tree.leaves(each.params)) for each in (base, state)]
    print(f"{'trained parameters':<28}{counts[0]:>16,}{counts[1]:>14,}   {counts[1] / counts[0]:.1%}")
    for name, bytes_of in (
        ("gradients, MB", lambda each: size(each.params)),
        ("optimizer state, MB", lambda each: size(each.opt_state)),
    ):
        full, small = bytes_of(base), bytes_of(state)
        print(f"{name:<28}{full / 1e6:>16.2f}{small / 1e6:>14.2f}   {small / full:.1%}")
    print(flush=True)


def reload_with_peft(base: nn.Module, directory: Path, batch: Tensor, ours: Tensor) -> None:
    """Load the adapters with peft and compare its logits with ours."""
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
    held = spread_windows(held_out, o.batch, o.length, batches=20)
    report("base", f"Llama, {sum(p.numel() for p in model.parameters()):,} parameters")
    report("texts", f"{len(code) / 1e6:.1f} MB of source code, then {len(prose) / 1e6:.2f} MB of help pages\n")

    # The base, which one would usually download.
    schedule = ft.schedules.warmup_cosine(6e-3, warmup=o.base_steps // 10, total=o.base_steps)
    pretrain = ft.compose(ft.train_step(loss_fn, ft.optim.adamw(schedule, b2=0.95, weight_decay=0.1)), ft.clip(1.0))
    base, _ = ft.fit(pretrain, pretrain.init(), RandomWindows(code, o.batch, o.length, seed=0), steps=o.base_steps)
    ft.to_module(model, base)
    before = ft.evaluate(ft.eval_step(loss_fn), base, held)["bpb"]

    schedule = ft.schedules.warmup_cosine(5e-3, warmup=o.steps // 10, total=o.steps)
    step = ft.compose(
        ft.train_step(loss_fn, ft.optim.adamw(schedule, b2=0.95)),
        ft.lora(o.rank, o.alpha, targets=TARGETS, dropout=o.dropout, dora=o.dora, rslora=o.rslora),
        ft.clip(1.0),
    )
    print(f"\n{step}\n", flush=True)
    state, _ = ft.fit(step, step.init(), RandomWindows(prose, o.batch, o.length, seed=0), steps=o.steps)
    after = ft.evaluate(ft.eval_step(step.loss), state, held)["bpb"]
    compare(base, state)

    merged = ft.adapters.merge(step, state)
    tuned = ft.to_module(copy.deepcopy(model), merged).eval()
    model.eval()
    for name, each in (("the base", model), ("with adapters", tuned)):
        text = sample(lambda tokens, llm=each: llm(input_ids=tokens).logits, "The ", o.sample, o.length, seed=0)
        print(f"--- {name} {'-' * (60 - len(name))}\n{text}\n", flush=True)

    directory = (o.out or Path(tempfile.mkdtemp())) / "adapter"
    ft.adapters.save(directory, step, state, task_type="CAUSAL_LM")
    with torch.no_grad():
        ours = tuned(input_ids=held[0]["bytes"]).logits
    whole = size(model.state_dict())
    saved = sum(file.stat().st_size for file in directory.iterdir())
    report("result", f"{before:.3f} bits a byte of held-out help pages, with adapters {after:.3f}")
    report("merged", f"{ft.evaluate(ft.eval_step(loss_fn), merged, held)['bpb']:.3f} bits a byte, without adapters")
    report("saved", f"{directory}, {saved / 1e3:.0f} kB; the base has {whole / 1e3:,.0f}")
    reload_with_peft(model, directory, held[0]["bytes"], ours)
    report("time", f"{time.perf_counter() - start:.0f} s")


if __name__ == "__main__":
    main()
