"""The commands of ``eplb``, put together; each lives in a module of its own and imports what it needs when it runs."""

from __future__ import annotations

import sys
from typing import Annotated, Any

import typer
from typer.core import TyperCommand, TyperGroup

from eplb_core._version import __version__
from eplb_core.cli.backends import backends
from eplb_core.cli.console import stderr
from eplb_core.cli.demo import demo
from eplb_core.cli.explain import explain
from eplb_core.cli.new_backend import new_backend
from eplb_core.cli.verify import verify
from eplb_core.errors import EplbError
from eplb_core.errors.texts import describe


class _Command(TyperCommand):
    """A command whose help shows arguments in capitals and flags without a type in every release of Typer."""

    def get_params(self, ctx: Any) -> Any:
        return _plainly_named(super().get_params(ctx))

    def collect_usage_pieces(self, ctx: Any) -> list[str]:
        return [piece.strip("{}") for piece in super().collect_usage_pieces(ctx)]


class _Group(TyperGroup):
    """The same for options in front of a command."""

    def get_params(self, ctx: Any) -> Any:
        return _plainly_named(super().get_params(ctx))


def _plainly_named(params: list[Any]) -> list[Any]:
    for param in params:
        if param.metavar is None and getattr(param, "is_flag", False):
            param.metavar = ""
        elif param.metavar is None and param.param_type_name == "argument":
            param.metavar = param.name.upper()
    return params


app = typer.Typer(
    cls=_Group,
    name="eplb",
    help="Move expert weights between the ranks of a Mixture-of-Experts engine while it serves.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)
for command in (backends, demo, explain, new_backend, verify):
    app.command(cls=_Command)(command)


def _show_version(wanted: bool) -> None:
    if wanted:
        print(f"eplb-core {__version__}")
        raise typer.Exit


@app.callback()
def _options(
    version: Annotated[
        bool, typer.Option("--version", callback=_show_version, is_eager=True, help="Show the version and exit.")
    ] = False,
) -> None:
    """Move expert weights between the ranks of a Mixture-of-Experts engine while it serves."""


def run() -> None:
    """Run the command line; a typed error ends it with its text on stderr and status 1."""
    try:
        app()
    except EplbError as error:
        console = stderr()
        console.print(describe(error), style="red", soft_wrap=True)
        console.print(f"'eplb explain {error.code}' says what that means and what to do.", soft_wrap=True)
        sys.exit(1)
