"""The `deltaserve` command: serve, inspect, bench, verify. It turns arguments into values, errors into sentences.

The flags of `serve` are the fields of `server.settings.Settings`; this file only shows them to typer. Parts that load
torch are imported by the command that needs them.
"""

from __future__ import annotations

import dataclasses
import inspect
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any, get_type_hints

import typer
from rich.console import Console

from deltaserve.core.errors import CheckpointError, ConfigError, DeltaserveError
from deltaserve.core.version import VERSION
from deltaserve.server.serve import serve
from deltaserve.server.settings import Settings, make_settings

app = typer.Typer(
    help="Serve the Qwen3.5 family of hybrid language models.", no_args_is_help=True, add_completion=False
)
MODEL_HELP = "A checkpoint directory or a Hub id. Left out: the model that ships, else a small random sample."
CONFIG_HELP = "YAML file with the same keys as the flags; the command line wins."
BAD_SETTING, FAILED = 2, 1
PASS_ON = {"allow_extra_args": True, "ignore_unknown_options": True}


def main() -> None:
    """Entry point: a refusal is one line on stderr, without a traceback."""
    try:
        app()
    except DeltaserveError as error:
        print(f"deltaserve: {error}", file=sys.stderr)
        sys.exit(BAD_SETTING if isinstance(error, ConfigError) else FAILED)


def _print_version(is_asked: bool) -> None:
    if is_asked:
        print(VERSION)
        raise typer.Exit


@app.callback()
def _common(
    version: Annotated[
        bool, typer.Option("--version", help="Print the version and leave.", is_eager=True, callback=_print_version)
    ] = False,
) -> None:
    """Options before the command."""


def _signature() -> inspect.Signature:
    """The arguments of `serve`: MODEL, --config, and a flag per field. None stands for a flag that was not given."""
    hints = get_type_hints(Settings)
    model = Annotated[str | None, typer.Argument(help=MODEL_HELP, show_default=False)]
    config = Annotated[Path | None, typer.Option("--config", help=CONFIG_HELP, show_default=False)]
    parameters = [_parameter("model", model), _parameter("config", config)]
    flags = [item for item in dataclasses.fields(Settings) if item.name != "model"]
    parameters += [_parameter(item.name, Annotated[_cli_type(hints[item.name]), _option(item)]) for item in flags]
    return inspect.Signature(parameters)


def _parameter(name: str, annotation: Any) -> inspect.Parameter:
    return inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=None, annotation=annotation)


def _option(item: dataclasses.Field[Any]) -> Any:
    name = item.name.replace("_", "-")
    opposite = name.removeprefix("no-") if name.startswith("no-") else f"no-{name}"
    declaration = f"--{name}/--{opposite}" if isinstance(item.default, bool) else f"--{name}"
    shown = False if item.default in (None, ()) or isinstance(item.default, bool) else str(item.default)
    metadata = item.metadata
    return typer.Option(declaration, help=metadata["help"], rich_help_panel=metadata["panel"], show_default=shown)


def _cli_type(hint: Any) -> Any:
    """Sizes are text on the command line; lists are repeated flags."""
    if hint == tuple[str, ...]:
        return list[str] | None
    simple = {bool: bool, int: int, int | None: int, float: float}
    return simple.get(hint, str) | None


def serve_command(model: str | None, config: Path | None, **flags: Any) -> None:
    """Serve a model over OpenAI's API, with a chat page at /."""
    given = {name: value for name, value in flags.items() if value not in (None, [])}
    names = given.get("served_model_name")
    if names:
        given["served_model_name"] = tuple(name for item in names for name in item.split(",") if name)
    if model is not None:
        given["model"] = model
    sys.exit(serve(make_settings(given, config), Console(stderr=True)))


def _with_flags(function: Callable[..., None]) -> Callable[..., None]:
    """Give `function` the signature that typer reads."""
    signature = _signature()
    function.__signature__ = signature  # type: ignore[attr-defined]
    function.__annotations__ = {name: parameter.annotation for name, parameter in signature.parameters.items()}
    return function


app.command("serve")(_with_flags(serve_command))


@app.command("inspect")
def inspect_command(directory: Annotated[Path, typer.Argument(help="A checkpoint directory.")]) -> None:
    """Say what a checkpoint holds and needs, and what would be refused, without loading its weights."""
    from deltaserve.model.inspect import inspect_checkpoint  # noqa: PLC0415 - loads torch

    found = inspect_checkpoint(directory)
    report = dataclasses.replace(found, refusals=(*found.refusals, *_tokenizer_refusals(directory)))
    print("\n".join(report.lines()))
    sys.exit(FAILED if report.refusals else 0)


def _tokenizer_refusals(directory: Path) -> tuple[str, ...]:
    """The server needs a tokenizer; a model alone does not."""
    from deltaserve.engine.tokenizer import Tokenizer  # noqa: PLC0415 - other commands need it late or not at all

    try:
        Tokenizer(directory)
    except CheckpointError as error:
        return (str(error),)
    return ()


@app.command("bench", context_settings=PASS_ON, add_help_option=False)
def bench_command(context: typer.Context) -> None:
    """Measure, and write down what was measured."""
    from deltaserve.bench.main import app as bench  # noqa: PLC0415 - loads torch

    bench(context.args, prog_name="deltaserve bench")


@app.command("verify", context_settings=PASS_ON, add_help_option=False)
def verify_command(context: typer.Context) -> None:
    """Show that every way to an answer, cached or cold, alone or in company, gives the same answer."""
    from deltaserve.verify.command import app as verify  # noqa: PLC0415 - loads torch

    verify(context.args, prog_name="deltaserve verify")


if __name__ == "__main__":
    main()
