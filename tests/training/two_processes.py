"""Two processes of one training, as ``torchrun`` would start them."""

import os
from pathlib import Path

import torch
from processes import Command
from serve import free_port
from torch import nn

from gpq_faiss.training.parallel import joined


def environments(size: int = 2) -> list[dict[str, str]]:
    """The variables that ``torchrun`` sets, by rank."""
    common = {"WORLD_SIZE": str(size), "LOCAL_WORLD_SIZE": str(size), "TORCHELASTIC_RUN_ID": "none"}
    common |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port()), "OMP_NUM_THREADS": "1"}
    return [common | {"RANK": str(rank), "LOCAL_RANK": str(rank)} for rank in range(size)]


def start(folder: Path, *arguments: object) -> list[Command]:
    """Start ``gpq`` in two processes."""
    return [Command(*arguments, folder=folder, **variables) for variables in environments()]


def check_group(rank: int, variables: list[dict[str, str]]) -> None:
    """Check gradients and values that one of two processes gets."""
    os.environ.update(variables[rank])
    with joined("cpu") as (group, _):
        inputs = torch.arange(12.0).reshape(6, 2)
        parts = inputs[:2], inputs[2:]
        torch.manual_seed(rank)  # the weights of rank 0 are sent to the others
        network = nn.Linear(2, 1)
        wrapped = group.distribute(network)
        wrapped(parts[rank]).mean().backward()
        expected = torch.stack([share.mean(dim=0) for share in parts]).mean(dim=0)
        torch.testing.assert_close(network.weight.grad, expected[None])
        assert len({float(weight.sum()) for weight in group.gather(network.weight.detach())}) == 1
