"""Adds to mkdocs pages from outside of docs/, and links that are right in the repository and on the site.

A link in our Markdown is relative to the file in the repository, so it works where the repository is read.
On the site README.md is the first page, and the folders docs/ and benchmarks/ are side by side.
"""

from __future__ import annotations

import posixpath
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.exceptions import PluginError
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

ROOT = Path(__file__).parents[2]
LINK = re.compile(r"(?P<text>\]\()(?P<path>(?!https?:|mailto:|#)[^)#\s]+)(?P<anchor>#[^)\s]*)?(?=\))")
REMOTE = re.compile(r'<(?:script|link|img|iframe)\b[^>]*\b(?:src|href)="https?://[^"]*"')
REFERENCE = re.compile(r"^(?P<text>\[[^\]]+\]: )(?P<path>(?!https?:|#)[^\s#]+)(?P<anchor>#\S*)?$", re.M)
CODE = re.compile(r"^```.*?^```|^(?:    [^\n]*\n)+", re.M | re.S)


def site_pages() -> dict[str, str]:
    """Path in the repository -> address on the site, of the pages that are not in docs/."""
    pages = {"README.md": "index.md", "CONTRIBUTING.md": "contributing.md", "CHANGELOG.md": "changelog.md"}
    for readme in sorted((ROOT / "benchmarks").glob("**/README.md")):
        name = "-".join(readme.parent.relative_to(ROOT / "benchmarks").parts)
        pages[readme.relative_to(ROOT).as_posix()] = f"benchmarks/{name}.md"
    return {**pages, "tests/simdev/README.md": "rooms/simulated-device.md"}


def entries(folder: str) -> list[str]:
    """Entries of the navigation for a folder of pages, its README first, then in the order of their names."""
    own = [f"{folder}/{path.name}" for path in (ROOT / "docs" / folder).glob("*.md")]
    outside = [address for address in site_pages().values() if address.startswith(f"{folder}/")]
    return sorted([*own, *outside], key=lambda address: (not address.endswith("README.md"), address))


def on_config(config: MkDocsConfig) -> MkDocsConfig:
    """Adds rooms, benchmarks and decisions to the navigation: nobody has to list them by hand."""
    navigation: list[Any] = config.nav or []
    folders = ("rooms", "benchmarks", "decisions")
    config.nav = [*navigation, *({folder.capitalize(): entries(folder)} for folder in folders)]
    return config


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Adds the pages from outside of docs/, and the files that any page links to."""
    for source, address in site_pages().items():
        files.append(File.generated(config, address, content=(ROOT / source).read_text(encoding="utf-8")))
    for page in files.documentation_pages():
        for target in linked_files(repository_path(page.src_uri), page.content_string):
            if files.get_file_from_path(site_path(target)) is None:
                content = (ROOT / target).read_bytes()
                files.append(File.generated(config, site_path(target), content=content))
    return files


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Makes the links of a page relative to its place on the site."""
    here = repository_path(page.file.src_uri)

    def moved(link: re.Match[str]) -> str:
        target = site_path(posixpath.normpath(posixpath.join(posixpath.dirname(here), link["path"])))
        path = posixpath.relpath(target, posixpath.dirname(page.file.src_uri) or ".")
        return f"{link['text']}{path}{link['anchor'] or ''}"

    return outside_of_code(markdown, lambda text: REFERENCE.sub(moved, LINK.sub(moved, text)))


def on_post_page(output: str, page: Page, config: MkDocsConfig) -> str:
    """Refuses a page that loads anything from another server: the site has to work offline."""
    remote = REMOTE.findall(output)
    if remote:
        raise PluginError(f"{page.file.src_uri} loads from another server: {remote}")
    return output


def outside_of_code(markdown: str, change: Callable[[str], str]) -> str:
    """The page, changed everywhere but in its listings."""
    parts: list[str] = []
    end = 0
    for listing in CODE.finditer(markdown):
        parts += [change(markdown[end : listing.start()]), listing[0]]
        end = listing.end()
    return "".join([*parts, change(markdown[end:])])


def linked_files(page: str, markdown: str) -> list[str]:
    """Files of the repository outside of docs/ that a page links to, other than pages of the site."""
    links = [
        link["path"] for pattern in (LINK, REFERENCE) for link in pattern.finditer(CODE.sub("", markdown))
    ]
    paths = [posixpath.normpath(posixpath.join(posixpath.dirname(page), link)) for link in links]
    pages = site_pages()
    return [
        path
        for path in paths
        if (ROOT / path).is_file() and path not in pages and not path.startswith("docs/")
    ]


def repository_path(address: str) -> str:
    """`index.md` -> `README.md`, `tour.md` -> `docs/tour.md`."""
    sources = {address: source for source, address in site_pages().items()}
    return sources.get(address, f"docs/{address}")


def site_path(path: str) -> str:
    """`README.md` -> `index.md`, `docs/tour.md` -> `tour.md`, a folder -> its first page."""
    pages = site_pages()
    folders = {
        "docs/decisions": "decisions/README.md",
        "docs/rooms": "rooms/README.md",
        "docs": "index.md",
    }
    if f"{path}/README.md" in pages:
        path = f"{path}/README.md"
    path = pages.get(path) or folders.get(path.rstrip("/")) or path
    return path.removeprefix("docs/")
