"""The command line: every sub-command is one call of the library."""

# The first three add their commands to the program.
from saltflat.cli import measuring, reading, symmetry
from saltflat.cli.names import names_from
from saltflat.cli.program import app

__all__ = ["app", "main", "measuring", "names_from", "reading", "symmetry"]


def main() -> None:
    app(prog_name="saltflat")
