"""Where kernel tests run: on the GPU if there is one, else in Triton's interpreter, tiny; skipped without Triton.

Import this before any kernel: the interpreter is chosen when a kernel is defined.
"""

from __future__ import annotations

import dataclasses
import importlib
import os
from collections.abc import Callable
from typing import Any

import pytest
import torch

ON_GPU = torch.cuda.is_available()
if not ON_GPU:
    os.environ["TRITON_INTERPRET"] = "1"
pytest.importorskip("triton", reason="kernel tests need the triton package")

DEVICE = torch.device("cuda" if ON_GPU else "cpu")


def _mend_interpreter() -> None:
    """Triton 3.6's interpreter takes int() of arrays of one element, which NumPy 2.4 refuses."""
    interpreter = importlib.import_module("triton.runtime.interpreter")
    patch = interpreter._patch_lang_tensor

    def patch_tensor(tensor: Any, scope: Any) -> None:
        patch(tensor, scope)
        scope.set_attr(tensor, "__index__", lambda self: self.handle.data.item())

    interpreter._patch_lang_tensor = patch_tensor


if not ON_GPU:
    _mend_interpreter()
MARK = pytest.mark.gpu if ON_GPU else pytest.mark.interpret


def pick(on_gpu: list[Any], interpreted: list[Any]) -> list[Any]:
    """Parameters of a test: the full list on the GPU, a tiny one in the interpreter."""
    return on_gpu if ON_GPU else interpreted


def move(x: Any) -> Any:
    """Tensors, and those in rows, pools and tuples of them, on the device; fresh copies.

    A view stays one, of a copy of all that it is a view of.
    """
    if isinstance(x, torch.Tensor):
        whole = torch.empty(0, dtype=x.dtype).set_(x.untyped_storage())
        return whole.to(DEVICE, copy=True).as_strided(x.shape, x.stride(), x.storage_offset())
    if isinstance(x, tuple):
        return tuple(move(part) for part in x)
    if dataclasses.is_dataclass(x) and not isinstance(x, type):
        fields = {f.name: move(getattr(x, f.name)) for f in dataclasses.fields(x) if f.init}
        return type(x)(**fields)
    return x


def both(reference: Callable[..., Any], kernel: Callable[..., Any], *arguments: Any) -> tuple[Any, Any, Any, Any]:
    """(expected result, its arguments after the call, actual result, its arguments after the call, moved back)."""
    expected_arguments = tuple(x.clone() if isinstance(x, torch.Tensor) else x for x in arguments)
    actual_arguments = move(arguments)
    expected, actual = reference(*expected_arguments), kernel(*actual_arguments)
    return expected, expected_arguments, back(actual), back(actual_arguments)


def back(x: Any) -> Any:
    if isinstance(x, torch.Tensor):
        return x.cpu()
    return tuple(back(part) for part in x) if isinstance(x, tuple) else x
