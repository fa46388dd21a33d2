"""Rejects TensorFlow clusters, in which each task would train tables of its own.

TF_CONFIG, flags or a resolver can set up a cluster. All of them connect TensorFlow to it or run a
session in it, so these two are checked.
"""

import re
import weakref
from collections.abc import Iterable
from typing import Any

import tensorflow as tf

from sok_lite.bridge.keras import hooks
from sok_lite.bridge.tf_private import CLUSTER_OF_CONTEXT, context

# Sessions already checked.
_looked: weakref.WeakSet[Any] = weakref.WeakSet()


def refuse_clusters() -> None:
    """Raises NotImplementedError in a cluster, and checks TF1 sessions from now on."""
    for name in CLUSTER_OF_CONTEXT:
        server = getattr(context(), name, None)
        if server is not None:
            jobs = server.cluster.job
            _refuse(f"/job:{job.name}/task:{task}" for job in jobs for task in job.tasks)
    hooks.around(tf.compat.v1.Session, "run", _check_session)


def _check_session(call: Any, self: Any, /, *args: Any, **kwargs: Any) -> Any:
    # A session without a target is in this process.
    if self.sess_str and self not in _looked:
        devices = " ".join(device.name for device in self.list_devices())
        _refuse(
            f"/job:{job}/task:{task}"
            for job, task in re.findall(r"/job:([^/]+)/(?:replica:\d+/)?task:(\d+)", devices)
        )
        _looked.add(self)
    return call(self, *args, **kwargs)


def _refuse(tasks: Iterable[str]) -> None:
    found = sorted(set(tasks))
    if len(found) > 1 or any(task.startswith("/job:ps/") for task in found):
        raise NotImplementedError(
            "Tables do not work in a cluster of TensorFlow's own: they are on no parameter server, "
            "and each worker would train tables of its own on its part of the data alone. "
            f"Received: the tasks {', '.join(found)}. Start the workers as ranks instead, with "
            "`horovodrun -np N` and sok_lite.init(): ranks share their tables."
        )
