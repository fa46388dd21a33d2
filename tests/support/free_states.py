"""Free states of a row store, by their names."""


def ensure_state(store, name, initial, dim=None):
    """Returns a free float32 state column of this name; it is made if there is none.

    Args:
      initial: the value of every element before the first update.
      dim: elements of a row; None: as many as a value row.
    """
    column = store.state_groups.get(None, {}).get(name)
    if column is None:
        (column,) = store.add_states({name: (store.dim if dim is None else dim, initial)}, None)
    return column
