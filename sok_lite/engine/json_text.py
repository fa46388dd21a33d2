"""JSON from files, which anybody may have written."""

import json
from typing import Any


def parsed(text: str | bytes, whose: str | None = None, **options: Any) -> Any:
    """Parses JSON.

    Args:
      whose: what is corrupt if it is no JSON, for the error; None: the error has only the reason.
      options: of `json.loads`.

    Raises:
      ValueError: it is no JSON, or nested too deeply.
    """
    try:
        return json.loads(text, **options)
    except (RecursionError, ValueError) as error:
        reason = "it is nested too deeply" if isinstance(error, RecursionError) else str(error)
        if whose is not None:
            reason = f"What was saved of {whose} is corrupt: it is no JSON ({reason})."
        raise ValueError(reason) from error
