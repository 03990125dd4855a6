"""One process or many: torchrun's ranks, and a model that is replicated (DDP) or sharded (FSDP2) over them.

Every gradient is averaged over the ranks by both, so a rank's loss is its sum times the number of ranks, divided by the
weights of the whole step: the result is the same as on one rank.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeGuard

import torch
import torch.distributed as dist
from torch import Tensor, nn

from ..drafter.device import choose_device
from ..errors import ConfigError

if TYPE_CHECKING:
    from torch.distributed.tensor import DTensor


@dataclass(frozen=True)
class Ranks:
    """This process among its peers: `rank` of `size`, on `device`."""

    rank: int
    size: int
    device: torch.device

    @property
    def is_first(self) -> bool:
        """True on the one rank that writes and speaks."""
        return self.rank == 0

    def sums(self, values: list[float]) -> list[float]:
        """Return each value summed over the ranks, in float64."""
        if self.size == 1:
            return values
        total = torch.tensor(values, dtype=torch.float64, device=self.device)
        dist.all_reduce(total)
        summed: list[float] = total.tolist()
        return summed

    def wait(self) -> None:
        """Wait for all ranks."""
        if self.size > 1:
            dist.barrier()


@contextmanager
def join_ranks(device: str) -> Iterator[Ranks]:
    """Join the ranks that torchrun started, or stand alone; leave them on the way out.

    Args:
        device: `auto`, `cpu` or `cuda`; a rank takes the GPU of its local number.
    """
    if not dist.is_torchelastic_launched():
        yield Ranks(0, 1, choose_device(device))
        return
    chosen = choose_device(device)
    if chosen.type == "cuda":
        chosen = torch.device("cuda", dist.get_node_local_rank())
        torch.cuda.set_device(chosen)
    dist.init_process_group("nccl" if chosen.type == "cuda" else "gloo")
    try:
        yield Ranks(dist.get_rank(), dist.get_world_size(), chosen)
    finally:
        dist.destroy_process_group()


def check_packs(packs_per_step: int, ranks: Ranks) -> None:
    """Refuse a number of ranks that does not divide the packs of a step. Raises ConfigError."""
    if packs_per_step % ranks.size:
        raise ConfigError(
            f"packs_per_step = {packs_per_step} cannot be shared by {ranks.size} processes; "
            "start a number of processes that divides it, or set packs_per_step in a new run"
        )


def spread(forward: nn.Module, ranks: Ranks, shard: str) -> nn.Module:
    """Return the module over all ranks: itself on one, else replicated, or with `shard` = full sharded in place.

    Sharded, each rank keeps its part of the float32 weights, gradients and moments; the weights are gathered for the
    length of a step. The module's weights must be equal on all ranks.

    Raises:
        ConfigError: sharding on a single process.
    """
    if ranks.size == 1:
        if shard == "full":
            raise ConfigError("shard = full needs several processes: start with torchrun --nproc-per-node N")
        return forward
    if shard == "full":
        from torch.distributed.fsdp import fully_shard  # noqa: PLC0415 (slow import, many devices only)

        fully_shard(forward)
        return forward
    devices = [ranks.device.index] if ranks.device.type == "cuda" else None
    return nn.parallel.DistributedDataParallel(forward, device_ids=devices)


def gradient_sync(forward: nn.Module, last: bool) -> AbstractContextManager[Any]:
    """Return the context of one pack's forward and backward: ranks exchange gradients with the last pack only."""
    if isinstance(forward, nn.parallel.DistributedDataParallel):
        return nullcontext() if last else forward.no_sync()
    sync = getattr(forward, "set_requires_gradient_sync", None)
    if sync is not None:
        sync(last)
    return nullcontext()


def whole(tensor: Tensor) -> Tensor:
    """Return all of a tensor, gathered over the ranks where it is sharded; every rank must call this."""
    return tensor.full_tensor() if _is_sharded(tensor) else tensor


def local(tensor: Tensor) -> Tensor:
    """Return this rank's part of a tensor that is sharded over its first axis, or the tensor itself."""
    return tensor.to_local() if _is_sharded(tensor) else tensor


def placed_like(value: Tensor, parameter: Tensor) -> Tensor:
    """Return `value`, whole on every rank, on the device of `parameter` and sharded as it is."""
    value = value.to(parameter.device)
    if _is_sharded(parameter):
        from torch.distributed.tensor import distribute_tensor  # noqa: PLC0415 (slow import, many devices only)

        return distribute_tensor(value, parameter.device_mesh, parameter.placements)
    return value


def _is_sharded(tensor: Tensor) -> TypeGuard[DTensor]:
    if not dist.is_initialized():
        return False
    from torch.distributed.tensor import DTensor  # noqa: PLC0415 (0.8 s to import, many devices only)

    return isinstance(tensor, DTensor)
