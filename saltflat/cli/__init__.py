"""The command line: every command is one call of the library."""

from importlib import import_module

from saltflat._startup import INTERRUPTED
from saltflat.cli.program import app, discard_output, open_missing_streams, parse_names, print_message

__all__ = ["app", "main", "parse_names"]

BROKEN_PIPE = 128 + 13  # the exit code of programs that SIGPIPE ends

for _commands in ("measure", "symmetry", "landscape", "certify", "rewrite", "study"):  # in the order of the help
    import_module(f"{__name__}.{_commands}")


def main() -> None:
    """Run the program. Exit codes besides those of the commands: 130 after Ctrl-C, 141 if the reader of a pipe left."""
    open_missing_streams()
    try:
        app(prog_name="saltflat")
    except KeyboardInterrupt as stop:
        print_message("Interrupted.", "red")
        raise SystemExit(INTERRUPTED) from stop
    except SystemExit as leaving:
        if not isinstance(leaving.__context__, BrokenPipeError):
            raise
        discard_output()
        raise SystemExit(BROKEN_PIPE) from leaving
