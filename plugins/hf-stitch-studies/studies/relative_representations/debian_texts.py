"""Write the texts of Debian packages as plain text for the training of word vectors.

Download packages (``apt-get download``) and unpack each into a folder of its name (``dpkg-deb -x``), then:

    python run.py relative_representations.debian_texts --unpacked UNPACKED --texts TEXTS
"""

import argparse
import gzip
import html
import re
from collections.abc import Callable
from functools import partial
from pathlib import Path

from hf_stitch.storage.files import write_whole

HIDDEN = re.compile(r"<(script|style|head)\b.*?</\1>|<!--.*?-->", re.S | re.I)
BREAKS = re.compile(r"</?(p|div|li|h\d|td|tr|dt|dd|br|pre|title|section|note|item)\b[^>]*>", re.I)
SOURCES = re.compile(
    r"\[(1913 Webster|WordNet 1\.5|PJC|Webster 1913 Suppl\.|Century Dict\. 1906|RP|AS|MW10|1913 Webster \+PJC"
    r"|WordNet 1\.5 \+PJC|PJC\])\]?"
)
PRONUNCIATIONS = re.compile(r"\\[^\\\n]{1,60}\\")


def content(path: Path) -> str:
    """Read a plain or compressed file, in UTF-8 or Latin-1."""
    data = path.read_bytes()
    data = gzip.decompress(data) if path.suffix in (".gz", ".dz") else data
    try:
        return data.decode()
    except UnicodeDecodeError:
        return data.decode("latin-1")


def paragraphs(text: str) -> str:
    return "\n".join(" ".join(part.split()) for part in re.split(r"\n\s*\n", text) if part.strip())


def of_page(text: str) -> str:
    """Return the paragraphs of a page in HTML or Mallard."""
    text = BREAKS.sub("\n", HIDDEN.sub(" ", text))
    return paragraphs(html.unescape(re.sub(r"<[^>]+>", "", text)))


def of_gcide(text: str) -> str:
    """Return the entries of GCIDE without the names of sources and pronunciations."""
    return paragraphs(PRONUNCIATIONS.sub(" ", SOURCES.sub(" ", text)))


def of_wordnet(text: str) -> str:
    """Return the words of every synonym set, with their gloss."""
    lines = []
    for line in text.splitlines():
        if " | " in line and not line.startswith("  "):
            head, gloss = line.split(" | ", 1)
            fields = head.split()
            words = (re.sub(r"\(.*\)", "", fields[4 + 2 * n]).replace("_", " ") for n in range(int(fields[3], 16)))
            lines.append(f"{' '.join(words)} : {gloss.strip()}")
    return "\n".join(lines)


def of_fortunes(text: str) -> str:
    return paragraphs(text.replace("\n%\n", "\n\n"))


TEXTS: dict[str, tuple[str, Callable[[str], str]]] = {
    "anarchism": ("anarchism/**/*.html", of_page),
    "foldoc": ("dict-foldoc/**/foldoc.dict.dz", paragraphs),
    "fortunes": ("fortunes*/usr/share/games/fortunes/*", of_fortunes),
    "gcide": ("dict-gcide/**/gcide.dict.dz", of_gcide),
    "gnome": ("gnome-user-docs/usr/share/help/C/**/*.page", of_page),
    "handbook": ("debian-handbook/**/html/en-US/*.html", of_page),
    "jargon": ("jargon-text/**/jargon.txt.gz", paragraphs),
    "reference": ("debian-reference-en/**/debian-reference.en.txt.gz", paragraphs),
    "wordnet": ("wordnet-base/usr/share/wordnet/data.*", of_wordnet),
}
"""Name of a text -> pattern of its files, and function that extracts the text."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--unpacked", type=Path, required=True, help="folder with one folder for each package")
    parser.add_argument("--texts", type=Path, required=True, help="folder for the texts")
    arguments = parser.parse_args()
    for name, (pattern, read) in TEXTS.items():
        files = [
            path for path in sorted(arguments.unpacked.glob(pattern))
            if path.is_file() and not path.is_symlink() and path.suffix not in (".dat", ".u8")
        ]  # fmt: skip
        if not files:
            parser.error(f"--unpacked must contain {pattern}, got {arguments.unpacked}")
        text = "\n".join(read(content(path)) for path in files)
        write_whole(arguments.texts / f"{name}.txt", partial(Path.write_text, data=text, encoding="utf-8"))
        print(f"{name}: {len(text):,} characters")
