"""The command line: every sub-command is one call of the library."""

from saltflat._startup import INTERRUPTED, raise_on_interrupt
from saltflat.cli import (
    landscape,
    study,
    symmetry,
)
from saltflat.cli import (
    landscape as spectrum,
)
from saltflat.cli import (
    measure as measuring,
)
from saltflat.cli import (
    measure as reading,
)
from saltflat.cli import (
    rewrite as rewriting,
)
from saltflat.cli.program import app, discard_output, open_missing_streams, parse_names, print_message

__all__ = [
    "app",
    "landscape",
    "main",
    "measuring",
    "parse_names",
    "reading",
    "rewriting",
    "spectrum",
    "study",
    "symmetry",
]

BROKEN_PIPE = 128 + 13  # as if SIGPIPE had ended the process, which it does to most programs


def main() -> None:
    """Run the program. Exit codes beside those of the commands: 130 after Ctrl-C, 141 if the reader of a pipe left."""
    open_missing_streams()
    try:
        with raise_on_interrupt():
            app(prog_name="saltflat")
    except KeyboardInterrupt as stop:
        print_message("Interrupted.", "red")
        raise SystemExit(INTERRUPTED) from stop
    except SystemExit as leaving:
        if not isinstance(leaving.__context__, BrokenPipeError):
            raise
        discard_output()
        raise SystemExit(BROKEN_PIPE) from leaving
