"""Many devices: N ranks compute together what one does.

How a step of `ftrain.sharded` goes through the files:

1. `sharded` takes the local parts of a state of DTensors (`state`, `partition`) and this rank's examples (`rows`). In
   the first step all ranks compare what they were given (`same_step`), and then what the loss runs and returns
   (`same_loss`).
2. `rank_gradient` computes the gradient of these examples, and combines those of all ranks.
3. `loss_params` gives the loss whole parameters (`gather`): at levels 1 and 2 gathered once, at level 3 block by block
   (`block_gather`). `stock_draws` has random operations draw by example.
4. `gradient_sums` sends gradients in buckets (`bucket_order`, `partition`) while the backward pass runs, and
   `loss_results` the loss, metrics and buffers; `compression` sends gradients in fewer bytes when it is over.
5. The optimizer updates the local parts, and if it needs whole leaves, `whole_update` sends each to one rank.
6. `state` makes DTensors of the new parts.

`mesh` arranges the ranks that `process_group` has connected, and has their collectives. `rank_watch` names a rank that
does not join one. Around the steps of `fit`, `agreement` makes all ranks continue, stop and fail together, and
`stand_in` takes part in a step for which a rank has no memory.
"""

from ftrain.parallel.compression import powersgd as powersgd
from ftrain.parallel.compression import sign as sign
from ftrain.parallel.mesh import mesh as mesh
from ftrain.parallel.state import divided as divided
from ftrain.parallel.state import whole as whole

__all__ = ["divided", "mesh", "powersgd", "sign", "whole"]
