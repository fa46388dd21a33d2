"""Imports point down only, from layer to layer, and never in a circle."""

import ast
import graphlib
import re
from pathlib import Path

import pytest

PACKAGE = Path(__file__).resolve().parent.parent / "sok_lite"

# From the ground up. A module belongs to the longest name that starts its own. It may import
# sok_lite modules of its own line or of the lines before it.
LAYERS = [
    ["sok_lite._version"],
    ["sok_lite.backend"],
    ["sok_lite.comm"],
    ["sok_lite.engine"],
    ["sok_lite.reports"],
    ["sok_lite.native"],
    ["sok_lite.cli", "sok_lite.__main__"],
    ["sok_lite.bridge"],
    ["sok_lite.sok", "sok_lite.dynamic_embedding", "sok_lite.kv_variable", "sok_lite.keras"],
    ["sok_lite.cli.importers.tfplus"],  # it reads with the help of kv_variable
    [
        *("sok_lite.distributed_variable", "sok_lite.dump_load", "sok_lite.dynamic_variable"),
        *("sok_lite.lookup", "sok_lite.optimizer", "sok_lite.optimizers", "sok_lite.raw_ops"),
        *("sok_lite.communication", "sok_lite.elastic", "sok_lite.metrics", "sok_lite.plots"),
        "sok_lite.utils",
    ],
    ["sok_lite"],
]
# What else each part of the package may import, besides the standard library and NumPy.
OUTSIDE = {
    "sok_lite.backend.cuda": {"cupy"},
    "sok_lite.backend": {"cupy"},
    "sok_lite.cli.commands.compile": {"cupy"},  # for its NVRTC, without a backend
    "sok_lite.comm.horovod": {"horovod", "tensorflow"},
    "sok_lite.comm.mpi": {"mpi4py"},
    "sok_lite.comm": set(),
    "sok_lite.engine": set(),
    "sok_lite.reports": set(),
    "sok_lite.native.library": {"tensorflow"},
    "sok_lite.native.stream": {"tensorflow"},
    "sok_lite.native": set(),
    "sok_lite.cli": set(),
    "sok_lite.cli.importers.tensorflow_reader": {"tensorflow"},
    "sok_lite.dynamic_embedding.checkpoint_folder": set(),
}


def layer_of(module):
    fits = [
        (len(name), number)
        for number, names in enumerate(LAYERS)
        for name in names
        if module == name or (module.startswith(name + ".") and name != "sok_lite")
    ]
    return max(fits)[1] if fits else None


def module_name(path):
    parts = path.relative_to(PACKAGE.parent).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


KNOWN = {module_name(path) for path in PACKAGE.rglob("*.py")}


class WithoutTypes(ast.NodeTransformer):
    """Leaves out what only type checkers run."""

    def visit_If(self, node):
        is_for_types = isinstance(node.test, ast.Name) and node.test.id == "TYPE_CHECKING"
        return node.orelse if is_for_types else self.generic_visit(node)


def imports(source, runs=False):
    """Every module that a source imports; `from a import b` is a.b where that is one.

    Names that are no module of ours come as they stand.

    Args:
      runs: leaves out what is imported for type checkers alone.
    """
    tree = ast.parse(source)
    for node in ast.walk(WithoutTypes().visit(tree) if runs else tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, "relative import"
            for alias in node.names:
                name = f"{node.module}.{alias.name}"
                yield name if name in KNOWN else node.module


def faults(module, source):
    """What a module imports and may not."""
    found = []
    for name in set(imports(source)):
        top = name.split(".")[0]
        if top == "sok_lite":
            if name in KNOWN and name != module and layer_of(name) > layer_of(module):
                found.append(name)
        elif top in {"tensorflow", "keras", "tf_keras", "horovod", "cupy", "mpi4py"}:
            fits = [n for n in OUTSIDE if module == n or module.startswith(n + ".")]
            if fits and top not in OUTSIDE[max(fits, key=len)]:
                found.append(name)
    return found


MODULES = sorted(PACKAGE.rglob("*.py"))


@pytest.mark.parametrize("path", MODULES, ids=module_name)
def test_imports_point_down(path):
    module = module_name(path)
    assert layer_of(module) is not None, f"{module} is in no layer: add it to LAYERS"
    assert faults(module, path.read_text()) == []


def graph():
    """Which modules of ours each imports, in functions too."""
    sources = {module_name(path): path.read_text() for path in MODULES}
    return {
        module: {name for name in imports(source, runs=True) if name in sources} - {module}
        for module, source in sources.items()
    }


def test_no_modules_import_each_other():
    graphlib.TopologicalSorter(graph()).prepare()  # raises CycleError with their names


APIS = {
    *("sok_lite.sok", "sok_lite.dynamic_embedding", "sok_lite.kv_variable", "sok_lite.keras"),
}


@pytest.mark.parametrize("api", sorted(APIS))
def test_no_api_imports_another(api):
    for path in (PACKAGE / api.split(".")[1]).rglob("*.py"):
        found = {".".join(name.split(".")[:2]) for name in imports(path.read_text())}
        assert not found & (APIS - {api}), path


@pytest.mark.parametrize("path", sorted((PACKAGE / "bridge").rglob("*.py")), ids=module_name)
def test_the_bridge_speaks_of_no_single_api(path):
    """`sok.` is how SOK's API is imported; `sok_lite.init` and the like are of the package."""
    words = re.findall(r"\bsok\.[a-zA-Z]\w*|\bSOK\b", path.read_text())
    assert words == []


# Where the owner of a key is asked for: when it travels, in a part of a checkpoint, in a gradient,
# when others have its text, and when a program asks of all ranks whether a key is there.
ASK_OWNERS = {
    *("sok_lite.engine.owner", "sok_lite.engine.exchange", "sok_lite.engine.foreign_keys"),
    *("sok_lite.engine.table.content", "sok_lite.engine.files.source_writer"),
    *("sok_lite.engine.texts", "sok_lite.cli.commands.verify", "sok_lite.bridge.serving.in_order"),
    "sok_lite.bridge.table_ops",
}


def test_frames_of_callers_are_walked_in_one_file():
    """And classes of others are changed in one: tests/bridge/test_no_patches.py looks at these."""
    walk = re.compile(r"_getframe|\bf_back\b|inspect\.(stack|currentframe)")
    files = [path for path in PACKAGE.rglob("*.py") if walk.search(path.read_text())]
    assert files == [PACKAGE / "engine" / "callers.py"]


def test_owners_of_keys_are_asked_for_in_few_places():
    """Whose a key is must not be decided by the format that it lies in."""
    asking = {
        module_name(path)
        for path in MODULES
        if re.search(r"\b(owner|rule)\.owners\(|(?<!def )(?<![.\w])owners\(", path.read_text())
    }
    assert asking == ASK_OWNERS


# Public methods of every NamedTuple.
OF_NAMED_TUPLES = {"_replace", "_asdict", "_fields", "_make"}


def is_private(name):
    return name.startswith("_") and not name.startswith("__") and name not in OF_NAMED_TUPLES


def is_own(node):
    """Whether a node is self, cls or super()."""
    called = isinstance(node, ast.Call) and ast.unparse(node.func) == "super"
    return called or ast.unparse(node) in ("self", "cls")


def classes_of(tree):
    return {node.name: node for node in ast.walk(tree) if isinstance(node, ast.ClassDef)}


def base_names(node):
    return [ast.unparse(base).split("[")[0] for base in node.bases]


def private_names(node):
    """The private names that a class gives to its methods and attributes."""
    found = set()
    for each in node.body:
        targets = getattr(each, "targets", [getattr(each, "target", each)])
        found |= {getattr(target, "id", getattr(target, "name", "")) for target in targets}
    for each in ast.walk(node):
        if isinstance(each, ast.Attribute) and isinstance(each.ctx, ast.Store):
            found |= {each.attr} if is_own(each.value) else set()
    return set(filter(is_private, found))


def private_uses(node):
    """Yields where a private attribute is read or set: whose it is, its name and the line."""
    for each in ast.walk(node):
        if isinstance(each, ast.Attribute) and is_private(each.attr):
            yield each.value, each.attr, each.lineno


def strange_uses(tree):
    """The private attributes that a file uses, and no class of it defines.

    What is of `self` has to be of that class, or of one that it derives from in the same file.
    """
    classes = classes_of(tree)
    names = {name: private_names(node) for name, node in classes.items()}
    of_file = set().union(*names.values())

    def own_names(node):
        bases = [classes[base] for base in base_names(node) if base in classes]
        return names[node.name].union(*map(own_names, bases))

    allowed = {
        id(value): own_names(node)
        for node in classes.values()
        for value, *_ in private_uses(node)
        if is_own(value)
    }
    return [
        f"line {line}: {ast.unparse(value)}.{name}"
        for value, name, line in private_uses(tree)
        if name not in allowed.get(id(value), of_file)
    ]


def test_private_attributes_of_the_engine_stay_in_their_file():
    paths = sorted((PACKAGE / "engine").rglob("*.py"))
    trees = {module_name(path): ast.parse(path.read_text()) for path in paths}
    strange = {each: found for each, tree in trees.items() if (found := strange_uses(tree))}
    assert strange == {}


def reached_by(module):
    """Every module of ours that a module imports, itself or through others."""
    imported, reached, waiting = graph(), set(), [module]
    while waiting:
        new = imported[waiting.pop()] - reached
        waiting += new
        reached |= new
    return reached


def test_the_trunk_of_a_lookup_reaches_nothing_that_only_some_lookups_need():
    """Static tables, updates, files: a reader of a lookup and its gradient meets none of them."""
    apart = ("static", "update", "optimizer", "checkpoint", "files", "initializer_spec")
    assert [
        name for name in reached_by("sok_lite.engine.lookup") if any(map(name.count, apart))
    ] == []
    assert "sok_lite.engine.static_table" in reached_by("sok_lite.engine.static_lookup")
