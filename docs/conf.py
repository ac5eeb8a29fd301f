"""Sphinx configuration: `make docs` builds the site, and fails on a broken link or reference."""

import pkgutil
import re
import sys
from pathlib import Path
from typing import Any

from docutils.nodes import Element
from sphinx.application import Sphinx
from sphinx.environment import BuildEnvironment
from sphinx.util.nodes import make_refnode

import hf_stitch

sys.path.insert(0, str(Path(__file__).parents[1]))
from benchmarks import zoo_records

project = "hf-stitch"
author = "The hf-stitch authors"
version = release = hf_stitch.__version__
extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.napoleon", "sphinx.ext.viewcode"]
html_theme = "furo"
html_title = f"hf-stitch {release}"
exclude_patterns = ["conf.py"]

myst_heading_anchors = 4
myst_enable_extensions = ["colon_fence"]

autodoc_member_order = "bysource"
autodoc_typehints = "signature"
autodoc_default_options = {"members": True, "show-inheritance": True}
napoleon_google_docstring = True
napoleon_numpy_docstring = False
napoleon_use_ivar = True

# Names of other libraries are not linked, so that the site builds without a network.
nitpick_ignore_regex = [(r"py:.*", r"(?!hf_stitch).*")]


def resolve(app: Sphinx, env: BuildEnvironment, node: Element, content: Element) -> Element | None:
    """Link a name to the documentation of its object; leave names of undocumented objects as text."""
    target = node.get("reftarget", "")
    try:
        documented = pkgutil.resolve_name(target)
    except (ImportError, AttributeError, ValueError):
        return None  # a warning, and with -W an error
    python = env.get_domain("py")
    last = target.rpartition(".")[2]
    for name, entry in python.objects.items():  # type: ignore[attr-defined]
        if name.rpartition(".")[2] == last and _same(name, documented):
            return make_refnode(app.builder, node["refdoc"], entry.docname, entry.node_id, content)
    return content


def _same(name: str, documented: Any) -> bool:
    try:
        return pkgutil.resolve_name(name) is documented
    except (ImportError, AttributeError, ValueError):
        return False


def offer_outside(app: Sphinx, document: str, source: list[str]) -> None:
    """Offer pages of plugins as downloads: the site lacks them, and their links work in the repository only."""
    source[0] = re.sub(r"\[([^\]]+)\]\(((?:\.\./)+plugins/[^)#]+\.md)(?:#[^)]*)?\)", r"{download}`\1 <\2>`", source[0])


def make_pages(app: Sphinx) -> None:
    """Write the page of the zoo from its records."""
    page, text = Path(app.srcdir) / "zoo.md", zoo_records.report(zoo_records.read().values())
    if not page.exists() or page.read_text() != text:
        page.write_text(text)


def setup(app: Sphinx) -> None:
    """Connect the handlers, and write generated pages before Sphinx looks for them."""
    app.connect("source-read", offer_outside)
    app.connect("missing-reference", resolve)
    app.connect("builder-inited", make_pages)
