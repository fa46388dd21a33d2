"""What maintainers run: `python -m tools.NAME`, from the root of a checkout."""
