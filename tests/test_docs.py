"""The documentation is true: its Python blocks run, and what it links to or names exists.

A block that starts with ```python runs with TensorFlow; all such blocks of a file run in order, in
one process. One that starts with ```python ranks=2 is a program of its own and runs under
horovodrun on that many ranks, where those before it have run. A block ```text output holds what the
Python block above it prints.
"""

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.doc_blocks import (
    FENCE,
    ROOT,
    blocks_of,
    parts_of,
    printed_by,
    program_of,
    run,
)

PAGES = [
    ROOT / "README.md",
    ROOT / "CHANGELOG.md",
    ROOT / "CONTRIBUTING.md",
    ROOT / "kernels" / "README.md",
    *sorted((ROOT / "docs").rglob("*.md")),
]


def name_of(page):
    return str(page.relative_to(ROOT))


# The blocks of these run with their commands, in tests/cli/test_migration.py and test_page.py.
_OF_COMMANDS = ("migration.md", "command_line.md")
PYTHON_PAGES = [
    page for page in PAGES if page.name not in _OF_COMMANDS and blocks_of(page.read_text())
]
RANK_BLOCKS = [
    (page, block) for page in PYTHON_PAGES for block in blocks_of(page.read_text()) if block.ranks
]


@pytest.mark.parametrize(
    "page",
    [
        page
        if page.name == "README.md"
        else pytest.param(page, marks=pytest.mark.full_only("5 to 20 s a page"))
        for page in PYTHON_PAGES
    ],
    ids=name_of,
)
def test_the_blocks_of_a_page_run_and_print_what_it_says(page, tmp_path):
    pytest.importorskip("tensorflow")
    blocks = [block for block in blocks_of(page.read_text()) if not block.ranks]
    for block, printed in zip(blocks, printed_by(blocks, tmp_path), strict=True):
        if block.output is not None:
            assert printed == block.output, f"{name_of(page)}, line {block.line}"


@pytest.fixture(scope="module")
def printed_on_ranks(tmp_path_factory):
    """{(page, line of a block): the lines that its ranks print, sorted}.

    One job for each number of ranks runs the blocks in turn, each with names of its own: a process
    takes longer to begin than most blocks to run.
    """
    pytest.importorskip("tensorflow")
    horovodrun = shutil.which("horovodrun", path=str(Path(sys.executable).parent))
    if horovodrun is None:
        pytest.skip("no horovodrun beside this Python: scripts/setup.sh installs Horovod")
    found = {}
    for ranks in sorted({block.ranks for _, block in RANK_BLOCKS}):
        blocks = [(page, block) for page, block in RANK_BLOCKS if block.ranks == ranks]
        names = "{'__name__': '__main__'}"
        program = program_of([(name_of(page), block) for page, block in blocks], names)
        command = [horovodrun, "--gloo", "-np", str(ranks)]
        printed = run(command, program, tmp_path_factory.mktemp("ranks"))
        lines = re.findall(r"(?m)^\[(\d+)\]<stdout>: ?(.*\n)", printed)
        # Ranks print in any order, with their number before every line.
        parts = [parts_of("".join(line for r, line in lines if int(r) == n)) for n in range(ranks)]
        for (page, block), each in zip(blocks, zip(*parts, strict=True), strict=True):
            found[page, block.line] = sorted(line for part in each for line in part.splitlines())
    return found


@pytest.mark.full_only("starts ranks; tests/ranks is the smoke")
@pytest.mark.parametrize(
    ("page", "block"), RANK_BLOCKS, ids=lambda x: name_of(x) if isinstance(x, Path) else x.line
)
def test_a_block_for_several_ranks_runs_on_them(page, block, printed_on_ranks):
    used = re.search(r"\bso?k\.\w+", block.code)
    assert used and used.group() == "sok.init", "what a block before it has begun hides this"
    printed = printed_on_ranks[page, block.line]
    if block.output is not None:
        assert printed == sorted(block.output.splitlines())


def test_the_chart_of_the_readme_has_numbers_that_were_measured():
    """docs/performance.md has each, and the drawings, for a light and a dark page, are of these."""
    numbers = json.loads((ROOT / "docs" / "images" / "readme_numbers.json").read_text())
    page = (ROOT / "docs" / "performance.md").read_text()
    charts = [path.read_text() for path in (ROOT / "docs" / "images").glob("*.svg")]
    assert len(charts) == 2 and "#ffffff" not in "".join(charts), "a white ground"
    rows = {
        "lookup": "lookup, `tf.function`",
        "training step, Adam": "training step, `tf.function`",
    }
    for work, times in numbers["milliseconds"].items():
        dense, tfra = times["dense tf.Variable"], times["TFRA 0.8.1"]
        row = f"| {rows[work]} | uniform | {times['sok_lite']} | {dense} | {tfra} |"
        assert row in page
        for chart in charts:
            assert work in chart and all(f"{time} ms" in chart for time in times.values())


def test_the_kernels_of_the_kernel_page_compile(tmp_path):
    compiler = os.environ.get("CXX") or shutil.which("g++")
    if compiler is None:
        pytest.skip("no C++ compiler")
    fences = FENCE.findall((ROOT / "kernels" / "README.md").read_text())
    kernels = [body for info, body in fences if info == "cpp"]
    assert kernels
    for body in kernels:
        path = tmp_path / "kernel.cu"
        path.write_text(body)
        flags = ["-std=c++17", "-Wall", "-Wextra", "-Werror", "-fsyntax-only"]
        command = [compiler, *flags, "-I", str(ROOT / "kernels"), "-x", "c++", str(path)]
        done = subprocess.run(command, capture_output=True, text=True)
        assert done.returncode == 0, done.stderr[-3000:]


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_what_a_page_links_to_or_names_exists_and_its_lines_are_short(page):
    whole, folders = page.read_text(), [p.name for p in ROOT.iterdir() if p.is_dir()]
    for target in re.findall(r"\]\(([^)\s]+)\)", FENCE.sub("", whole)):
        is_elsewhere = re.match(r"[a-z]+:|#", target)
        assert is_elsewhere or (page.parent / target.split("#")[0]).exists(), target
    folders = "|".join(name for name in folders if not name.startswith("."))
    for path in re.findall(rf"(?<![\w/.-])((?:{folders})/[\w./*-]*[\w*])", whole):
        assert list(ROOT.glob(path.rstrip("."))), path
    for path, test in re.findall(r"`(tests/[\w/]+\.py)::(\w+)`", whole):
        assert f"def {test}(" in (ROOT / path).read_text(), test
    assert [line for line in whole.splitlines() if len(line) > 120] == []


# Pages for those who change the code: each name in them is one of the code.
DESIGN_PAGES = [ROOT / "docs" / "design.md", *(ROOT / "docs" / "internals").glob("t*.md")]
CODE_PAGES = [*DESIGN_PAGES, ROOT / "CONTRIBUTING.md", ROOT / "kernels" / "README.md"]


@pytest.mark.parametrize("page", CODE_PAGES, ids=name_of)
def test_every_file_and_function_named_is_in_the_code(page):
    paths = [str(path) for folder in ("sok_lite", "kernels") for path in (ROOT / folder).rglob("*")]
    for name in re.findall(r"`([\w/]+\.(?:py|cuh?|cpp))`", page.read_text()):
        assert (ROOT / name).exists() or any(path.endswith(f"/{name}") for path in paths), name
    for path, name in re.findall(r"`((?:sok_lite|kernels)/[\w/]+\.\w+)::(\w+)`", page.read_text()):
        defined = rf"(def|class) {name}\b" if path.endswith(".py") else rf"\b{name}\("
        assert re.search(defined, (ROOT / path).read_text()), f"{name} of {path}"


@pytest.mark.parametrize("page", DESIGN_PAGES, ids=name_of)
def test_every_name_of_the_design_is_in_the_code(page):
    sources = [*(ROOT / "sok_lite").rglob("*.py"), *(ROOT / "kernels").rglob("*.cu*")]
    words = set(re.findall(r"\w+", "\n".join(path.read_text() for path in sources)))
    for name in re.findall(r"`([A-Za-z_][\w.]*\w)`", FENCE.sub("", page.read_text())):
        if not (ROOT / name).exists():
            assert set(re.findall(r"\w+", name)) <= words, name


def test_every_fault_names_a_file_of_tests():
    text = (ROOT / "docs" / "faults.md").read_text()
    rows = [line for line in text.splitlines() if re.match(r"\| (?!fault \|)", line)]
    assert len(rows) > 70
    for row in rows:
        test = row.split("|")[-2].strip()
        path = re.fullmatch(r"`(\w+/[\w/]+\.py)`", test)
        is_said = test == "TensorFlow" or "not yet: " in row or "not noticed: " in row
        assert is_said if path is None else (ROOT / "tests" / path[1]).is_file(), row


def test_the_table_of_optimizers_is_what_the_frameworks_and_the_code_give():
    tf = pytest.importorskip("tensorflow")
    pytest.importorskip("tf_keras")
    from tools import optimizer_table

    page = optimizer_table.PAGE.read_text()
    release = re.search(r"^TensorFlow (\d+\.\d+)\.", page, re.MULTILINE).group(1)
    if not tf.__version__.startswith(f"{release}."):
        pytest.skip(f"the page is of TensorFlow {release}, this is {tf.__version__}")
    versions = re.compile("^TensorFlow .*, Keras .*, tf_keras .*$", re.MULTILINE)
    made = optimizer_table.page_with(page, optimizer_table.made_part())
    assert versions.sub("", page) == versions.sub("", made), (
        "run: python -m tools.optimizer_table --write"
    )


def test_code_is_as_wide_as_the_site_shows_it():
    """At 1280 pixels 88 columns are seen. Of what a command prints the rest is scrolled to."""
    for page in (ROOT / "README.md", *(ROOT / "docs").rglob("*.md")):
        for info, body in FENCE.findall(page.read_text()):
            if (page.name, info) != ("command_line.md", "text"):
                wide = [line for line in body.splitlines() if len(line) > 88]
                assert not wide, f"{name_of(page)}: {wide[0]}"


def test_every_environment_variable_is_public():
    known = set()
    for folder in ("sok_lite", "scripts", "tests", "tools"):
        for path in (ROOT / folder).rglob("*"):
            if path.suffix in (".py", ".sh") and path != Path(__file__):
                known |= set(re.findall(r"\bSOK_LITE_[A-Z_]+\b", path.read_text()))
    page = (ROOT / "docs" / "public_names.md").read_text()
    named = re.findall(r"^\| `(SOK_LITE_[A-Z_]+)` \|", page, re.MULTILINE)
    assert known == set(named) and len(named) == len(known)
