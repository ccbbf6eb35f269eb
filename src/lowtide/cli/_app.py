"""The ``lowtide`` command and its options; each subcommand has a file of its own."""

from __future__ import annotations

from importlib.metadata import PackageNotFoundError, version
from typing import Annotated

import typer

from lowtide.cli._audit import audit_command
from lowtide.cli._bench import bench
from lowtide.cli._demo import demo
from lowtide.cli._doctor import doctor_command
from lowtide.cli._estimate import estimate_command
from lowtide.cli._explain import explain
from lowtide.cli._explain_plan import explain_plan_command
from lowtide.cli._fit import fit
from lowtide.cli._plan_stages import plan_command
from lowtide.cli._policies import policies
from lowtide.cli._report import report
from lowtide.cli._show_plan import show_plan
from lowtide.cli._streams import silence_output
from lowtide.cli._trace import trace
from lowtide.cli._verify import verify_command

app = typer.Typer(
    no_args_is_help=True, add_completion=False, pretty_exceptions_enable=False, context_settings={"help_option_names": ["-h", "--help"]}
)
app.command()(fit)
app.command()(demo)
app.command("show-plan")(show_plan)
app.command()(trace)
app.command()(explain)
app.command("explain-plan")(explain_plan_command)
app.command()(report)
app.command()(bench)
app.command()(policies)
app.command("estimate")(estimate_command)
app.command("plan")(plan_command)
app.command("verify")(verify_command)
app.command("audit")(audit_command)
app.command("doctor")(doctor_command)


def main() -> None:
    """Run the command line of this process."""
    try:
        app()
    finally:
        silence_output()


def _print_version(wanted: bool) -> None:
    if wanted:
        import torch

        print(f"lowtide {_installed_version()} (torch {torch.__version__})")
        raise typer.Exit


def _installed_version() -> str:
    try:
        return version("lowtide")
    except PackageNotFoundError:
        return "(not installed)"


@app.callback()
def _options(
    _version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version and exit.")
    ] = False,
) -> None:
    """Keep the memory peak of PyTorch training under a budget, with gradients unchanged."""
