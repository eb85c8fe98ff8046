"""Build hook: the README as package indexes show it, with links that lead to the repository."""

import re
from pathlib import Path
from typing import Any

from hatchling.metadata.plugin.interface import MetadataHookInterface

LINK = re.compile(r"(?P<image>!?)\[(?P<label>[^\]]*)\]\((?![a-z]+:|#)(?P<target>[^)\s]+)\)")


class ReadmeHook(MetadataHookInterface):
    """Fill in ``readme``: a package index resolves no relative links."""

    def update(self, metadata: dict[str, Any]) -> None:
        repository = metadata["urls"]["Repository"].rstrip("/")

        def replace(link: re.Match[str]) -> str:
            kind = "raw" if link["image"] else "blob"
            return f"{link['image']}[{link['label']}]({repository}/{kind}/main/{link['target']})"

        text = (Path(self.root) / "README.md").read_text(encoding="utf-8")
        metadata["readme"] = {"content-type": "text/markdown", "text": LINK.sub(replace, text)}
