"""Imports point down only: a module imports from its own layer and those below."""

import ast
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
    ["sok_lite.engine.dtypes", "sok_lite.engine.hashing", "sok_lite.engine"],
    ["sok_lite.engine.fingerprint"],
    ["sok_lite.engine.segments", "sok_lite.engine.owner"],
    ["sok_lite.engine.typed_sums"],
    ["sok_lite.engine.rows", "sok_lite.engine.rows.far_file", "sok_lite.engine.rows.allocator"],
    ["sok_lite.engine.rows.column"],
    ["sok_lite.engine.rows.access", "sok_lite.engine.rows.state_owner"],
    ["sok_lite.engine.rows.store", "sok_lite.engine.pooling"],
    ["sok_lite.engine.rows.tiers"],
    ["sok_lite.engine.row_initializer"],
    ["sok_lite.engine.initializer"],
    ["sok_lite.engine.initializer_spec"],
    ["sok_lite.engine.table"],
    ["sok_lite.engine.optimizers"],
    ["sok_lite.engine.failure", "sok_lite.engine.static_table"],
    ["sok_lite.engine.agreement"],
    ["sok_lite.engine.message"],
    ["sok_lite.engine.exchange"],
    ["sok_lite.engine.packed"],
    ["sok_lite.engine.trail"],
    ["sok_lite.engine.optimizer_states", "sok_lite.engine.update_rows"],
    ["sok_lite.engine.named_states"],
    ["sok_lite.engine.foreign_keys"],
    ["sok_lite.engine.room"],
    ["sok_lite.engine.layout"],
    ["sok_lite.engine.batch"],
    ["sok_lite.engine.asked_keys", "sok_lite.engine.sent_gradients", "sok_lite.engine.sent_keys"],
    ["sok_lite.engine.hot_words"],
    ["sok_lite.engine.hot_lookup"],
    ["sok_lite.engine.static_lookup"],
    ["sok_lite.engine.lookup", "sok_lite.engine.update"],
    ["sok_lite.engine.gathered_update", "sok_lite.engine.remote_update"],
    ["sok_lite.engine.trips"],
    ["sok_lite.engine.files.progress"],
    ["sok_lite.engine.files.bar"],
    ["sok_lite.engine.changes"],
    ["sok_lite.engine.files.shard"],
    ["sok_lite.engine.files.manifest"],
    ["sok_lite.engine.files.growing_file", "sok_lite.engine.files.key_value_names"],
    ["sok_lite.engine.files.key_value_files", "sok_lite.engine.files.key_value_states"],
    ["sok_lite.engine.files.state_columns"],
    ["sok_lite.engine.files.joined"],
    ["sok_lite.engine.files.chain", "sok_lite.engine.files.increment"],
    ["sok_lite.engine.files.part", "sok_lite.engine.files.pending"],
    ["sok_lite.engine.files.table_file"],
    ["sok_lite.engine.files.mapped", "sok_lite.engine.files.key_index"],
    ["sok_lite.engine.files.readonly"],
    ["sok_lite.engine.files.content"],
    ["sok_lite.engine.files.static_part", "sok_lite.engine.files.memory_part"],
    ["sok_lite.engine.files.dump"],
    ["sok_lite.engine.files.source"],
    ["sok_lite.engine.files.rewriting"],
    ["sok_lite.engine.files.load", "sok_lite.engine.files.background"],
    ["sok_lite.engine.files.commits"],
    ["sok_lite.cli", "sok_lite.cli.errors", "sok_lite.cli.arguments", "sok_lite.cli.texts"],
    [
        *("sok_lite.cli.wrapped", "sok_lite.cli.options", "sok_lite.cli.buckets"),
        "sok_lite.cli.plain",
    ],
    ["sok_lite.cli.file_source", "sok_lite.cli.initial", "sok_lite.cli.sorted_file"],
    ["sok_lite.cli.named"],
    ["sok_lite.cli.importers"],
    ["sok_lite.cli.importers.keyed_rows", "sok_lite.cli.importers.per_table"],
    ["sok_lite.cli.importers.tensorflow_reader", "sok_lite.cli.importers.tfra_slots"],
    ["sok_lite.cli.importers.tfra_files", "sok_lite.cli.importers.tfra_checkpoint"],
    [
        *("sok_lite.cli.progress", "sok_lite.cli.reading", "sok_lite.cli.destination"),
        *("sok_lite.cli.merged", "sok_lite.cli.compared", "sok_lite.cli.verified"),
    ],
    ["sok_lite.cli.commands"],
    ["sok_lite.cli.main"],
    ["sok_lite.__main__"],
    ["sok_lite.bridge"],
    ["sok_lite.bridge.tf_private"],
    ["sok_lite.bridge.graph_gradient"],
    ["sok_lite.bridge.gpu", "sok_lite.bridge.row_gradient", "sok_lite.bridge.inference"],
    ["sok_lite.bridge.autograph", "sok_lite.bridge.serving.mode", "sok_lite.bridge.string_keys"],
    ["sok_lite.bridge.tensor", "sok_lite.bridge.summary", "sok_lite.bridge.type_spec"],
    [
        *("sok_lite.bridge.turns", "sok_lite.bridge.saver_call"),
        "sok_lite.bridge.horovod_carrier",
    ],
    ["sok_lite.bridge.host_call", "sok_lite.bridge.joined", "sok_lite.bridge.job"],
    ["sok_lite.bridge.table_call", "sok_lite.bridge.checks", "sok_lite.bridge.collectives"],
    ["sok_lite.bridge.local_lookup", "sok_lite.bridge.checkpoint", "sok_lite.bridge.refusals"],
    ["sok_lite.bridge.saved_parts", "sok_lite.bridge.loss_weight"],
    ["sok_lite.bridge.keras_held", "sok_lite.bridge.stored", "sok_lite.bridge.keras_called"],
    ["sok_lite.bridge.keras_tracked"],
    ["sok_lite.bridge.keras_guard"],
    ["sok_lite.bridge.keras_classes", "sok_lite.bridge.keras_weights"],
    ["sok_lite.bridge.variable", "sok_lite.bridge.static_variable"],
    ["sok_lite.bridge.static_part"],
    [
        *("sok_lite.bridge.table_ops", "sok_lite.bridge.writes", "sok_lite.bridge.static_rows"),
        *("sok_lite.bridge.saveable", "sok_lite.bridge.texts"),
    ],
    ["sok_lite.bridge.slot"],
    ["sok_lite.bridge.named_states"],
    ["sok_lite.bridge.lookup_arguments"],
    ["sok_lite.bridge.gradient", "sok_lite.bridge.lookup_host"],
    ["sok_lite.bridge.ahead", "sok_lite.bridge.static_lookup"],
    [
        *("sok_lite.bridge.serving.index", "sok_lite.bridge.serving.rows"),
        *("sok_lite.bridge.serving.signature", "sok_lite.bridge.serving.graph_def"),
        *("sok_lite.bridge.serving", "sok_lite.bridge.serving.checked"),
        "sok_lite.bridge.serving.together",
    ],
    ["sok_lite.bridge.serving.tables", "sok_lite.bridge.serving.models"],
    ["sok_lite.bridge.serving.pooled"],
    ["sok_lite.bridge.lookup", "sok_lite.bridge.reads"],
    ["sok_lite.bridge.serving.function", "sok_lite.bridge.serving.graph"],
    ["sok_lite.bridge.optimizers", "sok_lite.bridge.optimizers.family"],
    ["sok_lite.bridge.optimizers.group"],
    ["sok_lite.bridge.optimizers.copies"],
    ["sok_lite.bridge.optimizers.keras3", "sok_lite.bridge.optimizers.roles"],
    [
        "sok_lite.bridge.optimizers.legacy",
        "sok_lite.bridge.optimizers.tf_keras",
        "sok_lite.bridge.optimizers.v1",
    ],
    [
        *("sok_lite.bridge.optimizers.settings", "sok_lite.bridge.optimizers.host"),
        *("sok_lite.bridge.optimizers.changes", "sok_lite.bridge.optimizers.loss_scale"),
    ],
    [
        *("sok_lite.bridge.optimizers.order", "sok_lite.bridge.optimizers.own_step"),
        "sok_lite.bridge.optimizers.dense_slots",
    ],
    [
        *("sok_lite.bridge.optimizers.slots", "sok_lite.bridge.optimizers.gradients"),
        *("sok_lite.bridge.optimizers.minimize", "sok_lite.bridge.optimizers.all_ranks"),
    ],
    ["sok_lite.bridge.optimizers.step", "sok_lite.bridge.optimizers.shown"],
    ["sok_lite.bridge.optimizers.wrapped"],
    ["sok_lite.bridge.optimizers.here"],
    ["sok_lite.bridge.optimizers.stock"],
    ["sok_lite.communication", "sok_lite.elastic"],
    ["sok_lite.sok", "sok_lite.sok.arguments", "sok_lite.sok.sgd"],
    ["sok_lite.sok.static_variable"],
    ["sok_lite.sok.dynamic_variable"],
    ["sok_lite.sok.lookup", "sok_lite.sok.lookup_helpers", "sok_lite.sok.optimizer"],
    ["sok_lite.sok.dump_load", "sok_lite.sok.handles"],
    ["sok_lite.sok.raw_ops"],
    [
        *("sok_lite.dynamic_embedding.errors", "sok_lite.dynamic_embedding.mode"),
        "sok_lite.dynamic_embedding.graph_keys",
    ],
    [
        *("sok_lite.dynamic_embedding.arguments", "sok_lite.dynamic_embedding.initial"),
        *("sok_lite.dynamic_embedding.partition", "sok_lite.dynamic_embedding.ranks"),
        *("sok_lite.dynamic_embedding.redis_settings", "sok_lite.dynamic_embedding.slots"),
        *("sok_lite.dynamic_embedding.savers", "sok_lite.dynamic_embedding.restrict_policies"),
        *("sok_lite.dynamic_embedding.math", "sok_lite.dynamic_embedding.data_flow"),
    ],
    ["sok_lite.dynamic_embedding.redis_columns"],
    ["sok_lite.dynamic_embedding.redis_store"],
    ["sok_lite.dynamic_embedding.checkpoint_folder", "sok_lite.dynamic_embedding.description"],
    ["sok_lite.dynamic_embedding.file_call"],
    ["sok_lite.dynamic_embedding.file_system", "sok_lite.dynamic_embedding.saved_by_tfra"],
    ["sok_lite.dynamic_embedding.saved_files", "sok_lite.dynamic_embedding.shards"],
    ["sok_lite.dynamic_embedding.tables", "sok_lite.dynamic_embedding.trainable"],
    ["sok_lite.dynamic_embedding.saved_optimizer"],
    [
        *("sok_lite.dynamic_embedding.all_ranks", "sok_lite.dynamic_embedding.hkv"),
        "sok_lite.dynamic_embedding.lookups",
    ],
    ["sok_lite.dynamic_embedding.redis_table"],
    ["sok_lite.dynamic_embedding.creators", "sok_lite.dynamic_embedding.optimizer"],
    ["sok_lite.dynamic_embedding.variable", "sok_lite.dynamic_embedding.shadow_ops"],
    ["sok_lite.dynamic_embedding.by_name"],
    ["sok_lite.dynamic_embedding.ragged_embedding_ops"],
    ["sok_lite.dynamic_embedding.keras.config", "sok_lite.dynamic_embedding.keras.stored"],
    ["sok_lite.dynamic_embedding.keras.parts"],
    ["sok_lite.dynamic_embedding.keras.layers", "sok_lite.dynamic_embedding.keras.formats"],
    ["sok_lite.dynamic_embedding.keras.models"],
    ["sok_lite.dynamic_embedding.keras.callbacks"],
    ["sok_lite.dynamic_embedding.keras"],
    ["sok_lite.dynamic_embedding.warm_start_util"],
    ["sok_lite.dynamic_embedding.train.ranks_together"],
    ["sok_lite.dynamic_embedding.train.checkpoint", "sok_lite.dynamic_embedding.train.saver"],
    ["sok_lite.dynamic_embedding.train"],
    ["sok_lite.dynamic_embedding"],
    ["sok_lite.kv_variable.training.arguments"],
    [
        *("sok_lite.kv_variable.training.adam", "sok_lite.kv_variable.training.group_adam"),
        "sok_lite.kv_variable.training.rectified_adam",
        "sok_lite.kv_variable.training.sparse_group_ftrl",
    ],
    ["sok_lite.kv_variable.training"],
    [
        *("sok_lite.kv_variable.kv_variable_options", "sok_lite.kv_variable.arguments"),
        *("sok_lite.kv_variable.scatter", "sok_lite.kv_variable.share"),
        *("sok_lite.kv_variable.content", "sok_lite.kv_variable.meta_graph"),
    ],
    ["sok_lite.kv_variable.saved_tensors"],
    ["sok_lite.kv_variable.saved_files", "sok_lite.kv_variable.saving"],
    ["sok_lite.kv_variable.saved_table"],
    ["sok_lite.kv_variable.saveable"],
    ["sok_lite.kv_variable.kv_variable_ops"],
    ["sok_lite.kv_variable.partitioned", "sok_lite.kv_variable.embedding_ops"],
    ["sok_lite.kv_variable.variable_scope"],
    ["sok_lite.kv_variable.patch"],
    ["sok_lite.kv_variable"],
    ["sok_lite.cli.importers.tfplus"],
    [
        *("sok_lite.keras.features", "sok_lite.keras.weight", "sok_lite.keras.ranks"),
        *("sok_lite.keras.metrics", "sok_lite.keras.metrics_of_all", "sok_lite.keras.parts"),
    ],
    ["sok_lite.keras.steps"],
    ["sok_lite.keras.table", "sok_lite.keras.layers"],
    ["sok_lite.keras.classes"],
    ["sok_lite.keras"],
    [
        *("sok_lite.distributed_variable", "sok_lite.dump_load", "sok_lite.dynamic_variable"),
        *("sok_lite.lookup", "sok_lite.optimizer", "sok_lite.optimizers", "sok_lite.raw_ops"),
        *("sok_lite.utils", "sok_lite.strings"),
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
    "sok_lite.comm.mpi_carrier": {"mpi4py"},
    "sok_lite.comm": set(),
    "sok_lite.engine": set(),
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


def imports(source):
    """Every module that a source imports; `from a import b` is a.b where that is one.

    Names that are no module of ours come as they stand.
    """
    for node in ast.walk(ast.parse(source)):
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


FACES = {
    *("sok_lite.sok", "sok_lite.dynamic_embedding", "sok_lite.kv_variable", "sok_lite.keras"),
}


@pytest.mark.parametrize("face", sorted(FACES))
def test_no_face_imports_another(face):
    for path in (PACKAGE / face.split(".")[1]).rglob("*.py"):
        found = {".".join(name.split(".")[:2]) for name in imports(path.read_text())}
        assert not found & (FACES - {face}), path


@pytest.mark.parametrize("path", sorted((PACKAGE / "bridge").rglob("*.py")), ids=module_name)
def test_the_bridge_speaks_of_no_single_face(path):
    """`sok.` is how SOK's face is imported; `sok_lite.init` and the like are of the package."""
    words = re.findall(r"\bsok\.[a-zA-Z]\w*|\bSOK\b", path.read_text())
    assert words == []


@pytest.mark.parametrize(
    ("module", "source"),
    [
        ("sok_lite.comm.single", "from sok_lite.engine import exchange"),
        ("sok_lite.engine.segments", "def f():\n    import sok_lite.engine.table.det"),
        ("sok_lite.engine.pooling", "import tensorflow as tf"),
        ("sok_lite.backend.cpu", "from horovod import tensorflow"),
    ],
)
def test_a_planted_import_is_found(module, source):
    assert faults(module, source)
