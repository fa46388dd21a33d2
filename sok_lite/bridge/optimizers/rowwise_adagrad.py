"""Row-wise Adagrad as an optimizer of Keras 3; the engine has the rule."""

import keras


@keras.saving.register_keras_serializable(package="sok_lite")
class RowWiseAdagrad(keras.optimizers.Adagrad):
    """Adagrad with one accumulator per row of a table: half the memory of Adagrad's.

    FBGEMM's and TorchRec's usual optimizer for embeddings. A row's accumulator grows by the mean of
    its squared gradient; with rows of one element it is Adagrad. Dense variables, including tables
    with a fixed number of rows, are updated by Adagrad.

    Args:
      *args, **kwargs: of `keras.optimizers.Adagrad`: `learning_rate`, `initial_accumulator_value`
        and `epsilon` first. FBGEMM starts with an accumulator of 0.
    """
