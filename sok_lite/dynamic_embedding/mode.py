"""Whether lookups are for training or for inference."""


class ModelMode:
    """The mode of the process, and the names of both modes.

    Attributes:
      CURRENT_SETTING: the current mode.
    """

    TRAIN = "train"
    INFERENCE = "inference"
    CURRENT_SETTING = TRAIN


def enable_train_mode() -> None:
    """Makes lookups differentiable, which is the default.

    A lookup uses the mode at its call: a tf.function keeps that of its tracing.
    """
    ModelMode.CURRENT_SETTING = ModelMode.TRAIN


def enable_inference_mode() -> None:
    """Makes lookups only read rows, without a gradient.

    A lookup uses the mode at its call: a tf.function keeps that of its tracing.
    """
    ModelMode.CURRENT_SETTING = ModelMode.INFERENCE


def get_model_mode() -> str:
    """Returns "train" or "inference"."""
    return ModelMode.CURRENT_SETTING
