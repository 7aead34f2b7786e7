"""Encoding, tables and keys on devices: the same code on the CPU (asked for by name) and, marked ``gpu``, on a GPU."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from gpu_helpers import FEW, books, on_devices, same
from hypothesis import given
from hypothesis import strategies as st

from gpq_faiss.codes.bits import pack_codes
from gpq_faiss.codes.encode import encode
from gpq_faiss.codes.scores import score_tables
from gpq_faiss.errors import DataError
from gpq_faiss.gpu.tensors import (
    device_of,
    encode_torch,
    keys_of,
    pack_tensor,
    raw_tables,
    split_keys,
    unpack_column,
)


@on_devices
@pytest.mark.parametrize("K", [4, 8, 16, 32, 64, 128, 256])
def test_packing(device: str, K: int) -> None:
    rng = np.random.default_rng(K)
    for M in (1, 3, 8):
        assignment = rng.integers(0, K, (50, M)).astype(np.uint8)
        there = torch.from_numpy(assignment).to(device)
        codes = pack_tensor(there, K)
        assert np.array_equal(codes.cpu().numpy(), pack_codes(assignment, K))
        for m in range(M):
            assert torch.equal(unpack_column(codes, m, K), there[:, m])


@on_devices
@pytest.mark.parametrize("case", ["random", "close", "repeated", "extreme"])
@pytest.mark.parametrize(("M", "K"), [(3, 16), (6, 16), (12, 16), (5, 4), (4, 64), (2, 256)])
def test_codes_are_those_of_the_cpu(device: str, case: str, M: int, K: int) -> None:
    rng = np.random.default_rng([M, K])
    Z = books(rng, M, K)
    x = rng.normal(size=(700, M, 12)).astype(np.float32)
    x /= np.linalg.norm(x, axis=2, keepdims=True)
    if case == "close":  # on the border between two codewords, up to rounding
        pair = rng.integers(0, K, (2, 700, M))
        x = (Z[np.arange(M), pair[0]] + Z[np.arange(M), pair[1]]).astype(np.float32)
        x += (np.abs(x).sum(axis=2, keepdims=True) == 0).astype(np.float32)
        x += rng.normal(size=x.shape).astype(np.float32) * np.float32(1e-7)
    elif case == "repeated":
        Z[:, K // 2] = Z[:, 0]
        x[::3] = Z[:, 0] + rng.normal(size=(len(x[::3]), M, 12)).astype(np.float32) * np.float32(0.1)
    elif case == "extreme":
        x[::5] *= np.float32(1e6)
        x[1::5] *= np.float32(1e-6)
    x = x.reshape(700, -1)
    codes = encode_torch(torch.from_numpy(x).to(device), Z, entries=100 * M * K)
    assert codes.device == device_of(device)
    assert np.array_equal(codes.cpu().numpy(), encode(x, Z))


def test_vectors_without_a_code_are_named() -> None:
    Z = books(np.random.default_rng(0), 3)
    x = np.random.default_rng(1).normal(size=(40, 36)).astype(np.float32)
    zero = x.copy()
    zero[33, 12:24] = 0
    with pytest.raises(DataError, match="no direction, in row 33"):
        encode_torch(torch.from_numpy(zero), Z, entries=48 * 10)
    x[5, 0] = np.inf
    with pytest.raises(DataError, match="NaN or infinity in row 5"):
        encode_torch(torch.from_numpy(x), Z)
    with pytest.raises(DataError, match="expected 36"):
        encode_torch(torch.from_numpy(x[:, 1:].copy()), Z)
    with pytest.raises(DataError, match="norm"):
        encode_torch(torch.from_numpy(x), Z * 2)
    assert encode_torch(torch.empty((0, 36)), Z).shape == (0, 2)


@on_devices
@FEW
@given(seed=st.integers(0, 999), scale=st.floats(1e-30, 1e30))
def test_tables_and_keys_are_those_of_the_cpu_to_the_bit(device: str, seed: int, scale: float) -> None:
    rng = np.random.default_rng(seed)
    Z = books(rng, 3)
    xq = (rng.normal(size=(4, 36)) * scale).astype(np.float32)
    tables = score_tables(xq, Z)
    there = raw_tables(torch.from_numpy(xq).to(device), torch.from_numpy(Z).to(device))
    assert np.array_equal(there.cpu().numpy().view(np.int32), tables.view(np.int32))
    scores = np.concatenate([tables.reshape(-1), np.float32([0.0, -0.0])])
    positions = rng.integers(0, 2**32 - 1, len(scores))
    keys = keys_of(torch.from_numpy(scores).to(device), torch.from_numpy(positions).to(device))
    # Descending keys are in the order of scores, ties by position, and hold both.
    order = np.argsort(-keys.cpu().numpy(), kind="stable")
    assert np.array_equal(scores[order], scores[np.lexsort((positions, -scores))])
    back = tuple(t.cpu().numpy() for t in split_keys(keys))
    assert same(back, (scores, positions))
