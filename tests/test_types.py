"""What a type checker, and so an editor, sees of `import sok_lite`: signatures, not `Any`."""

import ast
import inspect
import re
import subprocess
import sys
from pathlib import Path

import sok_lite as sok

ROOT = Path(__file__).resolve().parent.parent

# What a line shows, and what mypy must say of it. TensorFlow has no types of its own: a tensor is
# Any to mypy, whatever the annotations here say.
SEEN = {
    "table": "sok_lite.sok.dynamic_variable.DynamicVariable",
    "table.contains": "def (keys: Any, all_ranks: bool =) -> Any",
    "7 in table": "bool",
    "sok.lookup_sparse([table], [3])": "list[Any]",
    "sok.lookup_sparse": r"Overload\(def \(params: .*DynamicVariable \| .*FixedVariable, sp_ids: .*"
    r"combiners: str \| typing.Sequence\[str\] \| None =, .*training: bool \| None =, .*\)",
    "sok.export": r"def \(var: Any, cutoff: float \| None =\) -> tuple\[Any, Any\]",
    "sok.init": r"def \(comm_tool: str =, use_legacy_optimizer: bool =, gpu_transport: .*\)",
    "sok.OptimizerWrapper": "def (optimizer: Any, on_nonfinite: str =, stochastic_rounding: bool ="
    ") -> sok_lite.sok.optimizer.OptimizerWrapper",
    "sk.Table": r"def \(name: str, dim: int, initializer: Any =, key_type: Any =, \*, .*\) -> "
    "sok_lite.keras.classes.Table",
    "sk.Embedding": r"def \(table: Any, combiner: str \| None =, mask_value: Any =, .*\) -> .*",
    "sk.Embeddings": r"def \(features: Any, .*\) -> sok_lite.keras.classes.Embeddings",
    "sk.TableMetrics": r"def \(every: int \| None =, log_dir: Any =\) -> .*TableMetrics",
}
REFUSED = ["sok.lookup_sparce", "sok.lookup_sparse(table)", "sok.export(table, cut=1)"]


def test_mypy_sees_the_types(tmp_path):
    program = tmp_path / "program.py"
    lines = ["import sok_lite as sok", "import sok_lite.keras as sk"]
    lines += ["table = sok.DynamicVariable(4)"]
    lines += [*(f"reveal_type({shown})" for shown in SEEN), *REFUSED]
    program.write_text("\n".join(lines) + "\n")
    command = [sys.executable, "-m", "mypy", "--config-file", ROOT / "pyproject.toml", program]
    found = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=240)
    pattern = r"(?m)^.*program\.py:(\d+): (?:note: Revealed type is \"(.*)\"|error: .*)$"
    said = {lines[int(number) - 1]: shown for number, shown in re.findall(pattern, found.stdout)}
    for shown, expected in SEEN.items():
        text = said.get(f"reveal_type({shown})", found.stdout + found.stderr)
        assert expected == text or re.fullmatch(expected, text), (shown, text)
    assert [line for line in said if line in REFUSED] == REFUSED


SET_BY_ITSELF = {"__version__", "tf_version"}


def test_every_public_name_is_declared_for_type_checkers():
    tree = ast.parse((ROOT / "sok_lite" / "__init__.pyi").read_text())
    imports = [node for node in tree.body if isinstance(node, ast.ImportFrom)]
    names = [alias.name for node in imports for alias in node.names]
    # `import x as x` is what makes x public to them.
    assert names == [alias.asname for node in imports for alias in node.names]
    assert len(names) == len(set(names)) and {*sok.__all__} <= {*names, *SET_BY_ITSELF}
    assert set(dir(sok)) == {*names, *SET_BY_ITSELF}
    # As __init__.py imports them.
    modules = {alias.name: node.module for node in imports for alias in node.names}
    found = {name: f"sok_lite.{module}" for name, module in sok._MODULE_OF.items()}
    assert modules == {**dict.fromkeys(sok._MODULES, "sok_lite"), **found}
    assert (ROOT / "sok_lite" / "py.typed").exists()


def test_signatures_are_shown_at_run_time():
    """By notebooks: a metaclass of TensorFlow hides those of variables."""
    shown = inspect.signature(sok.DynamicVariable)
    assert [*shown.parameters][:4] == ["dimension", "initializer", "var_type", "name"]
    assert "initial_value" in inspect.signature(sok.DistributedVariable.__mro__[1]).parameters

    class Own(sok.DynamicVariable):
        def __init__(self, size):
            super().__init__(size)

    class Heir(sok.DynamicVariable):
        pass

    assert str(inspect.signature(Own)) == "(size)" and inspect.signature(Heir) == shown
