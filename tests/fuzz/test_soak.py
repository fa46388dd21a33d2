"""A soak comes out as it was kept, with kills and without."""

import json
import sys
from pathlib import Path

import pytest

from sok_lite.comm import launched_ranks
from tests.fuzz.soak import first_difference, soak

RECORDS = Path(__file__).parent / "soaks"
ROUNDS = 2

pytestmark = [
    pytest.mark.skipif(launched_ranks() > 1, reason="a rank does not launch ranks"),
    pytest.mark.skipif(sys.platform != "linux", reason="kills processes as Linux does"),
    pytest.mark.full_only("starts jobs of ranks: 40 s"),
]


# In round 1 of seed 18 rank 1 is killed in the middle of a step.
@pytest.mark.parametrize(("seed", "has_kills", "jobs"), [(18, True, 2), (8, False, 1)])
def test_the_first_rounds_of_a_record_come_out_again(seed, has_kills, jobs):
    """All rounds of a record: `python -m tests.fuzz.soak --check`, five minutes."""
    said = []
    by_round, num_jobs = soak(seed, ROUNDS, has_kills, said.append)
    assert num_jobs == jobs and len(by_round) == ROUNDS
    assert any("killed rank 1 at step" in line for line in said) == (jobs == 2), said
    kept = json.loads((RECORDS / f"{seed}.json").read_text())["by_round"]
    assert first_difference(kept, by_round) is None
