"""Hook of mkdocs: files outside of docs/ that pages link to become part of the site, below
`repository/`.

A page names a file of the repository as any Markdown file does, relative to itself: `../config/README.md`. Documents
among these files become pages, others are copied; links to files that do not exist stay as they are, and `mkdocs build
--strict` fails on them.
"""

import os
import re
from collections.abc import Iterator
from pathlib import Path, PurePosixPath

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

ROOT = Path(__file__).resolve().parents[1]
DOCS = PurePosixPath("docs")
SITE = PurePosixPath("repository")
"""Where files of the repository lie in the site."""
LINK = re.compile(r"\[(?P<text>[^\]\n]*)\]\((?P<path>[^)#\s:]+)(?P<anchor>#[^)\s]*)?\)")


def in_repository(source: str) -> PurePosixPath:
    """Path in the repository of a file of the site."""
    path = PurePosixPath(source)
    return path.relative_to(SITE) if path.is_relative_to(SITE) else DOCS / path


def in_site(path: PurePosixPath) -> PurePosixPath:
    """Path in the site of a file of the repository."""
    return path.relative_to(DOCS) if path.is_relative_to(DOCS) else SITE / path


def target(document: PurePosixPath, link: str) -> PurePosixPath:
    """Path in the repository that a document there links to."""
    return PurePosixPath(os.path.normpath(document.parent / link))


def linked(document: PurePosixPath) -> Iterator[PurePosixPath]:
    """Files of the repository outside of docs/ that a document links to, those they link to
    included.
    """
    seen = set()
    left = [document]
    while left:
        of = left.pop()
        for match in LINK.finditer((ROOT / of).read_text(encoding="utf-8")):
            path = target(of, match["path"])
            if path not in seen and (ROOT / path).is_file() and not path.is_relative_to(DOCS):
                seen.add(path)
                left += [path] if path.suffix == ".md" else []
                yield path


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add what the pages link to."""
    pages = [in_repository(file.src_uri) for file in files.documentation_pages()]
    for path in sorted({path for page in pages for path in linked(page)}):
        files.append(File.generated(config, str(SITE / path), abs_src_path=str(ROOT / path)))
    return files


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Point links at the places that files have in the site; a folder has none, and keeps its name
    alone.
    """
    own = PurePosixPath(page.file.src_uri)

    def moved(match: re.Match[str]) -> str:
        path = target(in_repository(page.file.src_uri), match["path"])
        if (ROOT / path).is_dir():
            return match["text"]
        return f"[{match['text']}]({os.path.relpath(in_site(path), own.parent)}{match['anchor'] or ''})"

    return LINK.sub(moved, markdown)
