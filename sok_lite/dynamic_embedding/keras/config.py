"""Arguments of layers as a config has them, which Keras writes as JSON, and back.

Functions and initializers stand in a config as they are: Keras writes those that are its own or
that the program has registered.
"""

from typing import Any

from sok_lite.dynamic_embedding import creators, restrict_policies

_POLICIES = ("FrequencyRestrictPolicy", "TimestampRestrictPolicy")
_CREATORS = ("CuckooHashTableCreator", "HkvHashTableCreator")


def policy_config(policy: Any) -> Any:
    """Returns the name of a restrict policy of this package; another one as it is."""
    name = getattr(policy, "__name__", None)
    return name if name in _POLICIES and getattr(restrict_policies, name) is policy else policy


def policy_of(config: Any) -> Any:
    """Returns the argument of `policy_config`."""
    return getattr(restrict_policies, config) if config in _POLICIES else config


def creator_config(creator: Any) -> Any:
    """Returns the kind and the settings of a creator of this package; another one as it is."""
    name = type(creator).__name__
    if name not in _CREATORS or type(creator) is not getattr(creators, name) or creator.saver:
        return creator
    settings = dict(vars(creator.config)) if creator.config is not None else None
    if settings and "evict_strategy" in settings:
        settings["evict_strategy"] = int(settings["evict_strategy"])
    return {"creator": name, "settings": settings}


def creator_of(config: Any) -> Any:
    """Returns the argument of `creator_config`."""
    if not isinstance(config, dict) or "creator" not in config:
        return config
    settings = config["settings"]
    is_hkv = config["creator"] == "HkvHashTableCreator"
    made = creators.HkvHashTableConfig(**settings) if is_hkv and settings is not None else None
    return getattr(creators, config["creator"])(made)


def as_integer(name: str, value: Any) -> int:
    """Returns a size as an int.

    Raises:
      TypeError: it is none. ValueError: it is below 1.
    """
    try:
        number = int(value)
    except (TypeError, ValueError) as error:
        raise TypeError(f"`{name}` must be an integer. Received: {name}={value!r}.") from error
    if number < 1:
        raise ValueError(f"`{name}` must be at least 1. Received: {name}={number}.")
    return number
