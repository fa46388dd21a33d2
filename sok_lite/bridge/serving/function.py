"""`export_serving`: a function or model as a SavedModel that runs without sok_lite."""

from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from types import SimpleNamespace
from typing import Any

import tensorflow as tf

from sok_lite.bridge import job
from sok_lite.bridge.checks import check_cutoff
from sok_lite.bridge.serving.as_a_whole import as_a_whole, checked_folder
from sok_lite.bridge.serving.files import beside
from sok_lite.bridge.serving.graph import check_plain
from sok_lite.bridge.serving.mode import exporting
from sok_lite.bridge.serving.models import function_of, resources_in
from sok_lite.bridge.serving.signature import Signature, flat_outputs
from sok_lite.bridge.serving.tables import ServedTables, check_quantize
from sok_lite.bridge.serving.together import Ranks
from sok_lite.bridge.tf_private import (
    WHOLE,
    UninitializedVariable,
    save_context,
    write_fingerprint,
)


def export_serving(
    model_or_fn: Any,
    path: Any,
    signature: Any = None,
    *,
    cutoff: float | None = None,
    quantize: str | None = None,
) -> None:
    """Writes a SavedModel of plain TensorFlow operations, which runs without sok_lite.

    The function is traced again. Its lookups become a binary search among sorted keys and a gather;
    everything else stays as it is. It returns what live lookups without insertion return. A key
    without a row returns its table's initial value if that is one row for all keys; zeros if it is
    random or a lookup says `missing="zeros"`. Batches may have any size.

    `tf.saved_model.load(path)` returns an object that is called like the function, with the same
    arguments; TensorFlow Serving and TF1 find plain tensors by name in the signature
    "serving_default"; those of a sparse or ragged argument end in "_values", "_row_splits" and
    similar. Loading fills no hash tables, and all operations are TensorFlow's own.

    It is written beside `path` and replaces it when complete: the next load finds the old model or
    the new one. Only a load in progress may find files of both, and fail: if a server reloads by
    itself, give each model its own folder, as TensorFlow Serving expects. A folder that cannot be
    moved, because it is mounted, has other files in it, or is an address such as
    "gs://bucket/served", is replaced file by file, `saved_model.pb` last.

    Rows are read and written in pieces. With several ranks every rank must call it, with the same
    arguments, and sends its rows to rank 0, which writes. `lookup_sparse` then finds the keys of
    all ranks, a lookup in one rank's table those of rank 0.

    Args:
      model_or_fn: a tf.function, a function, a tf.Module with `__call__`, or a model of Keras 3 or
        tf_keras, which is called with training=False.
      path: the folder to write, or an address that TensorFlow supports.
      signature: the arguments: a tf.TensorSpec, a list of them by position, or a dict by name; also
        RaggedTensorSpec, SparseTensorSpec and structures. None: the input_signature of a
        tf.function, the inputs of a model.
      cutoff: leaves out keys whose row has only |elements| < cutoff, such as 1e-20 for rows of
        zeros. They then return zeros.
      quantize: reduces the size of float rows; None: no change. "float16": an element is off by at
        most 2**-11 of its size. "int8", with one scale per row: by 1/254 of the largest in its row.

    Raises:
      TypeError, ValueError: an argument that does not fit; rows that cannot be quantized; a cutoff
        where missing keys do not return zeros.
      NotImplementedError: the function does more with a table than look rows up, or calls Python in
        another way.
      RuntimeError: in a graph, or another rank has failed.

    Examples:
      >>> ids = keras.Input([2], dtype="int64")
      >>> model = keras.Model(ids, sk.Embedding(sk.Table("item", 2, "ones"), "sum")(ids))
      >>> trained = model(tf.constant([[7, 9]], tf.int64), training=True)
      >>> sok_lite.export_serving(model, "served")
      >>> tf.saved_model.load("served")(tf.constant([[7, 8]], tf.int64)).numpy().tolist()
      [[1.0, 1.0]]
    """
    ranks = Ranks(job.other_ranks())
    with ranks.together():
        if not tf.executing_eagerly():
            raise RuntimeError(
                "export_serving() is for eager mode. In a graph of TF1 use "
                "sok_lite.export_serving_graph(session, path, inputs=..., outputs=...)."
            )
        function, arguments = function_of(model_or_fn, signature)
        functions = {"serving_default": (function, arguments)}
        export_functions(model_or_fn, path, functions, ranks, cutoff=cutoff, quantize=quantize)


def export_functions(
    root: Any,
    path: Any,
    functions: Mapping[str, tuple[Callable[..., Any], Signature]],
    ranks: Ranks,
    *,
    cutoff: float | None = None,
    quantize: str | None = None,
    options: Any = None,
) -> None:
    """As `export_serving`, for several signatures.

    Args:
      root: the owner of the variables that the functions read, unless these are tf.Variables.
      functions: signature name -> (function, its arguments). Calling the loaded object calls the
        first.
      ranks: those that call it, each within `ranks.together()`.
    """
    check_cutoff(cutoff)
    check_quantize(quantize)
    if ranks.is_first:
        checked_folder(path)
    names = {name: arguments.flat() for name, (_, arguments) in functions.items()}
    module = tf.Module()
    signatures, variables, captured = {}, [], []
    with ExitStack() as stack:
        part = stack.enter_context(as_a_whole(path)) if ranks.is_first else None
        files = stack.enter_context(beside(part))
        tables = ServedTables(_variable, _value, cutoff, quantize, ranks, files)
        with exporting(tables):
            with save_context(SimpleNamespace(experimental_variable_policy=object())):
                for name, (function, arguments) in functions.items():
                    served = tf.function(function)
                    traced = served.get_concrete_function(*arguments.args, **arguments.kwargs)
                    signatures[name] = _by_name(served, arguments, names[name])
                    check_plain(traced.graph.as_graph_def())
                    variables += traced.variables
                    captured += [outside for outside, _ in traced.graph.captures]
                    if not hasattr(module, "__call__"):  # noqa: B004
                        # TensorFlow would trace a tf.function again when it saves.
                        module.__call__ = traced
            of_tables = tables.variables
            resources = _captured_resources(root, captured, [*variables, *of_tables.values()])
            if files is not None:
                for name, variable in of_tables.items():
                    setattr(module, name, variable)
                module.variables_of_model = variables
                module.resources = resources
                tf.saved_model.save(module, part, signatures, options)
                files.merge_into(f"{part}/variables/variables")
                write_fingerprint(part)  # for the variables in their final files
        ranks.meet()  # if one rank fails, none publishes


def _captured_resources(root: Any, captured: list[Any], variables: list[Any]) -> list[Any]:
    """Returns the resources except variables that functions read, such as lookup tables.

    Raises NotImplementedError if the owner of a resource is unknown.
    """
    ids = {id(tensor) for tensor in captured if tensor.dtype == tf.resource}
    found = [each for each in resources_in(root) if id(each.resource_handle) in ids]
    known = {id(each.resource_handle) for each in found} | {id(each.handle) for each in variables}
    if ids - known:
        raise NotImplementedError(
            "The function reads a table of tf.lookup, or another resource that is no variable, "
            "which the export does not find. Make it an attribute of a tf.Module with __call__, "
            "and give that module."
        )
    return found


def _variable(name: str, shape: Sequence[int], dtype: tf.DType) -> tuple[Any, str]:
    # TensorFlow saves such a variable without a value.
    variable = UninitializedVariable(trainable=False, name=name, shape=shape, dtype=dtype)
    return variable, f"{name}/.ATTRIBUTES/{WHOLE}"


def _value(variable: Any) -> tf.Tensor:
    return variable.read_value()


def _by_name(
    served: Callable[..., Any], arguments: Signature, names: dict[str, tf.TensorSpec]
) -> Any:
    """Returns the function with plain tensors by name."""

    def serve(**tensors: tf.Tensor) -> dict[str, tf.Tensor]:
        args, kwargs = arguments.pack(tensors)
        return flat_outputs(served(*args, **kwargs))

    return tf.function(serve, autograph=False).get_concrete_function(**names)
