"""Tests of ops that have C kernels run twice: on the reference and on the kernels."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from deltaserve.ops import dispatch, native


@pytest.fixture(params=["reference", "native"])
def implementation(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """What ops run on the CPU where nobody asks for more."""
    if request.param == "native" and not native.is_ready():
        pytest.skip(f"the C kernels are not there: {native.load().note}")
    if request.param == "reference":
        monkeypatch.setattr(dispatch, "KERNELS", {})
    dispatch.forget()
    yield request.param
    monkeypatch.undo()
    dispatch.forget()
