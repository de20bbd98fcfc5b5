"""What the project imports is declared, and what it declares is pinned: a fresh environment has everything."""

from __future__ import annotations

import ast
import re
import sys
import tomllib
from importlib.metadata import packages_distributions
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["project"]
EXTRAS = PROJECT["optional-dependencies"]
# torch has one version per kind of machine (scripts/env), and triton is the one that its torch brings.
UNPINNED = {"torch", "triton", "deltaserve"}


def names(requirements: list[str]) -> set[str]:
    return {re.split(r"[\[<>=~! ]", requirement)[0].lower() for requirement in requirements}


def imported(folder: str) -> set[str]:
    """Distributions behind the third-party modules that files of `folder` import anywhere."""
    modules = set()
    for path in (ROOT / folder).rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text("utf-8"))):
            if isinstance(node, ast.Import):
                modules |= {alias.name.partition(".")[0] for alias in node.names}
            elif isinstance(node, ast.ImportFrom) and node.module:
                modules.add(node.module.partition(".")[0])
    foreign = {name for name in modules - set(sys.stdlib_module_names) if not (ROOT / name).is_dir()}
    homes = packages_distributions()
    return {homes.get(module, [module])[0].lower().replace("_", "-") for module in foreign}


@pytest.mark.parametrize(
    ("folder", "extras"), [("deltaserve", ["bench", "cuda"]), ("tests", ["bench", "test"]), ("scripts", ["test"])]
)
def test_every_import_is_declared(folder: str, extras: list[str]) -> None:
    declared = names(PROJECT["dependencies"]).union(*(names(EXTRAS[extra]) for extra in extras))
    undeclared = imported(folder) - declared - {"starlette"}  # fastapi is built on starlette and names its classes
    assert not undeclared


def test_every_dependency_is_pinned() -> None:
    lines = (ROOT / "constraints.txt").read_text("utf-8").splitlines()
    pinned = {line.partition("==")[0].lower().replace("_", "-") for line in lines if "==" in line}
    declared = names(PROJECT["dependencies"]).union(*(names(extra) for extra in EXTRAS.values()))
    assert declared - pinned == UNPINNED
    assert not pinned & UNPINNED
