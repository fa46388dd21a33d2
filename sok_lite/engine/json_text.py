"""JSON that somebody else may have written."""

import json
from typing import Any


def parsed(text: str | bytes, whose: str | None = None, **options: Any) -> Any:
    """Returns what a text of JSON says.

    Args:
      text: the text.
      whose: names it in the error; None: the caller does.
      options: of `json.loads`.

    Raises:
      ValueError: it is none, or nested too deeply.
    """
    try:
        return json.loads(text, **options)
    except (RecursionError, ValueError) as error:
        reason = "it is nested too deeply" if isinstance(error, RecursionError) else str(error)
        if whose is not None:
            reason = f"What was saved of {whose} is corrupt: it is no JSON ({reason})."
        raise ValueError(reason) from error
