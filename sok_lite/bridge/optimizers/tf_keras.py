"""The optimizers of tf_keras that are not its legacy ones."""

from dataclasses import replace

from sok_lite.bridge.optimizers.keras3 import KERAS3

TF_KERAS = replace(KERAS3, name="tf_keras")
