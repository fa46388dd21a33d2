"""What a callback does, as a class of each Keras."""

from types import new_class
from typing import Any


def callback_class(name: str, part: type, package: Any) -> Any:
    """Returns a part as a callback of a Keras."""

    def fill(namespace: dict[str, Any]) -> None:
        namespace |= {"__module__": part.__module__, "__doc__": part.__doc__}

    return new_class(name, (part, package.callbacks.Callback), {}, fill)
