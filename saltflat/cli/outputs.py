"""Files that a command writes."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Protocol

from saltflat.cli.screen import print_message
from saltflat.errors import OptionError
from saltflat.report import Audit, Comparison, Report
from saltflat.report.file import check_writable_path, replace_atomically

PICTURES = ("png", "svg", "pdf")
PAGES = (".html", ".htm")


class SavableResult(Protocol):
    """A result that can be written and drawn."""

    def save(self, path: Path) -> Path: ...

    def plot(self) -> Any: ...


def check_outputs(out: Path | None, plot: Path | None, quiet: bool, html: Path | None = None) -> None:
    """Find out before the long work whether its results can be kept."""
    if quiet and out is None and plot is None and html is None:
        raise OptionError("Got --quiet without --out or --plot. Want a place for the results. Do: --out report.json.")
    check_page_path(html)
    given = {"--out": out, "--plot": plot, "--html": html}
    places = [check_writable_path(path, option) for option, path in given.items() if path is not None]
    if plot is not None and get_picture_format(plot) not in PICTURES:
        raise OptionError(
            f"Got --plot {str(plot)!r}. Want a name that ends in {' or '.join(PICTURES)}. Do: figure.png."
        )
    if len(places) > len(set(places)):
        both = next(path for path in given.values() if path is not None and places.count(check_writable_path(path)) > 1)
        names = " and ".join(
            name
            for name, path in given.items()
            if path is not None and check_writable_path(path) == check_writable_path(both)
        )
        raise OptionError(f"Got {str(both)!r} for both {names}. Want a file for each. Do: --out report.json.")


def write_result(result: SavableResult, out: Path | None, plot: Path | None, quiet: bool) -> None:
    """Write and draw the result, and say so."""
    if out is not None:
        done = _choose_verb(out)
        result.save(out)
        if not quiet:
            print_message(f"{done} {out}.")
    if plot is not None:
        write_figure(result.plot(), plot, quiet)


def write_figure(figure: Any, plot: Path, quiet: bool = False) -> None:
    """Write a figure, in the format that the name says, and say so."""
    done = _choose_verb(plot)
    with replace_atomically(plot) as part:
        figure.savefig(part, format=get_picture_format(plot))
    if not quiet:
        print_message(f"{done} {plot}.")


def check_page_path(html: Path | None, option: str = "--html") -> None:
    """Find out before anything is shown whether a page can be written."""
    if html is None:
        return
    if html.suffix.lower() not in PAGES:
        raise OptionError(f"Got {option} {str(html)!r}. Want a name that ends in {' or '.join(PAGES)}. Do: page.html.")
    check_writable_path(html, option)


def write_result_page(result: Report | Comparison | Audit, html: Path | None, quiet: bool = False) -> None:
    """Write the result as a page for a browser, and say so."""
    if html is not None:
        from saltflat.report.html import render_audit_page, write_page  # needs packages that only pages do

        done = _choose_verb(html)
        _ = write_page(render_audit_page(result), html) if isinstance(result, Audit) else result.to_html(html)
        if not quiet:
            print_message(f"{done} {html}.")


def get_picture_format(path: Path) -> str:
    return path.suffix.removeprefix(".").lower()


def _choose_verb(path: Path) -> str:
    return "Replaced" if path.exists() else "Wrote"
