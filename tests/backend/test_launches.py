"""Launches of several lists: which become one, and in which order they are made."""

from functools import partial

import pytest

from sok_lite.backend.base import LaunchArgs
from sok_lite.backend.launches import Launch, launch_all


class Recorder:
    """A backend that notes what is launched and when."""

    def __init__(self, refused=""):
        self.done, self.refused = [], refused

    def packed(self, kernel, parts):
        if kernel == self.refused:
            raise TypeError("arguments")
        return [partial(self.done.append, " ".join([kernel, *(part.arguments for part in parts)]))]

    def list(self, text):
        """Launches "a1 b2": kernel a with part 1, and so on; "a-" is one of no items."""
        return [
            Launch(self, word[0], LaunchArgs(word[1] != "-", word[1:])) for word in text.split()
        ]


@pytest.mark.parametrize(
    ("lists", "expected"),
    [
        (["a1 b1", "a2 b2"], ["a 1 2", "b 1 2"]),
        # b waits for the list that comes to it later.
        (["a1 b1", "c2 b2"], ["a 1", "c 2", "b 1 2"]),
        (["b1", "c2 b2", "c3 d3 b3"], ["c 2 3", "d 3", "b 1 2 3"]),
        # Each other's later kernel: none can wait.
        (["a1 b1", "b2 a2"], ["a 1", "b 1 2", "a 2"]),
        (["a1 a2", "a3"], ["a 1 3", "a 2"]),
        (["a- b1", "b2 a-"], ["b 1 2"]),
        ([], []),
        (["", "a-"], []),
    ],
)
def test_launches_of_one_kernel_are_one_and_each_list_keeps_its_order(lists, expected):
    recorder = Recorder()
    launch_all(*(recorder.list(text) for text in lists))
    assert recorder.done == expected


def test_a_launch_that_cannot_be_packed_leaves_everything_undone():
    recorder = Recorder(refused="b")
    with pytest.raises(TypeError, match="arguments"):
        launch_all(recorder.list("a1 b1"))
    assert recorder.done == []


def test_launches_of_two_backends_are_two():
    first, other = Recorder(), Recorder()
    launch_all(first.list("a1 b1"), other.list("a2 b2"))
    assert (first.done, other.done) == (["a 1", "b 1"], ["a 2", "b 2"])
