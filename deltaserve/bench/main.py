"""The commands of `deltaserve bench`, one module each."""

from __future__ import annotations

import typer

from deltaserve.bench.cache import cache
from deltaserve.bench.cpu import cpu
from deltaserve.bench.drafts import drafts
from deltaserve.bench.fairness import fairness
from deltaserve.bench.prefix import prefix

app = typer.Typer(help="Measure, and write down what was measured.", no_args_is_help=True, add_completion=False)
app.command("cpu")(cpu)
app.command("cache")(cache)
app.command("prefix")(prefix)
app.command("fairness")(fairness)
app.command("drafts")(drafts)
