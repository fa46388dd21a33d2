"""What users of TFRA's dynamic_embedding do, as functions `scenario(de, tf)` that return numbers.

They use the public names of TFRA and TensorFlow only, so the same function runs with TFRA itself,
which tools/record_tfra.py does, and with sok_lite.dynamic_embedding. Results depend on no random
number and on no order of a hash table, and no scenario does what TFRA is known to do wrong.

`SCENARIOS` has all of them by name; each returns a dict of lists of numbers, bools and text.
"""

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

SCENARIOS = {
    scenario.__name__: scenario
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
    for scenario in module.SCENARIOS
}
