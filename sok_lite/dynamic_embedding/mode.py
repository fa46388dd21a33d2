"""Whether lookups are for training or for inference; read when they are called or traced."""


class ModelMode:
    """The mode of the process, `CURRENT_SETTING`, and the names of both modes."""

    TRAIN = "train"
    INFERENCE = "inference"
    CURRENT_SETTING = TRAIN


def enable_train_mode() -> None:
    """Makes lookups differentiable, which is the default. A tf.function keeps the mode of its
    tracing.
    """
    ModelMode.CURRENT_SETTING = ModelMode.TRAIN


def enable_inference_mode() -> None:
    """Makes lookups only read rows, without a gradient. A tf.function keeps the mode of its
    tracing.
    """
    ModelMode.CURRENT_SETTING = ModelMode.INFERENCE


def get_model_mode() -> str:
    """Returns "train" or "inference"."""
    return ModelMode.CURRENT_SETTING
