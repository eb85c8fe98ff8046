"""Run and score studies: saltflat study run, status, verify, score, effects and report."""

from __future__ import annotations

import json
import os
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Annotated, TypeAlias

import typer

from saltflat.cli.inputs import Quiet, Traceback
from saltflat.cli.program import (
    add_command,
    app,
    catch_stdout_errors,
    check_page_path,
    check_picture_path,
    choose_verb,
    open_cli_session,
    parse_names,
    print_message,
    print_result,
    write_figure,
)
from saltflat.errors import OptionError, SaltflatError, StudyError, make_unknown_name_error

Folder: TypeAlias = Annotated[Path, typer.Argument(help="The folder that was passed to run as --out.")]
KeepMissed: TypeAlias = Annotated[
    bool, typer.Option("--keep-missed", help="Include runs that missed the stopping criterion.")
]
DataDir: TypeAlias = Annotated[
    Path | None,
    typer.Option(envvar="SALTFLAT_DATA", help="Folder of the named data sets. Default: as the study says."),
]
GAPS = ("error", "loss")

study = typer.Typer(
    help="Train many networks over a grid, measure them, and score how well measures correlate with the generalization "
    "gap.\n\nrun imports and calls the functions that the study names. The other commands do not, and are safe on "
    "any folder; report does with --allow-code.",
    no_args_is_help=True,
)
app.add_typer(study, name="study")


@add_command(study)
def run(
    definition: Annotated[Path, typer.Argument(metavar="STUDY.yaml", help="The study: name, data, axes, stop ...")],
    out: Annotated[Path, typer.Option(help="Folder for the runs. It is created if it does not exist.")],
    executor: Annotated[str, typer.Option(help="serial, processes or ray.")] = "serial",
    workers: Annotated[int | None, typer.Option(help="Number of processes.")] = None,
    address: Annotated[
        str | None, typer.Option(help="Address of a running Ray cluster. Default: start a local one.")
    ] = None,
    cpus: Annotated[float | None, typer.Option(help="Cores per task, on a cluster.")] = None,
    gpus: Annotated[
        float | None, typer.Option(help="GPUs per task, on a cluster. Default: 1 with --device cuda.")
    ] = None,
    device: Annotated[str, typer.Option(help="cpu, cuda, cuda:1 ...; auto for a GPU if there is one.")] = "cpu",
    retry_failed: Annotated[bool, typer.Option("--retry-failed", help="Retry runs that ended in an error.")] = False,
    data_dir: DataDir = None,
    every: Annotated[float, typer.Option(help="Seconds between checkpoints of a training run.")] = 30.0,
    timeout: Annotated[
        float | None,
        typer.Option(
            help="Seconds that training or measuring a run may take. A run that takes longer is stopped and has "
            "failed. Not with --executor serial. Default: no limit."
        ),
    ] = None,
    quiet: Quiet = False,
    show_traceback: Traceback = False,
) -> None:
    """Train and measure the runs that are not done yet. If interrupted, the same command resumes where it stopped.

    This imports and calls the functions that STUDY.yaml names as network, train or data: run it only if you trust them,
    like a script. Modules in the current folder are found.

    The exit code is 2 for bad input, a folder that cannot be written or a cluster that is lost, 130 after Ctrl-C, else
    0, even if runs failed: they are counted at the end.
    """
    from saltflat.studies.executors import EXECUTORS, make_executor
    from saltflat.studies.study import Study

    resources = {name: value for name, value in {"cpus": cpus, "gpus": gpus}.items() if value is not None}
    again = f"saltflat study run {definition} --out {out}"
    with open_cli_session(show_traceback):
        if executor not in EXECUTORS:
            raise make_unknown_name_error("executor", executor, EXECUTORS)
        found = Study.from_file(definition)
        chosen = make_executor(executor, workers=workers, address=address)
        try:
            results = found.run(
                out,
                chosen,
                device,
                retry_failed,
                False if quiet else None,
                data_folder=data_dir,
                resources=resources,
                every=every,
                timeout=timeout,
            )
        except KeyboardInterrupt as stop:
            print_message(f"Stopped. Finished runs are kept. Resume with: {again}", "red")
            raise typer.Exit(130) from stop
    if quiet:
        return
    print_result(results)
    if results.counts["missed"]:
        print_message(
            "Runs that missed the stopping rule are left out of scores and effects. Try more epochs, another target, "
            "or --keep-missed there."
        )
    if results.counts["failed"]:
        print_message(f"Tracebacks of failed runs are in {out}/rows. Retry them with --retry-failed.")
    print_message(
        f"Next: saltflat study score {out}, saltflat study effects {out}, or saltflat study report {out} --out "
        "report.html."
    )


@add_command(study)
def status(folder: Folder) -> None:
    """Print how many runs are done, missed, diverged, failed and missing, also while the study runs."""
    from saltflat.studies.results import Results
    from saltflat.studies.store.lock import format_lock_holder, is_locked

    results = Results.load(folder)
    print_result(results)
    if is_locked(folder):
        holder = format_lock_holder(folder)
        print_message(f"{holder[0].upper()}{holder[1:]} is working on it now.")
    elif results.counts["missing"]:
        print_message(f"No process is working on it. Resume with: saltflat study run STUDY.yaml --out {folder}")


@add_command(study)
def verify(folder: Folder) -> None:
    """Check every file against its digest, and print what the next run would redo.

    Nothing is changed, and no function that the study names is called. The exit code is 1 if anything is wrong, else 0.
    """
    from saltflat.studies.store.verify import verify as verify_folder

    found = verify_folder(folder)
    print_result(found)
    if found.problems:
        raise typer.Exit(1)


@add_command(study)
def score(
    folder: Folder,
    gap: Annotated[str, typer.Option(help="error or loss: test minus training.")] = "error",
    keep_missed: KeepMissed = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON with all scores.")] = False,
) -> None:
    """Print how well each measure correlates with the generalization gap, next to controls."""
    from saltflat.studies.results import Results

    if gap not in GAPS:
        raise make_unknown_name_error("gap", gap, GAPS)
    results = Results.load(folder)
    try:
        scores = results.scores(gap, missed="keep" if keep_missed else "leave out")
    except SaltflatError as error:
        raise StudyError(str(error).replace("missed='keep'", "--keep-missed")) from error
    if as_json:
        with catch_stdout_errors():
            typer.echo(json.dumps(scores.to_dict(), indent=2, allow_nan=False))
    else:
        print_result(scores)


@add_command(study)
def effects(
    folder: Folder,
    axis: Annotated[
        list[str] | None, typer.Option(help="A setting to compare; may be repeated. Default: all that vary.")
    ] = None,
    measure: Annotated[
        list[str] | None, typer.Option(help="A measure to compare; may be repeated. Default: all of the study.")
    ] = None,
    reference: Annotated[
        list[str] | None,
        typer.Option(
            metavar="NAME=VALUE", help="The value to compare others with; may be repeated. Default: the first."
        ),
    ] = None,
    keep_missed: KeepMissed = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON with all numbers.")] = False,
    out: Annotated[Path | None, typer.Option(help="Plot of one setting to write, .png, .svg or .pdf.")] = None,
) -> None:
    """Print which value of each setting is flatter, and how losses, errors and gaps change with it.

    Runs that differ in one setting alone, with the same seed, are compared, with 95 % intervals.
    """
    from saltflat.studies.results import Results

    check_picture_path(out, "--out")
    given = [each.partition("=") for each in reference or []]
    for name, equals, _ in given:
        if not equals:
            raise OptionError(f"Expected NAME=VALUE, but got --reference {name!r}. Try --reference lr=0.1.")
    twice = [name for name, count in Counter(name for name, _, _ in given).items() if count > 1]
    if twice:
        raise OptionError(f"Expected one value of {twice[0]}, but got --reference {twice[0]} twice. Try one of them.")
    found = Results.load(folder).effects(
        axes=axis,
        measures=parse_names(measure),
        reference={name: value for name, _, value in given},
        missed="keep" if keep_missed else "leave out",
    )
    try:
        figure = None if out is None else found.plot()
    except OptionError as error:
        raise StudyError(str(error).replace("axis=", "--axis ")) from error
    if as_json:
        with catch_stdout_errors():
            typer.echo(json.dumps(found.to_dict(), indent=2, allow_nan=False))
    else:
        print_result(replace(found, warnings=tuple(map(_reword_warning, found.warnings))))
    if figure is not None and out is not None:
        write_figure(figure, out)


@add_command(study)
def fragility(
    folder: Folder,
    axis: Annotated[
        list[str] | None, typer.Option(help="A setting to change, or seed; may be repeated. Default: all that vary.")
    ] = None,
    measure: Annotated[
        list[str] | None, typer.Option(help="A measure to compare; may be repeated. Default: all of the study.")
    ] = None,
    against: Annotated[
        list[Path] | None,
        typer.Option(help="The folder of another study of the same grid, trained on, say; may be repeated."),
    ] = None,
    gap: Annotated[str, typer.Option(help="error or loss: test minus training.")] = "error",
    keep_missed: KeepMissed = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON with all numbers.")] = False,
    out: Annotated[Path | None, typer.Option(help="Plot to write, .png, .svg or .pdf.")] = None,
) -> None:
    """Print how much of each measure's order of networks survives another seed or setting, beside the gap's own.

    Agreement is Kendall's tau-b between the two orders, with 95 % intervals.
    """
    from saltflat.studies.results import Results

    check_picture_path(out, "--out")
    others = {os.path.relpath(each, folder.parent): Results.load(each) for each in against or []}
    found = Results.load(folder).fragility(
        axes=axis,
        measures=parse_names(measure),
        against=others,
        gap=gap,
        missed="keep" if keep_missed else "leave out",
    )
    if as_json:
        with catch_stdout_errors():
            typer.echo(json.dumps(found.to_dict(), indent=2, allow_nan=False))
    else:
        print_result(replace(found, warnings=tuple(map(_reword_warning, found.warnings))))
    if out is not None:
        write_figure(found.plot(), out)


def _reword_warning(warning: str) -> str:
    return warning.replace("missed='keep'", "--keep-missed")


@add_command(study)
def report(
    folder: Folder,
    out: Annotated[Path, typer.Option(help="The page to write, .html.")],
    keep_missed: KeepMissed = False,
    audits: Annotated[int, typer.Option(help="Number of runs to rescale, to test which measures change.")] = 2,
    data_dir: DataDir = None,
    allow_code: Annotated[
        bool,
        typer.Option(
            "--allow-code",
            help="Import and call the functions that the study names, which audits of custom networks and data need. "
            "Only for a folder you trust. Their names are printed first. Modules in the current folder are found.",
        ),
    ] = False,
    quiet: Quiet = False,
    show_traceback: Traceback = False,
) -> None:
    """Write the study as a self-contained page for a browser.

    No code that the folder's files name is run, unless --allow-code is passed. Without it, the page lists the audits
    that were skipped.
    """
    from saltflat.studies.results import Results
    from saltflat.validation import check_count

    check_count(0, audits=audits)
    check_page_path(out, "--out")
    with open_cli_session(show_traceback, modules_here=allow_code):
        results = Results.load(folder)
        done = choose_verb(out)
        results.write_html(
            out,
            audits=audits,
            data_folder=data_dir,
            progress=False if quiet else None,
            tell=None if quiet else print_message,
            allow_code=allow_code,
            missed="keep" if keep_missed else "leave out",
        )
    if not quiet:
        print_message(f"{done} {out}.")
