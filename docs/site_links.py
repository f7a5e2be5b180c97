"""A hook of mkdocs: links from a page to files outside of docs/ become the names of the files, as the site has no such pages."""

from __future__ import annotations

import logging
import re
from pathlib import Path
from typing import Any

log = logging.getLogger("mkdocs.hooks.site_links")
LINK = re.compile(r"\[((?:`[^`]*`|[^\]`])+)\]\((?:\.\./|examples/|notebooks/)([^)#]+)(?:#[^)]*)?\)")


def on_page_markdown(markdown: str, page: Any, config: Any, **_: Any) -> str:
    """The page without such links; a link to a file that does not exist is a warning, so an error in strict mode."""
    docs = Path(config.docs_dir)

    def name(match: re.Match[str]) -> str:
        target = match[0].rpartition("](")[2].rstrip(")").partition("#")[0]
        if not (docs / target).exists():
            log.warning("%s links to %s, which does not exist", page.file.src_path, target)
        return match[1]

    return LINK.sub(name, markdown)
