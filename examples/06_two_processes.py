"""Train with SAM in two processes: one perturbation for all of them, or one for each.

Run it with ``torchrun --nproc-per-node 2 examples/06_two_processes.py``. Every process gets half of each batch.
With ``sync="global"`` the weights are moved along the gradient of the whole batch, so that any number of processes
computes what one process would. With ``sync="local"`` each process moves its own copy along the gradient of its half:
the m-sharpness of the SAM paper, with one exchange of gradients less and a different result.
"""

import argparse
import os
import sys
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch import distributed as dist
from torch.nn.parallel import DistributedDataParallel
from torch.optim import SGD

from saltflat.datasets import read_data
from saltflat.training import SAM

QUICK = os.environ.get("SALTFLAT_QUICK") == "1"
EPOCHS = 2 if QUICK else 10
BATCH = 64
RHO = 0.1

Sync = Literal["global", "local"]
SYNCS: tuple[Sync, ...] = ("global", "local")


def make_network(seed: int) -> nn.Sequential:
    torch.manual_seed(seed)
    # In float64, so that what differs is the method and not the rounding.
    return nn.Sequential(nn.Flatten(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10)).double()


def train(model: nn.Module, sync: Sync, inputs: Tensor, labels: Tensor, seed: int, rank: int, world: int) -> SAM:
    """Train on every ``world``-th example of each batch, starting at ``rank``."""
    optimizer = SAM(model, SGD, rho=RHO, sync=sync, lr=0.1, momentum=0.9)
    generator = torch.Generator().manual_seed(seed)
    for _ in range(EPOCHS):
        # Whole batches only: the mean of two halves is the mean of the batch if they are halves.
        for batch in torch.randperm(len(labels), generator=generator).split(BATCH)[:-1]:
            mine = batch[rank::world]

            def closure(mine: Tensor = mine) -> None:
                optimizer.zero_grad()
                F.cross_entropy(model(inputs[mine]), labels[mine]).backward()

            optimizer.step(closure)
    return optimizer


@torch.no_grad()
def compute_difference(one: nn.Module, two: nn.Module) -> float:
    pairs = zip(one.parameters(), two.parameters(), strict=True)
    return max(float((a - b).abs().max()) for a, b in pairs)


@torch.no_grad()
def compute_spread(model: nn.Module) -> float:
    """Return how far the weights of the processes are from those of the first."""
    farthest = torch.zeros((), dtype=torch.float64)
    for p in model.parameters():
        first = p.detach().clone()
        dist.broadcast(first, src=0)
        farthest = torch.maximum(farthest, (p - first).abs().max())
    dist.all_reduce(farthest, dist.ReduceOp.MAX)
    return float(farthest)


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__,
        epilog="With SALTFLAT_QUICK=1 in the environment there are 2 epochs.",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--seed", type=int, default=0, help="seed of weights and batches (default: %(default)s)")
    seed = parser.parse_args().seed
    if not dist.is_torchelastic_launched():
        print(
            f"Expected two or more processes, but got one. Try torchrun --nproc-per-node 2 {sys.argv[0]}",
            file=sys.stderr,
        )
        return 2
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    images, labels = read_data("digits")
    inputs = images.double()

    alone = make_network(seed)
    train(alone, "global", inputs, labels, seed, rank=0, world=1)
    for sync in SYNCS:
        model = DistributedDataParallel(make_network(seed))
        optimizer = train(model, sync, inputs, labels, seed, rank, world)
        apart = compute_spread(model)
        if rank == 0:
            print(
                f"sync={sync!r}: after {optimizer.perturbed_steps} steps the weights of {world} processes are "
                f"{apart:.0e} from each other and {compute_difference(alone, model):.0e} from those of one process"
            )
    dist.barrier()
    sys.stdout.flush()
    # As of torch 2.13, threads of gloo may abort a process that ends in the usual way, after all is done.
    os._exit(0)


if __name__ == "__main__":
    sys.exit(main())
