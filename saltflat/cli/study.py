"""saltflat study: run, status, verify, score and report"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated, TypeAlias

import typer

from saltflat.cli import inputs
from saltflat.cli.program import (
    app,
    catch_stdout_errors,
    check_page_path,
    open_cli_session,
    print_message,
    print_result,
)
from saltflat.errors import SaltflatError, StudyError, make_unknown_name_error
from saltflat.studies.executors import EXECUTORS, make_executor
from saltflat.studies.results import Results
from saltflat.studies.store.lock import format_lock_holder, is_locked
from saltflat.studies.store.verify import verify as verify_folder
from saltflat.studies.study import Study
from saltflat.validation import check_count

Folder: TypeAlias = Annotated[Path, typer.Argument(help="The folder that run was given as --out.")]
KeepMissed: TypeAlias = Annotated[
    bool, typer.Option("--keep-missed", help="Score runs too that missed the stopping rule.")
]
GAPS = ("error", "loss")

study = typer.Typer(
    help="Train many networks over a grid, measure them, and see which measures go with the generalization gap.\n\n"
    "run imports and calls the functions that the study names. The other commands do not, and are safe on anybody's "
    "folder; report does with --allow-code.",
    no_args_is_help=True,
)
app.add_typer(study, name="study")


@study.command(
    help="Train and measure what is not yet done. Give the same command again to go on: nothing that is finished is "
    "lost or repeated, whatever was killed.\n\nThis imports and calls the functions that STUDY.yaml names as network, "
    "train or data: like a script, run it only if you trust it. Modules in the current folder are found.\n\nThe "
    "exit code is 2 for bad input, a folder that cannot be written or a cluster that is lost, 130 after Ctrl-C, else "
    "0, also where runs failed: they are counted at the end."
)
def run(
    definition: Annotated[Path, typer.Argument(metavar="STUDY.yaml", help="The study: name, data, axes, stop ...")],
    out: Annotated[Path, typer.Option(help="The folder for the runs; made if it is not there.")],
    executor: Annotated[str, typer.Option(help="serial, processes or ray.")] = "serial",
    workers: Annotated[int | None, typer.Option(help="How many processes.")] = None,
    address: Annotated[str | None, typer.Option(help="Of a running Ray cluster; else one is started here.")] = None,
    cpus: Annotated[float | None, typer.Option(help="Cores that one task needs, on a cluster.")] = None,
    gpus: Annotated[
        float | None, typer.Option(help="GPUs that one task needs, on a cluster; 1 with --device cuda.")
    ] = None,
    device: Annotated[str, typer.Option(help="cpu, cuda, cuda:1 ...; auto for a GPU if there is one.")] = "cpu",
    retry_failed: Annotated[
        bool, typer.Option("--retry-failed", help="Try runs again that ended in an error.")
    ] = False,
    data_dir: Annotated[
        Path | None,
        typer.Option(envvar="SALTFLAT_DATA", help="Where named data sets are, if not where the study says."),
    ] = None,
    every: Annotated[float, typer.Option(help="Seconds between checkpoints of a training.")] = 30.0,
    timeout: Annotated[
        float | None,
        typer.Option(
            help="Seconds that training a run may take, and measuring it; one that takes longer is stopped and has "
            "failed. Not with --executor serial. No limit if left out."
        ),
    ] = None,
    quiet: inputs.Quiet = False,
    show_traceback: inputs.Traceback = False,
) -> None:
    """Train and measure what is not yet done."""
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
            print_message(f"Stopped. What is finished is kept. Go on with: {again}", "red")
            raise typer.Exit(130) from stop
    if quiet:
        return
    print_result(results)
    if results.counts["failed"]:
        print_message(f"Runs that failed have their traceback in {out}/rows; try them again with --retry-failed.")
    print_message(f"Next: saltflat study score {out}, or saltflat study report {out} --out report.html.")


@study.command()
def status(folder: Folder) -> None:
    """Print how many runs are done, missed, diverged, failed and missing; also while the study runs."""
    results = Results.load(folder)
    print_result(results)
    running = is_locked(folder)
    if running:
        who = format_lock_holder(folder)
        print_message(f"{who[0].upper()}{who[1:]} is working on it now.")
    elif results.counts["missing"]:
        print_message(f"Nobody is working on it. Go on with: saltflat study run STUDY.yaml --out {folder}")


@study.command(
    help="Check every file against its digest, and say what the next run would make again. Nothing is changed, and "
    "no function that the study names is run.\n\nThe exit code is 1 if anything is wrong, else 0."
)
def verify(folder: Folder) -> None:
    """Check every file, and say what the next run would make again."""
    found = verify_folder(folder)
    print_result(found)
    if found.problems:
        raise typer.Exit(1)


@study.command()
def score(
    folder: Folder,
    gap: Annotated[str, typer.Option(help="error or loss: test minus training.")] = "error",
    keep_missed: KeepMissed = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON, with everything.")] = False,
) -> None:
    """Print how well each measure goes with the generalization gap, beside controls."""
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


@study.command(
    help="Write the study as one page for a browser, with everything in it.\n\nNo code that the folder's files name is "
    "run, unless --allow-code is given; without it the page says which audits were left out."
)
def report(
    folder: Folder,
    out: Annotated[Path, typer.Option(help="The page to write, .html.")],
    keep_missed: KeepMissed = False,
    audits: Annotated[int, typer.Option(help="Rescale so many of the runs and see which measures notice.")] = 2,
    data_dir: Annotated[
        Path | None,
        typer.Option(envvar="SALTFLAT_DATA", help="Where named data sets are, if not where the study says."),
    ] = None,
    allow_code: Annotated[
        bool,
        typer.Option(
            "--allow-code",
            help="Import and call the functions that the study names, which audits of own networks and data need. "
            "Only for a folder you trust. Their names are printed first; modules in the current folder are found.",
        ),
    ] = False,
    quiet: inputs.Quiet = False,
    show_traceback: inputs.Traceback = False,
) -> None:
    """Write the study as one page for a browser, with everything in it."""
    check_count(0, audits=audits)
    check_page_path(out, "--out")
    with open_cli_session(show_traceback, modules_here=allow_code):
        results = Results.load(folder)
        done = "Replaced" if out.exists() else "Wrote"
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
