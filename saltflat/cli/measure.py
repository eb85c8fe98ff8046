"""Measure a network, and print, compare and list results: saltflat measure, doctor, compare, list and show."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, TypeAlias

import typer

import saltflat
from saltflat.cli.inputs import (
    FileOptions,
    Html,
    MeasureOptions,
    NetworkOptions,
    PageOptions,
    Plot,
    SweepOptions,
    compute_result,
)
from saltflat.cli.program import (
    add_command,
    app,
    catch_stdout_errors,
    check_outputs,
    check_page_path,
    parse_names,
    print_result,
    reword_reasons,
    reword_report,
    write_figure,
    write_result_page,
)
from saltflat.cli.torchrun import is_first, make_group_arguments, open_process_group
from saltflat.errors import OptionError

if TYPE_CHECKING:
    from saltflat.audit.result import Audit
    from saltflat.landscape.result import Landscape
    from saltflat.results.files import FileFormat
    from saltflat.results.report import Report
    from saltflat.spectrum.result import Spectrum

Certificate: TypeAlias = Annotated[bool, typer.Option(help="Check whether the curvature is that of the Hessian.")]
Precision: TypeAlias = Annotated[
    str, typer.Option(help="Of float32 products: ieee, or tf32 for three digits, faster on an NVIDIA GPU.")
]


@add_command(app)
def measure(
    source: NetworkOptions,
    sweep: SweepOptions,
    chosen: MeasureOptions,
    output: PageOptions,
    certificate: Certificate = True,
    precision: Precision = "ieee",
) -> None:
    """Measure a network on data: print a table, write a report.

    Processes that torchrun starts share the examples: torchrun --nproc-per-node 4 -m saltflat measure ...
    """
    options = {"certificate": certificate, "precision": precision}
    with open_process_group() as group:
        shared = make_group_arguments(group)
        report = compute_result(saltflat.measure, source, sweep, output, chosen, **options, **shared)
        if is_first(group):
            output.write(reword_report(report))


@add_command(app)
def doctor(
    source: NetworkOptions,
    sweep: SweepOptions,
    chosen: MeasureOptions,
    output: FileOptions,
    certificate: Certificate = True,
    precision: Precision = "ieee",
) -> None:
    """Find out what measure would do with the same options, and what it would take, before any long work.

    Prints the way of each parameter and why, which measures are computed and which are left out, the symmetries, and
    the predicted time and memory.
    """
    found = compute_result(saltflat.plan, source, sweep, output, chosen, certificate=certificate, precision=precision)
    output.write(reword_reasons(found))


FACTS = ("name", "meaning", "formula", "invariant_to", "smaller", "needs", "reference", "options", "cost")


@add_command(app)
def compare(
    reports: Annotated[list[Path], typer.Argument(help="Two or more reports written by measure.")],
    measures: Annotated[
        list[str] | None, typer.Option(help="Names, separated by commas or given one by one. Default: all.")
    ] = None,
    plot: Plot = None,
    html: Html = None,
) -> None:
    """Compare reports side by side: print which network is flatter, and which differences are significant."""
    check_outputs(None, plot, quiet=False, html=html)
    found = saltflat.compare(*reports, names=parse_names(measures))
    print_result(found)
    if plot is not None:
        write_figure(found.plot(), plot)
    write_result_page(found, html)


@add_command(app, name="list")
def list_measures(
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON with all facts.")] = False,
) -> None:
    """List the measures: meaning, formula, invariances, cost and reference of each."""
    entries = saltflat.list_measures()
    if as_json:
        with catch_stdout_errors():
            typer.echo(json.dumps([{fact: getattr(each, fact) for fact in FACTS} for each in entries], indent=2))
    else:
        print_result(entries)


@add_command(app)
def show(
    report: Annotated[
        Path, typer.Argument(help="A saved report, audit, landscape, spectrum, bound, feature robustness or plan.")
    ],
    html: Html = None,
) -> None:
    """Print a saved report, audit, landscape, spectrum, bound, feature robustness or plan again."""
    from saltflat.audit.result import Audit
    from saltflat.bounds.bound import Bound
    from saltflat.bounds.robustness_result import FeatureRobustness
    from saltflat.landscape.result import Landscape
    from saltflat.results.files import (
        AUDIT,
        BOUND,
        FEATURE_ROBUSTNESS,
        LANDSCAPE,
        PLAN,
        REPORT,
        SPECTRUM,
        find_file_format,
    )
    from saltflat.results.plan import MeasurementPlan
    from saltflat.results.report import Report
    from saltflat.spectrum.result import Spectrum

    check_page_path(html)
    kinds: dict[
        FileFormat, type[Report | Audit | Landscape | Spectrum | Bound | FeatureRobustness | MeasurementPlan]
    ] = {
        REPORT: Report,
        AUDIT: Audit,
        LANDSCAPE: Landscape,
        SPECTRUM: Spectrum,
        BOUND: Bound,
        FEATURE_ROBUSTNESS: FeatureRobustness,
        PLAN: MeasurementPlan,
    }
    form = find_file_format(report, *kinds)
    found = kinds[form].load(report)
    if html is not None and isinstance(found, Landscape | Spectrum | FeatureRobustness | MeasurementPlan):
        raise OptionError(
            f"Expected a report, an audit or a bound, but got {form.what} with --html. Try drawing it with its plot()."
        )
    print_result(found)
    if not isinstance(found, Landscape | Spectrum | FeatureRobustness | MeasurementPlan):
        write_result_page(found, html)
