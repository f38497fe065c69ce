"""The HTML report: both pages in one file that needs nothing else."""

from __future__ import annotations

import base64
import mimetypes
import re
from pathlib import Path

import jinja2
import markdown  # type: ignore[import-untyped]
from markdown.extensions.toc import TocExtension, slugify  # type: ignore[import-untyped]

TEMPLATE = Path(__file__).with_name("page.html.j2")
CONTENTS_DEPTH = "2-3"
"""Headings of these levels are in the table of contents."""


def joined(brief: str, appendix: str) -> str:
    """Return the two pages as one, with links that start in the appendix's folder."""
    heads = [_anchor(page) for page in (brief, appendix)]
    brief = re.sub(r"\]\((?!https?:|#)([^)]+)\)", r"](../\1)", brief).replace("](../benchmarks/", "](")
    brief = brief.replace("](appendix.md)", f"](#{heads[1]})").replace("](appendix.md#", "](#")
    return f"{brief}\n{appendix.replace('](../benchmarks.md)', f'](#{heads[0]})')}"


def _anchor(page: str) -> str:
    """Return the anchor of a page's title."""
    return str(slugify(page.splitlines()[0].removeprefix("# "), "-"))


def to_html(report: str, folder: Path) -> str:
    """Return one self-contained page: pictures become data URIs. ``folder``: where their relative paths start."""
    contents = TocExtension(toc_depth=CONTENTS_DEPTH, permalink=False)
    reader = markdown.Markdown(extensions=["tables", "sane_lists", contents])
    body = reader.convert(report)
    body = re.sub(r'src="([^":]+)"', lambda found: f'src="{data_uri(folder / found[1])}"', body)
    body = body.replace("<table>", '<div class="wide"><table>').replace("</table>", "</table></div>")
    title = re.search(r"^# (.+)$", report, flags=re.MULTILINE)
    page = jinja2.Template(TEMPLATE.read_text())
    return page.render(title=title[1] if title else "", body=body, contents=reader.toc)


def data_uri(path: Path) -> str:
    kind, _ = mimetypes.guess_type(path.name)
    return f"data:{kind};base64,{base64.b64encode(path.read_bytes()).decode()}"
