"""The command line: every sub-command is one call of the library."""

from __future__ import annotations

import dataclasses
import errno
import json
import sys
import traceback
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from rich.console import Console
from rich.text import Text
from torch import nn
from typer.core import TyperGroup

import saltflat
from saltflat.errors import DeviceError, ModelError, OptionError, SaltflatError, first_line, unknown
from saltflat.readers import read
from saltflat.readers.factory import made
from saltflat.readers.foreign import users_model
from saltflat.readers.placed import placed
from saltflat.report import Report
from saltflat.report.file import checked, replacing
from saltflat.sweep import check_seed
from saltflat.weights import fitted, load_weights, put_weights

DTYPES = {"float32": torch.float32, "float64": torch.float64}
PICTURES = ("png", "svg", "pdf")
FACTS = ("name", "meaning", "formula", "invariant_to", "smaller", "needs", "reference", "options")


class Commands(TyperGroup):
    """Bad input is one line and exit code 2; what nobody foresaw keeps its traceback."""

    def invoke(self, ctx: Any) -> Any:
        try:
            return super().invoke(ctx)
        except SaltflatError as error:
            say(" ".join(str(error).split()), "red")
            raise typer.Exit(2) from error
        except KeyboardInterrupt as stop:
            say("Interrupted.", "red")
            raise typer.Exit(130) from stop


app = typer.Typer(
    cls=Commands,
    help="How flat is a trained network's minimum, measured so that rescaling its weights cannot fool you?",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)


def say(text: str, style: str = "dim") -> None:
    """A line to the person, beside the results."""
    Console(stderr=True).print(Text(text, style=style), soft_wrap=True)


def show_on_screen(thing: Any) -> None:
    """A result as a table: in colours and of the screen's width, or as it prints itself into files and pipes."""
    with stdout_checked():
        if sys.stdout.isatty():
            Console().print(thing)
        else:
            typer.echo(str(thing))


@contextmanager
def stdout_checked() -> Iterator[None]:
    """A full disk behind the standard output is an error like others."""
    try:
        yield
    except OSError as error:
        if error.errno == errno.EPIPE:  # a reader that has seen enough
            raise
        with suppress(OSError):
            sys.stdout.close()  # else Python tries again at its end, and complains
        raise OptionError(
            f"Got a standard output that cannot be written ({error.strerror}). Want a place for the results. "
            "Do: free the disk, or send them elsewhere."
        ) from error


def version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"saltflat {saltflat.__version__}")
        raise typer.Exit


@app.callback()
def start(
    show_version: Annotated[
        bool, typer.Option("--version", callback=version, is_eager=True, help="Print the version.")
    ] = False,
) -> None:
    """How flat is a trained network's minimum, measured so that rescaling its weights cannot fool you?"""


@app.command()
def measure(
    model: Annotated[
        str, typer.Option(help="package.module:function that makes the model; modules in this folder are found.")
    ],
    data: Annotated[
        str,
        typer.Option(
            help="digits, mnist, fashion-mnist, cifar10, cifar100; a file .npz or .safetensors with inputs (or x) and "
            "targets (or y); or package.module:function that makes the data."
        ),
    ],
    model_args: Annotated[str, typer.Option(help="Arguments of that function, as a JSON object.")] = "{}",
    weights: Annotated[
        Path | None, typer.Option(help="Trained weights: .safetensors, or a state_dict saved by torch.")
    ] = None,
    data_dir: Annotated[
        Path, typer.Option(envvar="SALTFLAT_DATA", help="Where named data sets are, as torchvision lays them out.")
    ] = Path("data"),
    split: Annotated[str | None, typer.Option(help="train (if not given) or test, of a named data set.")] = None,
    skip: Annotated[int, typer.Option(help="Leave out so many examples at the beginning.")] = 0,
    limit: Annotated[int | None, typer.Option(help="Take at most so many examples.")] = None,
    normalize: Annotated[
        str, typer.Option(help="Inputs of a named data set: none ([0, 1]), half ([-1, 1]) or standard.")
    ] = "none",
    loss: Annotated[str, typer.Option(help="cross_entropy, mse or bce_with_logits.")] = "cross_entropy",
    measures: Annotated[
        list[str] | None, typer.Option(help="Names, with commas or one by one; all that can be taken if not given.")
    ] = None,
    columns: Annotated[str, typer.Option(help="exact, top (top:5) or sampled (sampled:16).")] = "exact",
    layers: Annotated[list[str] | None, typer.Option(help="Names of modules or parameters; all if not given.")] = None,
    dtype: Annotated[str | None, typer.Option(help="float32 or float64; the model's own if not given.")] = None,
    device: Annotated[str, typer.Option(help="cpu, cuda, cuda:1 ...")] = "cpu",
    memory: Annotated[str, typer.Option(help="Working memory beyond the model and the results.")] = "1GiB",
    seed: Annotated[int, typer.Option(help="Of random columns, and of weights that the model's function draws.")] = 0,
    logits: Annotated[
        str, typer.Option(help="none; std or l2 to bring each example's outputs to one scale first.")
    ] = "none",
    diagonal: Annotated[
        str, typer.Option(help="exact, finite_difference, finite_difference_printed or hutchinson.")
    ] = "exact",
    initial: Annotated[Path | None, typer.Option(help="Weights before training, for distances from them.")] = None,
    certificate: Annotated[bool, typer.Option(help="Check whether the curvature is the Hessian's own.")] = True,
    quiet: Annotated[bool, typer.Option("--quiet", help="Print nothing but errors.")] = False,
    out: Annotated[Path | None, typer.Option(help="Write the report to this file, as JSON.")] = None,
    plot: Annotated[Path | None, typer.Option(help="Draw the report into this file, .png, .svg or .pdf.")] = None,
    show_traceback: Annotated[bool, typer.Option("--traceback", help="Show where an error comes from.")] = False,
) -> None:
    """Measure a network on data: print a table, write a report."""
    check_outputs(out, plot, quiet)
    where, precision = device_named(device), dtype_named(dtype)
    with told_in_full(show_traceback), importable(Path.cwd()):
        torch.manual_seed(check_seed(seed))
        network, notes = network_from(model, model_args, weights, where)
        own = next((p.dtype for p in network.parameters() if p.dtype in DTYPES.values()), torch.float32)
        examples = placed(read(data, data_dir, split, skip, limit, normalize), where, precision or own)
        before = None if initial is None else fitted(network, load_weights(initial))
        with users_model(model, data):
            report = saltflat.measure(
                network,
                examples,
                loss,
                names_from(measures),
                columns=columns,
                layers=names_from(layers),
                memory=memory,
                dtype=precision,
                seed=seed,
                progress=False if quiet else None,
                logits=logits,
                diagonal=diagonal,
                initial=before,
                certificate=certificate,
            )
    notes += [f"Data: {data_told(data, split, skip, limit, normalize)}."]
    report = dataclasses.replace(report, notes=(*report.notes, *notes))
    if not quiet:
        show_on_screen(report)
    for path in (out, plot):
        if path is None:
            continue
        done = "Replaced" if path.exists() else "Wrote"
        if path is out:
            report.save(path)
        else:
            with replacing(path) as part:
                report.plot().savefig(part, format=picture_format(path))
        if not quiet:
            say(f"{done} {path}.")


@app.command()
def compare(
    reports: Annotated[list[Path], typer.Argument(help="Two or more reports that measure wrote.")],
    measures: Annotated[
        list[str] | None, typer.Option(help="Names, with commas or one by one; all if not given.")
    ] = None,
) -> None:
    """Print reports side by side, and which differences are real."""
    show_on_screen(saltflat.compare(*reports, names=names_from(measures)))


@app.command(name="list")
def list_measures(
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON, with everything.")] = False,
) -> None:
    """Print every measure: what it means, what leaves it unchanged, where it comes from."""
    entries = saltflat.catalogue()
    if as_json:
        with stdout_checked():
            typer.echo(json.dumps([{fact: getattr(each, fact) for fact in FACTS} for each in entries], indent=2))
    else:
        show_on_screen(entries)


@app.command()
def show(report: Annotated[Path, typer.Argument(help="A report that measure wrote.")]) -> None:
    """Print a report again."""
    show_on_screen(Report.load(report))


def main() -> None:
    app(prog_name="saltflat")


@contextmanager
def told_in_full(wanted: bool) -> Iterator[None]:
    """An error with its traceback before it becomes one line."""
    try:
        yield
    except SaltflatError:
        if wanted:
            traceback.print_exc()
        raise


@contextmanager
def importable(folder: Path) -> Iterator[None]:
    """Modules in this folder can be imported, as with ``python -m``."""
    sys.path.insert(0, str(folder))
    try:
        yield
    finally:
        sys.path.remove(str(folder))


def network_from(spec: str, arguments: str, weights: Path | None, device: torch.device) -> tuple[nn.Module, list[str]]:
    """The model with its weights, on its device; and what is to be said of the weights."""
    try:
        given = json.loads(arguments)
    except (ValueError, RecursionError) as error:
        given = error
    if not isinstance(given, dict):
        raise OptionError(
            f"Got --model-args {arguments[:200]!r}{f' ({given})' if isinstance(given, Exception) else ''}. "
            "Want a JSON object. Do: for instance '{\"width\": 3}', with the quotes."
        )
    network = made(spec, "model", given)
    if not isinstance(network, nn.Module):
        raise ModelError(f"Got a {type(network).__name__} from {spec!r}. Want a torch.nn.Module. Do: return the model.")
    notes: list[str] = []
    if weights is not None:
        loaded = load_weights(weights)
        rounded = put_weights(network, loaded)
        notes = [f"Weights: {weights}.", *loaded.notes, *rounded]
    return network.to(device), notes


def data_told(data: str, split: str | None, skip: int, limit: int | None, normalize: str) -> str:
    options = {"split": split, "skip": skip or None, "limit": limit, "normalize": normalize}
    return ", ".join([data, *(f"{name} {value}" for name, value in options.items() if value not in (None, "none"))])


def names_from(given: list[str] | None) -> list[str] | None:
    """Names that came with commas, one by one, or both; commas inside of parentheses belong to the name.

    Example:
        >>> names_from(["rho(axis='row', p=2),trace", "frobenius"])
        ["rho(axis='row', p=2)", 'trace', 'frobenius']
    """
    if not given:
        return None
    names, depth = [""], 0
    for letter in ",".join(given):
        depth += {"(": 1, ")": -1}.get(letter, 0)
        if letter == "," and depth == 0:
            names.append("")
        else:
            names[-1] += letter
    names = [name.strip() for name in names if name.strip()]
    if depth != 0 or not names:
        raise OptionError(
            f"Got the names {', '.join(given)!r}. Want at least one, with as many closing as opening parentheses. "
            "Do: quote names with options, \"rho(axis='row')\"."
        )
    return names


def dtype_named(name: str | None) -> torch.dtype | None:
    if name is not None and name not in DTYPES:
        raise unknown("dtype", name, DTYPES)
    return None if name is None else DTYPES[name]


def device_named(name: str) -> torch.device:
    """The device of this name, if it is there."""
    try:
        device = torch.device(name)
        torch.empty(1, device=device).tolist()  # the meta device has no numbers to give
    except (RuntimeError, AssertionError, NotImplementedError) as error:
        raise DeviceError(
            f"Got the device {name!r}, which cannot be used here ({first_line(error)}). "
            "Want one that torch can reach. Do: --device cpu."
        ) from error
    return device


def check_outputs(out: Path | None, plot: Path | None, quiet: bool) -> None:
    """Find out before the long work whether its results can be kept."""
    if quiet and out is None and plot is None:
        raise OptionError("Got --quiet without --out or --plot. Want a place for the results. Do: --out report.json.")
    places = [checked(path, option) for option, path in {"--out": out, "--plot": plot}.items() if path is not None]
    if plot is not None and picture_format(plot) not in PICTURES:
        raise OptionError(
            f"Got --plot {str(plot)!r}. Want a name that ends in {' or '.join(PICTURES)}. Do: figure.png."
        )
    if len(places) > len(set(places)):
        raise OptionError(f"Got {str(plot)!r} for both --out and --plot. Want a file for each. Do: --out report.json.")


def picture_format(path: Path) -> str:
    return path.suffix.removeprefix(".").lower()
