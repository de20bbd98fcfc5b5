"""Print how large files and functions are, per package: reported, not gated.

The aim (CONTRIBUTING.md): a median function under 10 lines, nine in ten under 35, files under 400. A function's lines
are those of its body without the docstring.
"""

from __future__ import annotations

import ast
import statistics
from pathlib import Path

ROOT = Path(__file__).parent.parent
MAX_FILE = 400
MAX_FUNCTION = 35


def function_lines(tree: ast.AST) -> list[tuple[int, str]]:
    sizes = []
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            body = node.body[1:] if ast.get_docstring(node) is not None else node.body
            lines = (body[-1].end_lineno or 0) - body[0].lineno + 1 if body else 0
            sizes.append((lines, node.name))
    return sizes


def main() -> None:
    functions: list[int] = []
    packages: dict[str, int] = {}
    for path in sorted((ROOT / "deltaserve").rglob("*.py")):
        text = path.read_text("utf-8")
        num_lines = text.count("\n")
        name = path.relative_to(ROOT / "deltaserve")
        packages[name.parts[0]] = packages.get(name.parts[0], 0) + num_lines
        sizes = function_lines(ast.parse(text))
        functions += [lines for lines, _ in sizes]
        if num_lines > MAX_FILE:
            print(f"note    {name} has {num_lines} lines")
        for lines, function in sizes:
            if lines > 2 * MAX_FUNCTION:
                print(f"note    {name}: {function} has {lines} lines")
    print("sizes  ", ", ".join(f"{name.removesuffix('.py')} {num_lines}" for name, num_lines in packages.items()))
    if len(functions) > 1:
        ninth = statistics.quantiles(functions, n=10)[-1]
        median = statistics.median(functions)
        print(f"sizes   {len(functions)} functions: median {median:.0f} lines, 9 in 10 at most {ninth:.0f}")


if __name__ == "__main__":
    main()
