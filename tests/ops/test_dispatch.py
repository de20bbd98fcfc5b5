"""Which implementation runs, why, and how to force one."""

from __future__ import annotations

import pytest
import torch

from deltaserve.core.errors import ConfigError
from deltaserve.ops import attention, conv, gdn, moe, norm, rope
from deltaserve.ops.dispatch import Choice, choose, explain

ONLY_REFERENCE = {"reference": "plain"}
WITH_KERNEL = {"reference": "plain", "triton": "fast"}
X = torch.ones(1)


def test_a_kernel_runs_on_its_device_only() -> None:
    assert explain(WITH_KERNEL, "cuda").name == "triton"
    assert explain(ONLY_REFERENCE, "cuda").name == "reference"
    assert choose(WITH_KERNEL, X) == "plain"
    assert choose(ONLY_REFERENCE, X) == "plain"


def test_the_choice_says_why() -> None:
    assert explain(WITH_KERNEL, "cuda") == Choice("triton", "kernel for cuda")
    assert explain(WITH_KERNEL, "cpu") == Choice("reference", "no kernel for cpu")
    assert explain(WITH_KERNEL, "cuda", "reference") == Choice("reference", "asked for by the caller")


def test_a_choice_can_be_forced() -> None:
    assert choose(WITH_KERNEL, X, "triton") == "fast"
    assert choose(WITH_KERNEL, X, "reference") == "plain"
    assert choose(ONLY_REFERENCE, X, "reference") == "plain"


@pytest.mark.parametrize("table", [ONLY_REFERENCE, WITH_KERNEL])
def test_an_unknown_name_is_refused(table: dict[str, str]) -> None:
    with pytest.raises(ConfigError, match=r"'fastest'.*reference"):
        choose(table, X, "fastest")


@pytest.mark.parametrize("op", [attention, conv, gdn, moe, norm, rope])
def test_every_op_has_a_reference(op: object) -> None:
    assert "reference" in op.IMPLEMENTATIONS  # type: ignore[attr-defined]


def test_ops_take_the_argument() -> None:
    x, scale = torch.ones(1, 4), torch.ones(4)
    assert norm.rms_norm(x, scale, 1e-6, force="reference").equal(norm.rms_norm(x, scale, 1e-6))
    with pytest.raises(ConfigError):
        norm.rms_norm(x, scale, 1e-6, force="fastest")
