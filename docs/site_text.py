"""A hook of mkdocs: each page also as Markdown beside its HTML, `llms.txt` (llmstxt.org) and `llms-full.txt`.

`llms.txt` has the site's name and description, and for each section of the navigation its pages with their first sentences.
`llms-full.txt` has all pages, in that order. The packages for this turn the HTML back into Markdown, which the pages already are.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

MARKDOWN: dict[str, str] = {}  # of each page, by the path of its source
LINK = re.compile(r"!?\[((?:`[^`]*`|[^\]`])*)\]\([^)]*\)")
SENTENCE_END = re.compile(r"(?<=[.!?])\s+")
# A list, a table, a fence, HTML, an image or a heading: not a paragraph.
NO_PARAGRAPH = re.compile(r"[#|<`!>]|[-*] |\d+\. ")


def first_sentence(markdown: str) -> str:
    """The first sentence of the first paragraph, without links and emphasis; "" if there is no paragraph."""
    for block in re.split(r"\n\s*\n", re.sub(r"^```.*?^```$", "", markdown, flags=re.DOTALL | re.MULTILINE)):
        if block.strip() and (block.lstrip()[0] == "`" or not NO_PARAGRAPH.match(block.lstrip())):
            text = LINK.sub(r"\1", " ".join(block.split())).replace("**", "")
            return SENTENCE_END.split(text, maxsplit=1)[0].rstrip(":")
    return ""


def on_pre_build(config: Any, **_: Any) -> None:
    MARKDOWN.clear()


def on_page_markdown(markdown: str, page: Any, config: Any, **_: Any) -> None:
    MARKDOWN[page.file.src_uri] = markdown


def on_nav(nav: Any, config: Any, **_: Any) -> None:
    config.extra["site_text_nav"] = nav


def on_post_build(config: Any, **_: Any) -> None:
    site = Path(config.site_dir)
    base = config.site_url or ""
    index = [f"# {config.site_name}", "", f"> {config.site_description}", ""]
    index += [f"All pages in one file: [llms-full.txt]({base}llms-full.txt).", ""]
    full = []
    for item in config.extra["site_text_nav"].items:
        pages = [item] if item.is_page else item.children
        index += [f"## {item.title if item.is_section else 'Overview'}", ""]
        for page in pages:
            text = MARKDOWN[page.file.src_uri]
            (site / page.file.src_uri).write_text(text, encoding="utf-8")
            full.append(text)
            sentence = first_sentence(text)
            index.append(f"- [{page.title}]({base}{page.file.src_uri})" + (f": {sentence}" if sentence else ""))
        index.append("")
    (site / "llms.txt").write_text("\n".join(index), encoding="utf-8")
    (site / "llms-full.txt").write_text("\n".join(full), encoding="utf-8")
