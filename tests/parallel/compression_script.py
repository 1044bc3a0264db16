"""What each rank runs to compare compressed gradients in eager and compiled steps."""

import sys

import torch
import torch.distributed as dist

import ftrain as ft

torch.set_num_threads(1)

METHODS = {"bf16": "bf16", "fp16": "fp16", "powersgd": ft.parallel.powersgd(2), "sign": ft.parallel.sign()}


def distance(params, batch):
    return (params["w"] - batch).square().sum((1, 2)).mean() + params["b"].square()


def main(output):
    mesh, results = ft.parallel.mesh(), {}
    generator = torch.Generator().manual_seed(0)
    start, target = (torch.randn(shape, generator=generator, dtype=torch.float64) for shape in ((6, 6), (4, 6, 6)))
    for name, reduce in METHODS.items():
        states = []
        for wrappers in ([], [ft.compiled(lowering="whole", backend="aot_eager")]):
            step = ft.compose(
                ft.train_step(distance, ft.optim.sgd(0.1)), ft.skip_nonfinite(), ft.sharded(mesh, 1, reduce), *wrappers
            )
            state = step.init({"w": start, "b": torch.ones((), dtype=torch.float64)})
            for _ in range(3):
                state, _ = step(state, target)
            whole = ft.parallel.whole(state)
            states.append((whole.params, whole.slots))
        results[name] = states
    if dist.get_rank() == 0:
        torch.save(results, output)
    dist.destroy_process_group()


if __name__ == "__main__":
    main(sys.argv[1])
