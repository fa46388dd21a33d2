"""Every formula that a rule has, and a table to apply it to."""

import types

import numpy as np

from sok_lite.engine.dtypes import bfloat16_to_float32, row_dtype
from sok_lite.engine.optimizers import (
    SGD,
    Adadelta,
    Adagrad,
    AdagradDA,
    Adam,
    Adamax,
    AdamW,
    Ftrl,
    GroupAdam,
    GroupAMSGrad,
    GroupLamb,
    GroupMomentum,
    Lion,
    Momentum,
    Nadam,
    ProximalAdagrad,
    ProximalSGD,
    RectifiedAdam,
    RMSprop,
    RowWiseAdagrad,
    ScheduleFreeAdamW,
    SparseGroupFtrl,
)
from sok_lite.engine.rows.store import RowStore

VARIANTS = [
    SGD(),
    SGD(weight_decay=0.1),
    Momentum(),
    Momentum(nesterov=True),
    Momentum(momentum=0.5, lr_in_state=False),
    Momentum(nesterov=True, lr_in_state=False, weight_decay=0.01),
    Adagrad(),
    Adagrad(epsilon=1e-3, epsilon_inside_root=False, initial_accumulator=0.5),
    Adagrad(epsilon=0.0, weight_decay=0.01),
    RowWiseAdagrad(),
    RowWiseAdagrad(epsilon=1e-3, epsilon_inside_root=False, weight_decay=0.1),
    Adam(),
    Adam(beta_1=0.5, beta_2=0.9, epsilon=1e-3),
    Adam(amsgrad=True),
    Adam(adaptive_epsilon=True, epsilon=1e-2, weight_decay=0.2),
    Adam(has_products=True),
    Adam(beta_1=0.0),
    Adam(beta_1=0.0, has_m=False),
    Adam(beta_1=0.0, has_m=False, adaptive_epsilon=True, weight_decay=0.1),
    AdamW(),
    AdamW(amsgrad=True, weight_decay=0.3),
    RMSprop(),
    RMSprop(momentum=0.9),
    RMSprop(centered=True),
    RMSprop(centered=True, momentum=0.7, rho=0.8, weight_decay=0.1),
    RMSprop(epsilon=1e-3, epsilon_inside_root=False),
    RMSprop(epsilon=1e-3, epsilon_inside_root=False, centered=True),
    RMSprop(epsilon=1e-3, epsilon_inside_root=False, momentum=0.5),
    RMSprop(epsilon=1e-10, initial_rms=1.0, momentum=0.9, centered=True),
    Ftrl(),
    Ftrl(l1=0.05, l2=0.1, l2_shrinkage=0.01, beta=0.2),
    Ftrl(learning_rate_power=-0.7, l1=0.01, weight_decay=0.1),
    Ftrl(learning_rate_power=0.0, initial_accumulator=0.0, l2=1.0),
    Adamax(),
    Adamax(beta_1=0.5, beta_2=0.9, epsilon=1e-3, weight_decay=0.1),
    Adadelta(),
    Adadelta(rho=0.5, epsilon=1e-3, weight_decay=0.1),
    Nadam(),
    Nadam(beta_1=0.5, beta_2=0.9, epsilon=1e-3, schedule_decay=0.004, weight_decay=0.1),
    Lion(),
    Lion(beta_1=0.5, beta_2=0.7, weight_decay=0.1),
    ProximalSGD(),
    ProximalSGD(l1=0.5, l2=0.3),
    ProximalAdagrad(),
    ProximalAdagrad(l1=0.5, l2=0.3, initial_accumulator=0.5, weight_decay=0.1),
    AdagradDA(),
    AdagradDA(l1=0.3, l2=0.2, global_step=3.0, initial_accumulator=0.5),
    ScheduleFreeAdamW(),
    ScheduleFreeAdamW(beta_1=0.5, beta_2=0.9, epsilon=1e-3, warmup_steps=3, weight_decay=0.1),
    GroupAdam(),
    GroupAdam(beta_1=0.5, beta_2=0.9, epsilon=1e-3, weight_decay=0.1),
    GroupAdam(l1=0.05, l2=0.1, l21=0.3),
    GroupAMSGrad(),
    GroupAMSGrad(l1=0.1, l2=0.05, l21=0.2, weight_decay=0.1),
    GroupMomentum(),
    GroupMomentum(nesterov=True, weight_decay=0.1),
    GroupMomentum(momentum=0.5, l1=0.2, l2=0.1, l21=0.7),
    SparseGroupFtrl(),
    SparseGroupFtrl(l1=0.05, l2=0.1, l21=0.8, l2_shrinkage=0.01, beta=0.2),
    SparseGroupFtrl(learning_rate_power=-0.7, l1=0.01, l21=0.3, weight_decay=0.1),
    SparseGroupFtrl(initial_accumulator=0.0, l21=0.5),
    GroupLamb(),
    GroupLamb(epsilon=1e-3, l1=0.03, l2=0.1, l21=0.1, weight_decay=0.1),
    # The 5 steps of the tests leave v out in all, or in all but the last.
    RectifiedAdam(),
    RectifiedAdam(sma_threshold=4.0, beta_1=0.5, beta_2=0.9, epsilon=1e-3, weight_decay=0.1),
    RectifiedAdam(sma_threshold=4.0, beta_2=0.8, amsgrad=True, nesterov=True),
    RectifiedAdam(sma_threshold=4.0, beta_2=0.9, amsgrad=True),
    RectifiedAdam(sma_threshold=4.0, beta_2=0.9, nesterov=True, weight_decay=0.1),
]


def new_table(backend, values, dtype="float32"):
    """A table of rows without an index, and the numbers of its rows, which span several chunks."""
    store = RowStore(backend, values.shape[1], row_dtype(dtype))
    rows = store.allocate(len(values))
    store.write(rows, store.to_storage(backend.from_host(values)))
    return types.SimpleNamespace(backend=backend, store=store), backend.to_host(rows)


def read(table, rows, column="value"):
    stored = table.store.read(table.backend.from_host(rows), column)
    if column == "value" and table.store.row_dtype.name == "bfloat16":
        stored = bfloat16_to_float32(table.backend.xp, stored)
    return table.backend.to_host(stored).astype(np.float32)
