"""A lookup and its gradient as TensorFlow sees them, whoever keeps the rows.

In a graph the lookup is one host call, and so is the way back.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import tensorflow as tf

from sok_lite.bridge.graph_gradient import custom_gradient
from sok_lite.bridge.host_call import host_call, refuse_replicas, timed_on_device
from sok_lite.bridge.host_numbers import HostNumbers
from sok_lite.bridge.joined import Numbers, cut, cut_rows, joined_rows, joined_weights, shapes_of
from sok_lite.bridge.lookup_arguments import Argument
from sok_lite.bridge.pooled_host import AT_HAND, PooledHost
from sok_lite.bridge.row_gradient import derived_once
from sok_lite.bridge.tf_private import could_possibly_record
from sok_lite.engine.work_done import GRADIENTS, LOOKUPS


class PooledCall(ABC):
    """One call of `lookup_sparse` for tables of one kind.

    Args:
      host: its host half.
      arguments: of each table.
      inputs, batches: what `joined_inputs` gave of them.
    """

    def __init__(
        self,
        host: PooledHost,
        arguments: Sequence[Argument],
        inputs: Sequence[Any],
        batches: Numbers,
    ) -> None:
        self.host, self.tables = host, host.tables
        self._inputs, self._batches = inputs, batches
        self._weights = [each.weights for each in arguments if each.weights is not None]

    @abstractmethod
    def sources(self) -> list[tf.Tensor]:
        """Returns of each table the tensor by which the gradient of its rows is asked for."""

    def beside(self, sources: Sequence[tf.Tensor]) -> list[tf.Tensor]:
        """Returns what the host is told beside keys and weights."""
        return []

    @abstractmethod
    def by_sources(
        self, lengths: Numbers, row_grads: Sequence[tf.Tensor], more: Sequence[tf.Tensor]
    ) -> list[Any]:
        """Returns the gradient by each source.

        Args:
          lengths: (num_tables,) rows of each.
          row_grads: (n, dim) float32 of each table.
          more: `more_dtypes` of the host.
        """

    @abstractmethod
    def rows_behind(self, number: int, source: tf.Tensor) -> tuple[Any, Callable[[], Any] | None]:
        """Returns what gradients by the weights of a table are made of beside these.

        Returns:
          (what tapes know its rows by; what gives the gradient of no rows, None: zeros).
        """

    def outputs(self) -> list[tf.Tensor]:
        """Looks up. Every rank must call it.

        Returns:
          (batch, dim) of its rows' dtype for each table, with gradients of the sources and the
          weights.
        """
        refuse_replicas(self.host.what)
        outputs = custom_gradient(self._run)(*self.sources(), *self._weights)
        return [
            output if table.dtype is tf.float32 else tf.cast(output, table.dtype)
            for output, table in zip(outputs, self.tables, strict=True)
        ]

    def _run(self, *sources_and_weights: tf.Tensor) -> Any:
        host, tables, num_tables = self.host, self.tables, len(self.tables)
        sources, weights = sources_and_weights[:num_tables], sources_and_weights[num_tables:]
        tensors = [*self._inputs, *joined_weights(weights), *self.beside(sources)]
        backward: Callable[..., Any]
        if tf.executing_eagerly():
            joined, context = timed_on_device(LOOKUPS, host.backend, host.forward, *tensors)
            backward, carried = partial(host.backward, context), []
        else:
            joined, *packed = host_call(
                host.forward_packed,
                [HostNumbers(tensors[0]), *tensors[1:]],
                [tf.float32, *host.context_dtypes],
                host.backend,
                host.what,
                collective=host.collective,
                work=LOOKUPS,
            )
            packed[0].set_shape([None])
            # An eager one would belong to no graph.
            at_hand = [tf.convert_to_tensor(tensor) for tensor in tensors[AT_HAND]]
            backward, carried = host.backward_packed, [*packed, *at_hand]
        outputs = cut_rows(joined, self._batches, [table.dim for table in tables])
        if not tf.executing_eagerly():
            for table, output in zip(tables, outputs, strict=True):
                output.set_shape([table.batch, table.dim])

        def grad(*out_grads: tf.Tensor) -> Any:
            dense = [tf.cast(tf.convert_to_tensor(grads), tf.float32) for grads in out_grads]
            lengths, gradients, more = self._gradients(backward, carried, dense, weights)
            if not tf.executing_eagerly() or could_possibly_record():
                gradients = self._derived_once(gradients, dense, weights, sources)
            for weight, weight_grad in zip(weights, gradients[num_tables:], strict=True):
                weight_grad.set_shape(weight.shape)
            by_sources = self.by_sources(lengths, gradients[:num_tables], more)
            return (*by_sources, *gradients[num_tables:])

        return tuple(outputs), grad

    def _gradients(
        self,
        backward: Callable[..., list[Any]],
        carried: Sequence[tf.Tensor],
        out_grads: Sequence[tf.Tensor],
        weights: Sequence[tf.Tensor],
    ) -> tuple[Any, list[tf.Tensor], list[tf.Tensor]]:
        """Calls the way back of a lookup, now or in the graph.

        Args:
          backward: `PooledHost.backward` of its context, or `backward_packed`.
          carried: in a graph the packed context and what `AT_HAND` names; empty in eager mode.
          out_grads: (batch, dim) float32 of each table.

        Returns:
          (rows of each table; row gradients of each table, then the weights' gradients;
          `more_dtypes` of the host).
        """
        host, tables = self.host, self.tables
        inputs, dtypes = joined_rows(out_grads, host.backend), [tf.int64, tf.float32]
        if weights:
            inputs, dtypes = [*inputs, *joined_weights(weights)], [*dtypes, tf.float32]
        num_joined = len(dtypes)
        results = host_call(
            backward,
            [*carried, *inputs],
            [*dtypes, *host.more_dtypes],
            host.backend,
            f"The gradient of {host.what}",
            collective=host.collective,
            work=GRADIENTS,
            counts=len(tables),
        )
        lengths = results[0]
        if not tf.executing_eagerly():
            lengths.set_shape([len(tables)])
        gradients = cut_rows(results[1], lengths, [table.dim for table in tables])
        if weights:
            gradients += cut(results[2], shapes_of(weights), len(weights))
        return lengths, gradients, results[num_joined:]

    def _derived_once(
        self,
        gradients: Sequence[tf.Tensor],
        out_grads: Sequence[tf.Tensor],
        weights: Sequence[tf.Tensor],
        sources: Sequence[tf.Tensor],
    ) -> list[tf.Tensor]:
        """Returns gradients such that their derivative raises, for there is no second one."""
        inputs: list[Any] = [*out_grads, *weights]
        zeros_of = {}
        for i, (table, source) in enumerate(zip(self.tables, sources, strict=True)):
            if table.has_weights:
                rows, zeros = self.rows_behind(i, source)
                if zeros is not None:
                    zeros_of[len(inputs)] = zeros
                inputs.append(rows)
        return derived_once(self.host.what, gradients, inputs, zeros_of)
