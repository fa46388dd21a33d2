"""What users of TFRA's dynamic_embedding do, as functions `scenario(de, tf)` that return numbers.

They use the public names of TFRA and TensorFlow only, so the same function runs with TFRA itself,
which tools/record_tfra.py does, and with sok_lite.dynamic_embedding. Results depend on no random
number and on no order of a hash table, and no scenario does what TFRA is known to do wrong.

`SCENARIOS` has all of them by name; each returns a dict of lists of numbers, bools and text. In the
modules, those are the functions that take `de` and `tf` alone.
"""

import inspect
from functools import partial

from tests.dynamic_embedding import (
    scenarios_of_files,
    scenarios_of_graphs,
    scenarios_of_layers,
    scenarios_of_lookups,
    scenarios_of_policies,
    scenarios_of_refusals,
    scenarios_of_tables,
    scenarios_of_training,
)
from tests.dynamic_embedding.scenarios_of_graphs import V1_OPTIMIZERS, trained_by_v1
from tests.dynamic_embedding.scenarios_of_training import tf_keras_optimizers, trained_by

SCENARIOS = {
    name: function
    for module in (
        scenarios_of_tables,
        scenarios_of_lookups,
        scenarios_of_training,
        scenarios_of_policies,
        scenarios_of_layers,
        scenarios_of_graphs,
        scenarios_of_files,
        scenarios_of_refusals,
    )
    for name, function in inspect.getmembers(module, inspect.isfunction)
    if list(inspect.signature(function).parameters) == ["de", "tf"]
}
SCENARIOS |= {f"trained_by_{name}": partial(trained_by, name) for name in tf_keras_optimizers()}
SCENARIOS |= {f"trained_by_v1_{name}": partial(trained_by_v1, name) for name in V1_OPTIMIZERS}
