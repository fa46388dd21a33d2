"""What a notebook shows of a table."""

from html import escape


def facts_html(caption: str, facts: dict[str, str]) -> str:
    """Returns facts as a table of HTML."""
    cells = "".join(
        f"<tr><th>{escape(name)}</th><td>{escape(text)}</td></tr>" for name, text in facts.items()
    )
    return f"<table><caption>{escape(caption)}</caption>{cells}</table>"
