"""Scenarios of restrict policies: what is left of a table, of its slots and of the policy's own."""

from tests.dynamic_embedding.scenario_values import contents
from tests.dynamic_embedding.scenarios_of_training import (
    slot_rows,
    tf_keras_optimizers,
    train,
)

# Key k is in k of them: a batch counts once, however often it has a key.
BATCHES = [[1, 2, 1, 3, 4], [2, 3, 4, 4], [3, 3, 4], [4]]


def trained_table(de, tf, name, **options):
    """Returns a table that has been trained with `BATCHES`, and the optimizer."""
    table = de.get_variable(name, dim=2, initializer=0.5, **options)
    optimizer = de.DynamicEmbeddingOptimizer(tf_keras_optimizers()["adam"]())
    train(de, tf, table, optimizer, BATCHES)
    return table, optimizer


def restrict_by_frequency(de, tf):
    """The most frequent keys stay, in the table, its slots and the policy's status."""
    table, optimizer = trained_table(
        de, tf, "restrict_by_frequency", restrict_policy=de.FrequencyRestrictPolicy
    )
    answers = {"status": contents(tf, table.restrict_policy.status)}
    table.restrict(2, trigger=4)
    answers["not yet"] = int(table.size())
    table.restrict(3, trigger=3)
    answers["three"] = contents(tf, table)
    answers["slots"] = slot_rows(tf, table, optimizer, [2, 3, 4])
    answers["sizes of slots"] = [int(s.size()) for s in table.get_slot_variables(optimizer)]
    answers["status of three"] = contents(tf, table.restrict_policy.status)
    table.restrict(1)
    answers["one"] = contents(tf, table)
    return answers


def restrict_by_frequency_in_shards(de, tf):
    """Each shard keeps its part of what is reserved."""
    table, _ = trained_table(
        de,
        tf,
        "restrict_by_frequency_in_shards",
        restrict_policy=de.FrequencyRestrictPolicy,
        devices=["/CPU:0"] * 2,
    )
    table.restrict(2, trigger=3)
    return {"sizes": [int(table.size(index)) for index in range(2)], "left": contents(tf, table)}


def restrict_by_timestamp(de, tf):
    """As many of the newest keys stay as are reserved."""
    table, _ = trained_table(
        de, tf, "restrict_by_timestamp", restrict_policy=de.TimestampRestrictPolicy
    )
    status = table.restrict_policy.status
    answers = {"sizes": [int(table.size()), int(status.size())]}
    table.restrict(2, trigger=4)
    answers["not yet"] = int(table.size())
    table.restrict(2)
    answers["two"] = [int(table.size()), int(status.size())]
    return answers


def restrict_spares_upserted_keys(de, tf):
    """A key that was never trained has no status: it counts for the trigger and is not removed."""
    table, _ = trained_table(
        de, tf, "restrict_spares_upserted_keys", restrict_policy=de.FrequencyRestrictPolicy
    )
    table.upsert(tf.constant([50], tf.int64), tf.constant([[1.0, 2.0]]))
    table.restrict(1, trigger=4)
    return contents(tf, table)
