"""Hooks of mkdocs: pages from files beside docs/ (README, changelog, notebooks), and links that
hold on GitHub and on the site alike."""

from __future__ import annotations

import base64
import json
import posixpath
import re
from pathlib import Path
from typing import Any

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

ROOT = Path(__file__).resolve().parents[1]
# file of the repository -> page of the site
BESIDE = {
    "README.md": "index.md",
    "CONTRIBUTING.md": "contributing.md",
    "CHANGELOG.md": "changelog.md",
    "notebooks/README.md": "notebooks/index.md",
}
LINK = re.compile(r"(!?)\[([^\]]*)\]\((?!https?:|mailto:|#)([^)#\s]+)(#[^)\s]*)?\)")
FENCE = re.compile(r"^\s*(```|~~~)")
ITEM = re.compile(r"^(\s*)([-*]|\d+\.) ")


def on_config(config: MkDocsConfig) -> MkDocsConfig:
    """Puts every page of docs/ that the navigation does not name at the end of the guides."""
    named = re.findall(r"[\w/]+\.md", json.dumps(config.nav))
    guides = next(part["Guides"] for part in config.nav or [] if "Guides" in part)
    guides += [path.name for path in sorted((ROOT / "docs").glob("*.md")) if path.name not in named]
    return config


def on_files(files: Files, *, config: MkDocsConfig) -> Files:
    """Adds the pages that are made from files beside docs/."""
    for source, page in BESIDE.items():
        files.append(
            File.generated(config, page, content=(ROOT / source).read_text(encoding="utf-8"))
        )
    for path in sorted((ROOT / "notebooks").glob("*.ipynb")):
        text, pictures = notebook_page(json.loads(path.read_text(encoding="utf-8")), path.stem)
        files.append(File.generated(config, f"notebooks/{path.stem}.md", content=text))
        for name, content in pictures.items():
            files.append(File.generated(config, f"notebooks/{name}", content=content))
    return files


def on_page_markdown(markdown: str, *, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Points links at pages of the site; what the site does not have becomes plain text."""
    here = posixpath.dirname(page.file.src_uri)
    folder = posixpath.dirname(repository_path(page.file.src_uri))

    def linked(found: re.Match[str]) -> str:
        bang, text, target, anchor = found.groups()
        uri = site_path(posixpath.normpath(posixpath.join(folder, target)))
        if files.get_file_from_path(uri) is None:
            return text
        return f"{bang}[{text}]({posixpath.relpath(uri, here or '.')}{anchor or ''})"

    return "\n".join(
        line if fenced else LINK.sub(linked, line) for line, fenced in lines_of(with_room(markdown))
    )


def repository_path(uri: str) -> str:
    """The file of the repository that a page is made from."""
    for source, page in BESIDE.items():
        if page == uri:
            return source
    return uri if uri.startswith("notebooks/") else f"docs/{uri}"


def site_path(path: str) -> str:
    """The page or file of the site that a file of the repository becomes."""
    if path.endswith(".ipynb"):
        return path.removesuffix(".ipynb") + ".md"
    return BESIDE.get(path, path.removeprefix("docs/"))


def lines_of(text: str) -> list[tuple[str, bool]]:
    """(line, whether it is code) of every line."""
    found: list[tuple[str, bool]] = []
    inside = False
    for line in text.split("\n"):
        edge = FENCE.match(line) is not None
        found.append((line, inside or edge))
        inside = inside != edge
    return found


def with_room(text: str) -> str:
    """The text with an empty line before each list, which GitHub does without and Python-Markdown
    does not."""
    found: list[str] = []
    for line, fenced in lines_of(text):
        before = found[-1] if found else ""
        if (
            not fenced
            and ITEM.match(line)
            and before.strip()
            and not ITEM.match(before)
            and not before.startswith((" ", "\t"))
        ):
            found.append("")
        found.append(line)
    return "\n".join(found)


def notebook_page(notebook: dict[str, Any], name: str) -> tuple[str, dict[str, bytes]]:
    """A notebook as (Markdown, pictures by file name)."""
    parts: list[str] = []
    pictures: dict[str, bytes] = {}
    for cell in notebook["cells"]:
        source = "".join(cell["source"])
        if cell["cell_type"] == "markdown":
            parts.append(source)
            continue
        parts.append(f"```python\n{source}\n```")
        for output in cell["outputs"]:
            data = output.get("data", {})
            if output["output_type"] == "stream":
                parts.append(f"``` {{ .text .printed }}\n{''.join(output['text']).rstrip()}\n```")
            elif "image/png" in data:
                file = f"{name}-{len(pictures) + 1}.png"
                pictures[file] = base64.b64decode("".join(data["image/png"]))
                parts.append(f"![what the cell draws]({file})")
    return "\n\n".join(parts) + "\n", pictures
