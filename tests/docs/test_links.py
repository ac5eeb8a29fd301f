"""Links between pages lead somewhere: in the repository, and on the Package Index, which shows README alone."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PAGES = sorted(
    str(page.relative_to(ROOT))
    for pattern in ("*.md", "docs/**/*.md", "plugins/*/README.md")
    for page in ROOT.glob(pattern)
)
MADE = {ROOT / "docs" / "zoo.md"}
"""Pages that the build of the documentation makes."""

CODE = re.compile(r"^(`{3,}).*?^\1|`[^`\n]+`", re.DOTALL | re.MULTILINE)
LINK = re.compile(r"\]\(([^)\s]+)\)")


def prose(text: str) -> str:
    return CODE.sub("", text)


def anchors(page: Path) -> set[str]:
    headings = re.findall(r"^#+ (.*)$", re.sub(r"^```.*?^```", "", page.read_text(), flags=re.DOTALL | re.M), re.M)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("page", PAGES)
def test_relative_links_lead_to_files_and_headings(page: str) -> None:
    for link in LINK.findall(prose((ROOT / page).read_text())):
        if link.startswith(("http:", "https:", "mailto:")):
            continue
        name, _, anchor = link.partition("#")
        target = ((ROOT / page).parent / name).resolve() if name else ROOT / page
        assert target in MADE or target.exists(), f"{page} links to {link}, which does not exist"
        assert not anchor or target in MADE or anchor in anchors(target), f"{page} links to {link}: no such heading"


def test_cards_and_pages_link_to_the_project() -> None:
    code = [*ROOT.glob("hf_stitch/**/*"), *ROOT.glob("plugins/*/hf_stitch_*/**/*")]
    texts = {path: path.read_text() for path in code if path.suffix in (".py", ".jinja", ".html", ".js")}
    assert len(texts) > 200 and not [path for path, text in texts.items() if "pypi.org" in text]


def test_links_survive_on_the_package_index() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    address, text = project["project"]["urls"]["Repository"], (ROOT / "README.md").read_text()
    files = LINK.findall(text)
    for rule in project["tool"]["hatch"]["metadata"]["hooks"]["fancy-pypi-readme"]["substitutions"]:
        text = re.sub(rule["pattern"], rule["replacement"], text)
    absolute = LINK.findall(text)
    assert len(absolute) == len(files) > 20
    for before, after in zip(files, absolute, strict=True):
        kind = "raw" if before.endswith(".svg") else "blob"
        assert after == f"{address}/{kind}/v$HFPR_VERSION/{before}"
