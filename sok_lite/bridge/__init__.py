"""All that knows TensorFlow and no API of ours: tables as variables, lookups, gradients, steps.

Imports nothing by itself. No modules import each other in a circle: tests/test_layers.py looks.
"""
