"""Integers on their way to the device: what is put is there after `send`, and parts do not touch each other."""

from __future__ import annotations

import numpy as np
import torch

from deltaserve.runner.staging import Staging

CPU = torch.device("cpu")


def test_on_the_cpu_a_tensor_shares_the_memory_of_its_array() -> None:
    values = np.arange(6).reshape(2, 3)
    tensor = Staging(CPU).put(values)
    values[1, 2] = 9
    assert tensor.tolist() == [[0, 1, 2], [3, 4, 9]]


def test_gathered_arrays_arrive_with_one_send_whatever_their_sizes() -> None:
    staging = Staging(CPU, is_direct=False)
    rng = np.random.default_rng(0)
    for _ in range(2):
        shapes = [(0,), (3,), (16,), (3, 5), (1 << 14,), (2, 1 << 14), (7,)]
        arrays = [rng.integers(-(1 << 40), 1 << 40, shape) for shape in shapes]
        tensors = [staging.put(values) for values in arrays]
        staging.send()
        for values, tensor in zip(arrays, tensors, strict=True):
            np.testing.assert_array_equal(tensor.numpy(), values)


def test_a_tensor_keeps_its_values_when_more_is_sent() -> None:
    staging = Staging(CPU, is_direct=False)
    first = staging.put(np.arange(5))
    staging.send()
    staging.put(np.zeros(5, np.int64))
    staging.send()
    assert first.tolist() == [0, 1, 2, 3, 4]
