"""What a `train_step` of a program's own does before its optimizers take their steps."""

import tensorflow as tf


def loss_and_pairs(model, data):
    """Returns the mean squared error of a batch, and each gradient with its variable."""
    x, y = data
    with tf.GradientTape() as tape:
        loss = tf.reduce_mean((model(x, training=True) - y) ** 2)
    variables = model.trainable_variables
    return loss, list(zip(tape.gradient(loss, variables), variables, strict=True))
