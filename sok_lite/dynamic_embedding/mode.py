"""Whether lookups are for training or for inference."""


class ModelMode:
    """The mode of the process, and the names of both.

    Attributes:
      CURRENT_SETTING: the mode that holds.
    """

    TRAIN = "train"
    INFERENCE = "inference"
    CURRENT_SETTING = TRAIN


def enable_train_mode() -> None:
    """Has lookups be differentiable, as they are to begin with.

    What holds is the mode when a lookup is called: a tf.function keeps that of its tracing.
    """
    ModelMode.CURRENT_SETTING = ModelMode.TRAIN


def enable_inference_mode() -> None:
    """Has lookups read rows alone, without a gradient.

    What holds is the mode when a lookup is called: a tf.function keeps that of its tracing.
    """
    ModelMode.CURRENT_SETTING = ModelMode.INFERENCE


def get_model_mode() -> str:
    """Returns "train" or "inference"."""
    return ModelMode.CURRENT_SETTING
