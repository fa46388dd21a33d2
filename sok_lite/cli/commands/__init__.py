"""The commands: one module each, with `HELP`, `EXAMPLES`, `add_arguments` and `run`."""
