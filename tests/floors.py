"""Print the oldest versions that ``pyproject.toml`` allows, as constraints for pip.

    python tests/floors.py > floors.txt

The tools that judge and test the code are not among them: an old one would judge differently, not find more.
"""

from __future__ import annotations

import tomllib
from pathlib import Path

ROOT = Path(__file__).parent.parent


def floors() -> list[str]:
    """Return each dependency and each host of an extra, pinned to its oldest version."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    extras = project["optional-dependencies"]
    allowed = {
        *project["dependencies"],
        *(each for name in extras if name not in ("dev", "docs") for each in extras[name]),
    }
    return sorted(each.replace(">=", "==") for each in allowed)


if __name__ == "__main__":
    print("\n".join(floors()))
