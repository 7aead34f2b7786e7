"""Adam and AdamW are torch's, bit for bit, also after a restart, and does not load torch's compiler."""

from __future__ import annotations

import functools
import os
import subprocess
import sys
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from gpq_faiss.nn.adam import Adam


def parameters(seed: int, dtype: torch.dtype) -> list[Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [
        torch.randn(shape, generator=generator, dtype=dtype).requires_grad_()
        for shape in ((3, 4), (5,), (2, 2), ())
    ]


def step(ours: list[Tensor], optimizer: Any, at: int, unused: int) -> None:
    """A loss that leaves one parameter out at some steps."""
    for i, group in enumerate(optimizer.param_groups):
        group["lr"] = 0.1 / (at + 1 + i)
    optimizer.zero_grad()
    loss = sum(((p - at).sin() ** 2).sum() for i, p in enumerate(ours) if i != unused or at % 2)
    loss.backward()
    optimizer.step()


@given(
    seed=st.integers(0, 1000),
    steps=st.integers(1, 6),
    restart=st.integers(0, 6),
    unused=st.integers(0, 4),
    beta1=st.sampled_from([0.5, 0.9]),
    decay=st.sampled_from([0.0, 0.01]),
    dtype=st.sampled_from([torch.float32, torch.float64]),
)
@settings(deadline=None, max_examples=30)
def test_steps_are_those_of_torch(
    seed: int, steps: int, restart: int, unused: int, beta1: float, decay: float, dtype: torch.dtype
) -> None:
    options: dict[str, Any] = {"lr": 0.3, "betas": (beta1, 0.999)}
    torchs_adam = torch.optim.Adam if decay == 0 else functools.partial(torch.optim.AdamW, weight_decay=decay)
    ours, theirs = parameters(seed, dtype), parameters(seed, dtype)
    mine: Any = Adam(ours[:2], weight_decay=decay, **options)
    mine.add_param_group({"params": ours[2:], "times": 2.0})
    torchs: Any = torchs_adam(theirs[:2], **options)
    torchs.add_param_group({"params": theirs[2:], "times": 2.0})
    for at in range(steps):
        if at == restart:
            kept = {i: {k: v.clone() for k, v in state.items()} for i, state in mine.state_dict().items()}
            mine = Adam(ours[:2], weight_decay=decay, **options)
            mine.add_param_group({"params": ours[2:], "times": 2.0})
            mine.load_state_dict(kept)
        step(ours, mine, at, unused)
        step(theirs, torchs, at, unused)
    for one, other in zip(ours, theirs, strict=True):
        assert torch.equal(one, other)
    states = torchs.state_dict()["state"]
    assert mine.state_dict().keys() == states.keys()
    for i, state in mine.state_dict().items():
        assert all(torch.equal(state[name], states[i][name]) for name in ("step", "exp_avg", "exp_avg_sq"))
    assert [group["times"] for group in mine.param_groups[1:]] == [2.0]


@pytest.mark.slow
def test_a_step_does_not_load_the_compiler() -> None:
    work = (
        "import sys, torch; from gpq_faiss.nn.adam import Adam; x = torch.ones(3, requires_grad=True);"
        "adam = Adam([x], lr=1.0); (x * x).sum().backward(); adam.step(); adam.zero_grad();"
        "assert abs(float(x.detach()[0])) < 1e-6 and x.grad is None; print('torch._dynamo' in sys.modules)"
    )
    done = subprocess.run(
        [sys.executable, "-c", work], capture_output=True, text=True, check=True, env=os.environ
    )
    assert done.stdout == "False\n"
