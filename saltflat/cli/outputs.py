"""Files that a command writes."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Protocol

from saltflat.cli.screen import say
from saltflat.errors import OptionError
from saltflat.report.file import checked, replacing

PICTURES = ("png", "svg", "pdf")


class Kept(Protocol):
    """A result that can be written and drawn."""

    def save(self, path: Path) -> Path: ...

    def plot(self) -> Any: ...


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


def keep(result: Kept, out: Path | None, plot: Path | None, quiet: bool) -> None:
    """Write and draw the result, and say so."""
    if out is not None:
        done = _done(out)
        result.save(out)
        if not quiet:
            say(f"{done} {out}.")
    if plot is not None:
        draw(result.plot(), plot, quiet)


def draw(figure: Any, plot: Path, quiet: bool = False) -> None:
    """Write a figure, in the format that the name says, and say so."""
    done = _done(plot)
    with replacing(plot) as part:
        figure.savefig(part, format=picture_format(plot))
    if not quiet:
        say(f"{done} {plot}.")


def picture_format(path: Path) -> str:
    return path.suffix.removeprefix(".").lower()


def _done(path: Path) -> str:
    return "Replaced" if path.exists() else "Wrote"
