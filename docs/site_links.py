"""Hook of mkdocs: every link of the finished site leads somewhere, no page loads from a network.

mkdocs checks the links that are written in Markdown. This looks at the HTML, where those of
generated pages and of the theme are, too. Links to other sites are not followed, so that a build
needs no network.
"""

from __future__ import annotations

import logging
from html.parser import HTMLParser
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit

# In strict mode a warning in a logger below mkdocs' own fails the build.
_log = logging.getLogger("mkdocs.hooks.site_links")
# What a browser loads by itself, by tag.
_LOADED = {"script": "src", "img": "src", "link": "href", "iframe": "src", "source": "src"}
# Of `link`: names of pages, which are not loaded.
_NOT_LOADED = {"canonical", "prev", "next", "edit"}


def on_post_build(config: Any) -> None:
    """Warn of every broken link."""
    for problem in problems(Path(config.site_dir)):
        _log.warning(problem)


def problems(site: Path) -> list[str]:
    """A sentence for every link that leads nowhere and for everything loaded from elsewhere."""
    pages = {path.resolve(): _Page(path.read_text("utf-8")) for path in site.rglob("*.html")}
    found = []
    for path, page in pages.items():
        # Its links start at the root of a server, for whatever address was not found.
        if path.name == "404.html":
            continue
        name = path.relative_to(site.resolve())
        for address in page.loaded:
            if urlsplit(address).netloc:
                found.append(f"{name} loads {address} from the network")
        for address in (*page.loaded, *page.links):
            parts = urlsplit(address)
            if parts.scheme or parts.netloc:
                continue
            target = (path.parent / unquote(parts.path)).resolve() if parts.path else path
            if not target.is_file():
                found.append(f"{name} links to {address}, which is not there")
            elif parts.fragment and unquote(parts.fragment) not in pages[target].anchors:
                found.append(f"{name} links to {address}, which has no such anchor")
    return found


class _Page(HTMLParser):
    """Links, anchors and what is loaded, of one page."""

    def __init__(self, text: str) -> None:
        super().__init__()
        # The empty fragment and `top` are the top of every page.
        self.anchors, self.links, self.loaded = {"", "top"}, [], []
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        """Note what a tag links to, loads, or is called."""
        values = dict(attrs)
        self.anchors.update(values[key] or "" for key in ("id", "name") if key in values)
        address = values.get(_LOADED.get(tag, "href"))
        if address is None:
            return
        if tag in _LOADED and values.get("rel") not in _NOT_LOADED:
            self.loaded.append(address)
        elif tag == "a":
            self.links.append(address)
