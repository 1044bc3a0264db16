"""Who races: the loops by hand, ftrain, and the peers, by the names that rows and claims use."""

from __future__ import annotations

from bench.settings import Settings
from bench.tasks import Entrant

HAND_EAGER = Entrant("loop, eager", "hand eager", "bench.loops:eager")
HAND_COMPILED = Entrant("loop, torch.compile(model)", "hand compile", "bench.loops:compiled")
HAND_BEST = Entrant("loop, torch.compile(loss)", "hand compile", "bench.loops:compiled", best=True)
HAND_UPDATE = Entrant("loop, torch.compile(loss, update)", "hand compile", "bench.loops:compiled_update", best=True)
HAND_MEDIUM = Entrant("loop, torch.compile(model), matmuls at medium", "control", "bench.loops:medium")
HAND_OWN_PROCESS = Entrant("loop, eager, in a process of its own", "control", "bench.loops:eager", in_own_process=True)
HAND_GRAPH = Entrant("loop, CUDA graph", "hand graph", "bench.loops:graphed")
HAND_GRAPH_BEST = Entrant("loop, CUDA graph of torch.compile(loss)", "hand graph", "bench.loops:graphed", best=True)

OURS_EAGER = Entrant("ftrain, eager", "ours", "bench.ours:eager")
OURS_COMPILED = Entrant("ftrain, compiled", "ours", "bench.ours:compiled")
OURS_KEEPING = Entrant("ftrain, compiled, not donated", "ours", "bench.ours:compiled", options=(("donate", False),))
OURS_GRAPHED = Entrant("ftrain, compiled, graphs", "ours", "bench.ours:compiled", options=(("graphs", True),))
OURS_COMBO = Entrant("ftrain, compiled, combo kernels", "ours", "bench.ours:compiled", options=(("combo", True),))
OURS_CALLS = Entrant("ftrain, compiled, calls alone", "ours", "bench.ours:called")
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
        in_own_process=owns,
        owns_loop=owns,
        needs=needs,
    )
    for name, (code, owns, needs) in _TRAINERS.items()
    for best in (False, True)
)
ACCELERATE_FUSED = Entrant(
    "Accelerate, fused",
    "trainer",
    "bench.peers.accelerate_loop:make",
    needs=("accelerate",),
    options=(("fused", True),),
)
JAX = tuple(
    Entrant(
        name,
        "jax",
        "bench.peers.jax_step:drive",
        best=best,
        in_own_process=True,
        owns_loop=True,
        needs=("jax", "optax"),
    )
    for name, best in (("JAX jit", False), ("JAX jit, donated", True))
)

TORCH = Entrant("torch.optim, fused or foreach", "torch", "bench.updates:theirs")
TORCH_DEFAULT = Entrant("torch.optim, default", "torch", "bench.updates:theirs", options=(("way", "default"),))
TORCH_COMPILED = Entrant(
    "torch.compile(step)", "torch compile", "bench.updates:theirs", best=True, options=(("way", "default"),)
)
ADAMW = Entrant("torch.optim.AdamW, fused", "torch", "bench.updates:theirs", options=(("optimizer", "adamw"),))
OURS_UPDATE = Entrant("ftrain update, eager", "ours", "bench.updates:ours")
OURS_UPDATE_COMPILED = Entrant("ftrain update, compiled", "ours", "bench.updates:ours_compiled")
OPTIMIZERS = {
    module: Entrant(name, "peer", "bench.updates:peers", needs=(module,))
    for module, name in (("lion_pytorch", "lion-pytorch"), ("schedulefree", "schedulefree"), ("torchao", "torchao"))
}
"""Libraries of optimizers, by their modules."""

PEFT = Entrant("peft, eager", "peer", "bench.peers.peft_loop:make", needs=("peft",))
PEFT_COMPILED = Entrant("peft, torch.compile(loss)", "peer", "bench.peers.peft_loop:make", best=True, needs=("peft",))

HAND = (HAND_EAGER, HAND_COMPILED, HAND_BEST, HAND_UPDATE)
OURS = (OURS_EAGER, OURS_COMPILED)
PEERS = {each.name for each in (*TRAINERS, ACCELERATE_FUSED, *JAX, *OPTIMIZERS.values(), PEFT, PEFT_COMPILED)}


def few(settings: Settings) -> tuple[Entrant, ...]:
    """Those to whom the claims look first, for cases whose steps are long; everyone in a full run."""
    if settings.full:
        return everyone(settings)
    best = {"HF Trainer, best", "JAX jit, donated"} if settings.peers and not settings.smoke else set()
    peers = (e for e in TRAINERS + JAX if e.name in best)
    return (HAND_EAGER, HAND_COMPILED, *by_onednn(settings), OURS_EAGER, OURS_COMPILED, *peers)


def by_onednn(settings: Settings) -> tuple[Entrant, ...]:
    """The loop whose matrix products oneDNN computes on a CPU, by a setting of torch that few know."""
    return (HAND_MEDIUM,) if settings.device == "cpu" else ()


def everyone(settings: Settings, *, smoke: bool = True) -> tuple[Entrant, ...]:
    """All entrants that make sense on the device; the first one is who the maths of others is held to.

    A case with `smoke=False` leaves out the trainers in a smoke test.
    """
    graphs = (HAND_GRAPH, HAND_GRAPH_BEST) if settings.device != "cpu" else ()
    jax = JAX if settings.device == "cpu" else ()
    trainers = TRAINERS if smoke or not settings.smoke else ()
    peers = (*trainers, *jax) if settings.peers else ()
    return (*HAND, *graphs, *OURS, *peers)
