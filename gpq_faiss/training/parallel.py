"""Training by several processes, which ``torchrun`` starts.

torch's ``DistributedDataParallel`` connects them. Every process draws a batch of its own and
computes the losses of that batch; gradients are averaged. Rank 0 validates, fits the codebooks and
writes.
"""

from __future__ import annotations

import contextlib
import datetime
from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from ..errors import ProcessError, UsageError
from ..launch import Launch, launched
from ..nn.device import resolve_device


class Group(Launch):
    """The processes of a training, by default one, as this process sees them."""

    @property
    def main(self) -> bool:
        """Whether this is the process that validates and writes."""
        return self.rank == 0

    def gather(self, value: Any) -> list[Any]:
        """Return the values of all processes by rank.

        Values are tensors, numbers, texts, or lists of these.
        """
        values = [value] * self.size
        if self.size > 1:
            dist.all_gather_object(values, value, weights_only=True)
        return values

    def distribute(self, network: nn.Module) -> nn.Module:
        """Wrap a network on its device for training: gradients are averages over the processes.

        On GPUs, batch norm uses the batches of all processes.

        Raises:
            UsageError: the network has a batch norm of its own kind, as some of timm do, whose
                other parts torch would drop.
        """
        if self.size == 1:
            return network
        if next(network.parameters()).is_cuda:
            for layer in network.modules():
                if isinstance(layer, nn.BatchNorm2d) and type(layer) is not nn.BatchNorm2d:
                    raise UsageError(
                        f"several processes cannot share the batch norm of this backbone "
                        f"({type(layer).__name__}): train it in one process, or choose another one"
                    )
            convert: Any = nn.SyncBatchNorm.convert_sync_batchnorm
            network = convert(network)
        # The buffers that matter, codebooks and statistics of batch norm, are those of rank 0.
        return nn.parallel.DistributedDataParallel(
            network, forward_sync_buffers=False, static_graph=True
        )


@contextlib.contextmanager
def joined(device: str) -> Iterator[tuple[Group, torch.device]]:
    """Connect the processes that ``torchrun`` has started.

    Yields them and the device of this process: the CPU, or the GPU of its local rank. If one of
    them fails, it says why, and the others end with a ProcessError.

    Raises:
        ProcessError: the other processes cannot be reached, or one of them has ended.
        DeviceError: there is no such device, or there are fewer GPUs than processes.
    """
    group = Group(*launched())
    local = resolve_device(device)
    if group.size == 1:
        yield group, local
        return
    if local.type == "cuda":
        local = resolve_device(f"cuda:{group.local_rank}")
        torch.cuda.set_device(local)
    try:
        # The end of a process is noticed at once, but the others may wait for rank 0 to fit
        # codebooks.
        dist.init_process_group(
            "cpu:gloo,cuda:nccl" if local.type == "cuda" else "gloo",
            timeout=datetime.timedelta(hours=12),
        )
        yield group, local
    except RuntimeError as error:
        if not isinstance(error, dist.DistError) and "gloo" not in str(error).lower():
            raise
        raise ProcessError(
            "another process of this training failed or ended, so all end: "
            "run the same command with --resume to continue"
        ) from error
    # Not after a failure: NCCL would wait for the others, which notice the end of this process.
    dist.destroy_process_group()
