"""Of many combinations of parameters those that have between them every pair of values."""

from collections.abc import Hashable, Mapping, Sequence
from itertools import combinations


def covering(variants: Sequence[Mapping[str, Hashable]]) -> list[int]:
    """Returns the places of variants that hold every pair of values which any of them holds.

    Pairwise testing: most faults depend on one parameter or on two (Kuhn, Wallace and Gallo, IEEE
    Transactions on Software Engineering 30(6), 2004). Greedy: the variant with the most pairs that
    are not held yet comes next, the first of equal ones. So the choice repeats.

    Args:
      variants: each the value of every parameter by its name.
    """
    # A value alone counts as well, where there is only one parameter.
    held = [sorted(variant.items()) for variant in variants]
    pairs = [{*combinations(values, 1), *combinations(values, 2)} for values in held]
    missing, chosen = set().union(*pairs), []
    while missing:
        best = max(range(len(pairs)), key=lambda place: len(pairs[place] & missing))
        missing -= pairs[best]
        chosen.append(best)
    return sorted(chosen)
