"""The command line: every sub-command is one call of the library."""

# These modules add their commands to the program.
from saltflat.cli import landscape, measuring, reading, study, symmetry
from saltflat.cli.names import names_from
from saltflat.cli.program import app

__all__ = ["app", "landscape", "main", "measuring", "names_from", "reading", "study", "symmetry"]


def main() -> None:
    app(prog_name="saltflat")
