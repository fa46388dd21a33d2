"""Numbers of tables for Prometheus and what else reads OpenMetrics."""

from collections.abc import Iterable, Iterator, Mapping
from functools import partial
from http.server import ThreadingHTTPServer
from time import perf_counter
from typing import Any, TypeVar

from sok_lite.engine.dtypes import check_integer
from sok_lite.engine.work_counters import INPUT_WAITS
from sok_lite.reports.openmetrics import CONTENT_TYPE, prometheus_of_served, served_in
from sok_lite.reports.server import serve_text

__all__ = ["CONTENT_TYPE", "prometheus", "serve", "timed_input"]

T = TypeVar("T")


def prometheus(tables: Any, labels: Mapping[str, str] | None = None) -> str:
    """Returns the numbers of tables on this rank as OpenMetrics text.

    It does not communicate: each rank has its own numbers, with its number as the label "rank". It
    reads the index of each table, not its rows, so it may be called every few seconds, from any
    thread. What calls took, what this rank has sent to others, and its dumps are those of all
    tables of the process. `CONTENT_TYPE` is the media type of the text. No key is in it. Of a table
    in Redis rank 0 tells the number of keys.

    Of what `open_readonly` gave these are the keys, and `sok_served_age_seconds`: the seconds since
    the checkpoint that is open was published. That needs neither TensorFlow nor `init`.

    Args:
      tables: a variable of a table, a layer or model of Keras that has some, or a list, tuple or
        dict of such; or what `open_readonly` gave, or a list of that.
      labels: more labels of all numbers, such as {"job_name": "ctr"}, to tell jobs apart. Not
        "job" or "instance", which Prometheus sets, nor those that the numbers have.

    Raises:
      TypeError: there are no tables in `tables`, or a label is no text. ValueError: two tables have
        one name, or a label has a name that it cannot have.
      RuntimeError: in a tf.function, or `sok_lite.init` has not connected the ranks.
    """
    served = served_in(tables)
    if served:
        return prometheus_of_served(served, labels)
    from sok_lite.bridge import report  # which imports TensorFlow

    return report.prometheus(tables, labels)


def timed_input(batches: Iterable[T]) -> Iterator[T]:
    """Yields batches, and counts them and the time that each takes to come.

    For a training loop of the program's own: `prometheus` then has what it waits for its input. Of
    `fit` it has that by itself, where `prometheus` or `serve` was called before it.

    Args:
      batches: a tf.data.Dataset, or anything that can be iterated over.
    """
    iterator, none = iter(batches), object()
    while True:
        begun = perf_counter()
        batch: Any = next(iterator, none)
        if batch is none:
            return
        INPUT_WAITS.add(perf_counter() - begun)
        yield batch


def serve(
    tables: Any, port: int = 9400, host: str = "", labels: Mapping[str, str] | None = None
) -> ThreadingHTTPServer:
    """Serves the numbers of `prometheus` over HTTP, from threads that end with the process.

    Each rank that calls it has a port of its own: `port`, and its number on this host. Where that
    one is taken, as by another job on the host or an earlier call, it takes the next free one of
    100, and the logger "sok_lite" warns which. It does not communicate. Whoever reaches the port
    can read the numbers.

    Args:
      tables, labels: as of `prometheus`.
      port: that of the first rank of each host. 0: any that is free.
      host: the address to listen at, such as "127.0.0.1"; "": all of this host.

    Returns:
      The server: `server_port` is its port; `shutdown()` and `server_close()` end it.

    Raises:
      TypeError, ValueError, RuntimeError: as `prometheus`; or `port` is none.
      OSError: none of these ports is free, or the address cannot be listened at.
    """
    check_integer("port", port, 0)
    if port > 65_535:
        raise ValueError(f"`port` must be at most 65,535. Received: port={port}.")
    served = served_in(tables)
    if served:
        text = partial(prometheus_of_served, served, labels)
        text()  # raises here what is wrong with the arguments
        return serve_text(text, host, port, "The process that serves tables")
    from sok_lite.bridge import report  # which imports TensorFlow

    return report.serve(tables, port, host, labels)
