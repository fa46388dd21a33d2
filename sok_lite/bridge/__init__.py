"""All that knows TensorFlow and no API of ours: tables as variables, lookups, gradients, steps.

Imports nothing by itself. docs/design.md has the order in which modules build on each other.
"""
