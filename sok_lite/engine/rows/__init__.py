"""The rows of a table and their optimizer states, by row number."""
