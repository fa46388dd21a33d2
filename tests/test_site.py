"""The site: its navigation has every page, its API has every public name, no link of it is dead."""

import html.parser
import importlib
import importlib.util
import inspect
import re
import shutil
import subprocess
import sys
from pathlib import Path
from urllib.parse import unquote, urlsplit

import pytest

from tests.support.doc_blocks import FENCE

ROOT = Path(__file__).resolve().parent.parent
DOCS = ROOT / "docs"
PAGES = sorted(str(path.relative_to(DOCS)) for path in DOCS.rglob("*.md"))
# The APIs of other systems: those of their classes that are described in the docstrings.
COMPATIBLE = ("sok_lite.dynamic_embedding", "sok_lite.kv_variable")

_NAVIGATION = re.compile(r"- ([^:\n]+):(?: |\n +- )([\w./-]+\.md)$", re.MULTILINE)
_ENTRY = re.compile(r"^::: ([\w.]+)\n((?:    .*\n)*)", re.MULTILINE)
_MEMBERS = re.compile(r"^      members:(?: \[(.*)\]\n|\n((?:        - \w+\n)+))", re.MULTILINE)


# ------------------------------------------------------------------------ what it is made of


def test_every_page_is_in_the_navigation_once_by_its_title():
    """The first page of a section has the title of the section, and that of the site its name."""
    _, navigation = (ROOT / "mkdocs.yml").read_text().split("\nnav:\n")
    found = _NAVIGATION.findall(navigation)
    assert sorted(page for _, page in found) == PAGES
    for title, page in found:
        heading = (DOCS / page).read_text().splitlines()[0]
        assert heading == ("# sok_lite" if page == "index.md" else f"# {title}"), page


def test_the_home_page_has_the_version():
    version = re.search('"(.+)"', (ROOT / "sok_lite" / "_version.py").read_text().split("=")[1])
    assert f"Version {version.group(1)}, " in (DOCS / "index.md").read_text()


def test_pages_link_to_pages_of_the_site_alone():
    """A link to another file of the repository works where it is read there, and not here."""
    for page in PAGES:
        text = FENCE.sub("", (DOCS / page).read_text())
        for target in re.findall(r"\]\((?![a-z]+:|#)([^)#\s]+)", text):
            path = (DOCS / page).parent / target
            assert path.resolve().is_relative_to(DOCS), f"{page} links to {target}"


def entries():
    """Returns the names of the API's pages, and of their members that are listed there."""
    found = []
    for path in (DOCS / "api").glob("*.md"):
        for name, options in _ENTRY.findall(path.read_text()):
            found.append(name)
            for in_line, in_lines in _MEMBERS.findall(options):
                found += [f"{name}.{each}" for each in re.findall(r"\w+", in_line + in_lines)]
    return found


def public_names():
    """Returns the names that are listed as public, and those of the compatible APIs."""
    from tools import make_public_names as script

    listed = script.MADE.findall(script.NAMES.read_text())
    made = [name for _, name, _ in listed if name not in script.LISTS]
    to_catch = re.findall(r"^\* `([\w.]+)`, a \w+Error:", script.PAGE.read_text(), re.MULTILINE)
    names = set(to_catch)
    for module in (*made, *COMPATIBLE):
        package = importlib.import_module(module)
        for name in package.__all__:
            value = getattr(package, name)
            if inspect.ismodule(value):
                continue
            names.add(f"{module}.{name}")
            if inspect.isclass(value) and module not in COMPATIBLE:
                names |= {f"{module}.{name}.{each}" for each, _ in script.methods_of(value)}
    return names


def test_every_public_name_is_on_a_page_of_the_api():
    pytest.importorskip("tensorflow")
    found = entries()
    assert len(found) == len(set(found)), "twice"
    missing = public_names() - set(found)
    assert not missing, "these belong on a page of docs/api"


# ------------------------------------------------------------------------ what is made of it

builds_the_site = pytest.mark.full_only("builds the site")


class Page(html.parser.HTMLParser):
    """What a page of HTML has: anchors, classes, where links lead, and what a browser fetches."""

    def __init__(self, text):
        super().__init__()
        self.ids, self.classes, self.links, self.loads = set(), set(), [], []
        self.feed(text)

    def handle_starttag(self, tag, attrs):
        given = dict(attrs)
        self.ids |= {given[name] for name in ("id", "name") if given.get(name)}
        self.classes |= set((given.get("class") or "").split())
        if tag == "a" and given.get("href"):
            self.links.append(given["href"])
        elif tag == "link" and given.get("rel") not in ("canonical", "prev", "next"):
            self.loads.append(given["href"])
        elif given.get("src"):
            self.loads.append(given["src"])


@pytest.fixture(scope="module")
def site(tmp_path_factory):
    """The folder of the built site. No warning of the build is let pass."""
    if importlib.util.find_spec("zensical") is None:
        pytest.skip("no zensical here: scripts/setup.sh installs it")
    project = tmp_path_factory.mktemp("project")
    ignored = shutil.ignore_patterns("__pycache__", "*.so")
    for name in ("docs", "sok_lite"):
        shutil.copytree(ROOT / name, project / name, ignore=ignored)
    shutil.copytree(ROOT / "scripts" / "site_templates", project / "scripts" / "site_templates")
    shutil.copy(ROOT / "scripts" / "site_docstrings.py", project / "scripts")
    shutil.copy(ROOT / "mkdocs.yml", project)
    command = [sys.executable, "-m", "zensical", "build", "--clean", "--strict"]
    done = subprocess.run(command, cwd=project, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stdout + done.stderr
    # Griffe tells of a docstring that it cannot read, and goes on.
    assert not re.search(r"warning|griffe:", done.stdout + done.stderr, re.I), done.stderr
    return project / "site"


@pytest.fixture(scope="module")
def pages(site):
    return {path: Page(path.read_text()) for path in site.rglob("*.html")}


@builds_the_site
def test_the_site_has_every_page_and_no_link_or_anchor_of_it_is_dead(site, pages):
    made = {str(path.relative_to(site)) for path in pages}
    assert {page.removesuffix(".md") + ".html" for page in PAGES} <= made
    dead = []
    for path, page in pages.items():
        for target in (*page.links, *page.loads):
            parts = urlsplit(target)
            if parts.scheme or parts.netloc:
                continue
            base = site if parts.path.startswith("/") else path.parent
            file = (base / unquote(parts.path).lstrip("/")).resolve() if parts.path else path
            file = file / "index.html" if file.is_dir() else file
            anchor = unquote(parts.fragment)
            known = pages[file].ids if file in pages else {anchor}  # #only-dark of an image
            if not file.exists() or (anchor and anchor not in known):
                dead.append(f"{path.relative_to(site)}: {target}")
    assert not dead


@builds_the_site
def test_the_site_loads_nothing_from_another_host(site, pages):
    """The script of the theme fetches more for diagrams, pictures and code to be run, if any."""
    assert not {each for page in pages.values() for each in page.loads if urlsplit(each).netloc}
    texts = [path for path in site.rglob("*") if path.suffix in (".html", ".css", ".json")]
    other = re.compile(r"(?:https?:)?//(?:unpkg|cdn\.|fonts\.)|@import")
    assert texts and not [path.name for path in texts if other.search(path.read_text())]
    classes = set().union(*(page.classes for page in pages.values()))
    assert "md-content" in classes and not classes & {"mermaid", "glightbox", "pyodide"}


@builds_the_site
def test_every_public_name_has_an_anchor_on_the_site(site, pages):
    pytest.importorskip("tensorflow")
    known = set().union(*(page.ids for path, page in pages.items() if path.parent.name == "api"))
    assert not public_names() - known
