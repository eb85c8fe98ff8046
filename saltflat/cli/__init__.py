"""The command line: every sub-command is one call of the library."""

from saltflat._startup import INTERRUPTED, interrupts_raise

# These modules add their commands to the program.
from saltflat.cli import landscape, measuring, reading, rewriting, spectrum, study, symmetry
from saltflat.cli.names import names_from
from saltflat.cli.program import app
from saltflat.cli.screen import drop_output, open_missing_streams, say

__all__ = [
    "app",
    "landscape",
    "main",
    "measuring",
    "names_from",
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
        with interrupts_raise():
            app(prog_name="saltflat")
    except KeyboardInterrupt as stop:
        say("Interrupted.", "red")
        raise SystemExit(INTERRUPTED) from stop
    except SystemExit as leaving:
        if not isinstance(leaving.__context__, BrokenPipeError):
            raise
        drop_output()
        raise SystemExit(BROKEN_PIPE) from leaving
