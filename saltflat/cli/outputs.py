"""Files that a command writes."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Protocol

from saltflat.cli.screen import say
from saltflat.errors import OptionError
from saltflat.report import Audit, Comparison, Report
from saltflat.report.file import checked, replacing

PICTURES = ("png", "svg", "pdf")
PAGES = (".html", ".htm")


class Kept(Protocol):
    """A result that can be written and drawn."""

    def save(self, path: Path) -> Path: ...

    def plot(self) -> Any: ...


def check_outputs(out: Path | None, plot: Path | None, quiet: bool, html: Path | None = None) -> None:
    """Find out before the long work whether its results can be kept."""
    if quiet and out is None and plot is None and html is None:
        raise OptionError("Got --quiet without --out or --plot. Want a place for the results. Do: --out report.json.")
    check_page(html)
    given = {"--out": out, "--plot": plot, "--html": html}
    places = [checked(path, option) for option, path in given.items() if path is not None]
    if plot is not None and picture_format(plot) not in PICTURES:
        raise OptionError(
            f"Got --plot {str(plot)!r}. Want a name that ends in {' or '.join(PICTURES)}. Do: figure.png."
        )
    if len(places) > len(set(places)):
        both = next(path for path in given.values() if path is not None and places.count(checked(path)) > 1)
        names = " and ".join(
            name for name, path in given.items() if path is not None and checked(path) == checked(both)
        )
        raise OptionError(f"Got {str(both)!r} for both {names}. Want a file for each. Do: --out report.json.")


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


def check_page(html: Path | None, option: str = "--html") -> None:
    """Find out before anything is shown whether a page can be written."""
    if html is None:
        return
    if html.suffix.lower() not in PAGES:
        raise OptionError(f"Got {option} {str(html)!r}. Want a name that ends in {' or '.join(PAGES)}. Do: page.html.")
    checked(html, option)


def keep_page(result: Report | Comparison | Audit, html: Path | None, quiet: bool = False) -> None:
    """Write the result as a page for a browser, and say so."""
    if html is not None:
        from saltflat.report.html import audit_page, write_page  # needs packages that only pages do

        done = _done(html)
        _ = write_page(audit_page(result), html) if isinstance(result, Audit) else result.to_html(html)
        if not quiet:
            say(f"{done} {html}.")


def picture_format(path: Path) -> str:
    return path.suffix.removeprefix(".").lower()


def _done(path: Path) -> str:
    return "Replaced" if path.exists() else "Wrote"
