"""The config of a table that several layers of a model share: it has a number there."""

from typing import Any

from sok_lite.bridge.keras.classes import made_so_far, object_of, says_what_is_shared
from sok_lite.bridge.keras.hooks import is_cloning

# In a config: the number, in its process, of a table that several layers share.
_SHARED = "shared"


def shared_config(config: dict[str, Any], name: str, number: int) -> dict[str, Any]:
    """Returns the config of a table that several layers share.

    Args:
      config: of the table alone.
      name: of the table.
      number: of the table, in this process.

    Raises:
      NotImplementedError: `clone_model` asks, which does not say that the table is one.
    """
    if is_cloning():
        raise NotImplementedError(
            f"clone_model() does not know that several layers share table {name!r}: "
            "it would give each a table of its own. Use "
            "type(model).from_config(model.get_config()), which keeps it shared."
        )
    # Keras itself, where it says so, says it not of models within a model.
    return {**config, _SHARED: number}


def table_of(cls: Any, config: dict[str, Any]) -> Any:
    """Returns a table of a config; of one that is shared, the one that was made of it before.

    Args:
      cls: the class of tables of a Keras.
      config: of `get_config`.

    Raises:
      NotImplementedError: several layers share it, and none but this one is being made.
    """
    config, made = dict(config), made_so_far()
    config.pop("filter_ratio", None)  # tables of before took it, and nothing came of it
    number = config.pop(_SHARED, None)
    # Keras that is loading may know itself what it has made.
    if number is None or (made is None and says_what_is_shared(cls.package)):
        return _made(cls, config)
    if made is None:
        raise NotImplementedError(
            f"Several layers share table {config['name']!r}, and one of them cannot be made of "
            "its config alone. Make the whole model, by type(model).from_config(config) or "
            "model_from_json, or give the layers that you make the same Table."
        )
    if number not in made:
        made[number] = _made(cls, config)
    return made[number]


def _made(cls: Any, config: dict[str, Any]) -> Any:
    return cls(**{**config, "initializer": object_of(config["initializer"], cls.package)})
