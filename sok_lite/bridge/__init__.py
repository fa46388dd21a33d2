"""The TensorFlow layer below the APIs: variables, lookups, gradients, optimizer steps, files.

This package imports no module of its own. tests/test_layers.py forbids import cycles.
"""
