"""The entrants: loops by hand, ftrain and other libraries, by the names that rows and claims use."""

from __future__ import annotations

from bench.settings import Settings
from bench.tasks import Entrant

HAND_EAGER = Entrant("loop, eager", "hand eager", "bench.loops:eager")
HAND_COMPILED = Entrant("loop, torch.compile(model)", "hand compile", "bench.loops:compiled")
HAND_BEST = Entrant("loop, torch.compile(loss)", "hand compile", "bench.loops:compiled", best=True)
HAND_UPDATE = Entrant("loop, torch.compile(loss, update)", "hand compile", "bench.loops:compiled_update", best=True)
HAND_MEDIUM = Entrant("loop, torch.compile(model), matmuls at medium", "control", "bench.loops:medium")
HAND_OWN_PROCESS = Entrant("loop, eager, in a process of its own", "control", "bench.loops:eager", own_process=True)
HAND_GRAPH = Entrant("loop, CUDA graph", "hand graph", "bench.loops:graphed")
HAND_GRAPH_BEST = Entrant("loop, CUDA graph of torch.compile(loss)", "hand graph", "bench.loops:graphed", best=True)

OURS_EAGER = Entrant("ftrain, eager", "ours", "bench.ours:eager")
OURS_COMPILED = Entrant("ftrain, compiled", "ours", "bench.ours:compiled")
OURS_KEEPING = Entrant("ftrain, compiled, not donated", "ours", "bench.ours:compiled", options=(("donate", False),))
OURS_GRAPHED = Entrant("ftrain, compiled, graphs", "ours", "bench.ours:compiled", options=(("graphs", True),))
OURS_COMBO = Entrant("ftrain, compiled, combo kernels", "ours", "bench.ours:compiled", options=(("combo", True),))
OURS_CALLS = Entrant("ftrain, compiled, calls alone", "ours", "bench.ours:calls_only")
OURS_UNGRAPHED = Entrant("ftrain, compiled, no graphs", "ours", "bench.ours:compiled", options=(("graphs", False),))

_TRAINERS = {
    "Accelerate": ("bench.peers.accelerate_loop:make", False, ("accelerate",)),
    "Fabric": ("bench.peers.fabric_loop:make", False, ("lightning",)),
    "HF Trainer": ("bench.peers.hf_trainer:drive", True, ("transformers", "accelerate")),
    "Lightning Trainer": ("bench.peers.lightning_trainer:drive", True, ("lightning",)),
}
TRAINERS = tuple(
    Entrant(
        f"{name}, {'best' if best else 'default'}",
        "trainer",
        code,
        best=best,
        own_process=owns,
        owns_loop=owns,
        required_libraries=required_libraries,
    )
    for name, (code, owns, required_libraries) in _TRAINERS.items()
    for best in (False, True)
)
ACCELERATE_FUSED = Entrant(
    "Accelerate, fused",
    "trainer",
    "bench.peers.accelerate_loop:make",
    required_libraries=("accelerate",),
    options=(("fused", True),),
)
JAX = tuple(
    Entrant(
        name,
        "jax",
        "bench.peers.jax_step:drive",
        best=best,
        own_process=True,
        owns_loop=True,
        required_libraries=("jax", "optax"),
    )
    for name, best in (("JAX jit", False), ("JAX jit, donated", True))
)

TORCH = Entrant("torch.optim, fused or foreach", "torch", "bench.updates:torch_optimizer")
TORCH_DEFAULT = Entrant(
    "torch.optim, default", "torch", "bench.updates:torch_optimizer", options=(("implementation", "default"),)
)
TORCH_COMPILED = Entrant(
    "torch.compile(step)",
    "torch compile",
    "bench.updates:torch_optimizer",
    best=True,
    options=(("implementation", "default"),),
)
ADAMW = Entrant("torch.optim.AdamW, fused", "torch", "bench.updates:torch_optimizer", options=(("optimizer", "adamw"),))
OURS_UPDATE = Entrant("ftrain update, eager", "ours", "bench.updates:ours")
OURS_UPDATE_COMPILED = Entrant("ftrain update, compiled", "ours", "bench.updates:ours_compiled")
OPTIMIZERS = {
    module: Entrant(name, "peer", "bench.updates:peer_optimizer", required_libraries=(module,))
    for module, name in (("lion_pytorch", "lion-pytorch"), ("schedulefree", "schedulefree"), ("torchao", "torchao"))
}
"""Libraries with optimizers that torch does not have, by the names of their modules."""

PEFT = Entrant("peft, eager", "peer", "bench.peers.peft_loop:make", required_libraries=("peft",))
PEFT_COMPILED = Entrant(
    "peft, torch.compile(loss)", "peer", "bench.peers.peft_loop:make", best=True, required_libraries=("peft",)
)

HAND = (HAND_EAGER, HAND_COMPILED, HAND_BEST, HAND_UPDATE)
OURS = (OURS_EAGER, OURS_COMPILED)
PEERS = {entrant.name for entrant in (*TRAINERS, ACCELERATE_FUSED, *JAX, *OPTIMIZERS.values(), PEFT, PEFT_COMPILED)}


def main_entrants(settings: Settings) -> tuple[Entrant, ...]:
    """Return the entrants for cases of long steps: the most important ones, or all in a full run."""
    if settings.full:
        return all_entrants(settings)
    best = {"HF Trainer, best", "JAX jit, donated"} if settings.peers and not settings.smoke else set()
    peers = (entrant for entrant in TRAINERS + JAX if entrant.name in best)
    return (HAND_EAGER, HAND_COMPILED, *onednn_loop(settings), OURS_EAGER, OURS_COMPILED, *peers)


def onednn_loop(settings: Settings) -> tuple[Entrant, ...]:
    """Return the loop whose matrix products oneDNN computes (`bench.loops.medium`), on a CPU only."""
    return (HAND_MEDIUM,) if settings.device == "cpu" else ()


def all_entrants(settings: Settings, *, trainers_in_smoke: bool = True) -> tuple[Entrant, ...]:
    """Return all entrants that run on the device; the first one is the reference for the losses.

    With `trainers_in_smoke=False`, a smoke test leaves out the trainers.
    """
    graphs = (HAND_GRAPH, HAND_GRAPH_BEST) if settings.device != "cpu" else ()
    jax = JAX if settings.device == "cpu" else ()
    trainers = TRAINERS if trainers_in_smoke or not settings.smoke else ()
    peers = (*trainers, *jax) if settings.peers else ()
    return (*HAND, *graphs, *OURS, *peers)
