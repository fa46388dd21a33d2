"""A soak comes out as it was kept, with kills and without, and says what differs and since when."""

import hashlib
import itertools
import json
import sys
from pathlib import Path

import numpy as np
import pytest

from sok_lite.comm import launched_ranks
from tests.fuzz import soak_plan as plan
from tests.fuzz.soak import Soak, SoakError, launcher, soak
from tests.fuzz.soak_record import digests_of, first_difference, record_of, text_of

SEEDS = {int(path.stem) for path in (Path(__file__).parent / "soaks").glob("*.json")}
SEED = 18  # of a kept record: rank 1 is killed in the middle of a step of round 1
ROUNDS = 2
# Of what the plan makes of that seed; see test_the_plan_of_a_seed_stays_what_it_was.
PLAN = "f3764d9eddfc3b18fadf50be587d75795b109a84ca64530f1c3a7a786abbea39"

pytestmark = [
    pytest.mark.skipif(launched_ranks() > 1, reason="a rank does not launch ranks"),
    pytest.mark.skipif(sys.platform != "linux", reason="kills processes as Linux does"),
]
needs_ranks = pytest.mark.skipif(launcher() is None, reason="no horovodrun to launch ranks")


def record_of_seed(seed):
    return json.loads((Path(__file__).parent / "soaks" / f"{seed}.json").read_text())


# ---------------------------------------------------------------- over real ranks


@pytest.fixture(scope="module")
def killed():
    """The first rounds of a record with its kills: what was said, the digests of each round."""
    said = []
    by_round, num_jobs = soak(SEED, ROUNDS, say=said.append)
    return said, by_round, num_jobs


@pytest.mark.full_only("starts two jobs of ranks: 40 s")
@needs_ranks
def test_the_first_rounds_of_a_record_come_out_again(killed):
    said, by_round, num_jobs = killed
    assert any("killed rank 1 at step" in line for line in said), said
    assert num_jobs == 2 and len(by_round) == ROUNDS
    assert first_difference(record_of_seed(SEED), by_round) is None


@needs_ranks
@pytest.mark.full_only("starts three jobs of ranks")
def test_the_digests_are_those_of_a_soak_without_kills(killed):
    by_round, num_jobs = soak(SEED, ROUNDS, kills="none")
    assert num_jobs == 1
    assert by_round == killed[1]


@needs_ranks
@pytest.mark.full_only("half a minute")
def test_the_beginning_of_another_record_comes_out_again():
    """All of all records: `python -m tests.fuzz.soak --check`, a quarter of an hour."""
    seed = min(SEEDS - {SEED})
    by_round, _ = soak(seed, ROUNDS)
    assert first_difference(record_of_seed(seed), by_round) is None


# ---------------------------------------------------------------- the plan


def test_the_plan_of_a_seed_stays_what_it_was():
    """A difference here is one of the soak itself: not one of sok_lite."""
    digest = hashlib.sha256()
    for place in itertools.islice(plan.rounds_of(SEED), 20):
        digest.update(repr(tuple(place)).encode())
    for step, rank in itertools.product(range(20), range(plan.RANKS)):
        digest.update(repr(plan.is_eager(SEED, step)).encode())
        for feature in (*plan.FEATURES, plan.FILTERED):
            for array in plan.batch_of(SEED, step, rank, feature):
                digest.update(b"none" if array is None else array.dtype.str.encode())
                digest.update(b"" if array is None else array.tobytes())
    assert digest.hexdigest() == PLAN


def test_batches_are_of_the_types_of_their_tables_and_some_are_empty():
    batches = {
        feature.name: [plan.batch_of(SEED, step, 0, feature) for step in range(60)]
        for feature in (*plan.FEATURES, plan.FILTERED)
    }
    for feature in plan.FEATURES:
        for batch in batches[feature.name]:
            assert batch.ids.dtype == plan.KEY_TYPES.get(feature.table, np.int64)
            assert len(batch.splits) - 1 == len(batch.slopes)
            # What TensorFlow makes of it has no rounding: all are multiples of 1/64.
            assert (batch.slopes * 64 == np.round(batch.slopes * 64)).all()
    sizes = {len(batch.slopes) for batch in batches["user"]}
    assert 0 in sizes and len(sizes) > 10
    assert max(batch.ids.max(initial=0) for batch in batches["city"]) < plan.NUM_CITIES


def test_a_count_of_steps_says_where_a_dump_was_made():
    places = list(itertools.islice(plan.rounds_of(SEED), 50))
    counts = [count for place in places for count in (place.middle, place.end)]
    assert counts == sorted(set(counts)) and counts[0] > 0
    assert [place.end for place in places[:-1]] == [place.first for place in places[1:]]


@pytest.mark.parametrize("kill_seed", range(10))
def test_every_kill_comes_in_its_round(kill_seed):
    places = list(itertools.islice(plan.rounds_of(SEED), 50))
    kills = plan.kills_of(SEED, 50, kill_seed)
    assert kills[0].round == 1 and len(kills) > 5
    assert kills == sorted(kills, key=lambda kill: kill.round)
    for kill in kills:
        place = places[kill.round]
        assert kill.point != "step" or place.first <= kill.number < place.end
        assert kill.ranks in ((0,), (1,), (0, 1))


# ---------------------------------------------------------------- what is compared


def parts():
    """Contents of two ranks with some keys of each table."""
    return [
        {
            f"{table}/{what}": array
            for table in plan.DIMS
            for what, array in (
                ("keys", np.arange(rank, 9, 2)),
                ("rows", np.full((len(range(rank, 9, 2)), 4), 7 + rank, np.uint8)),
                ("state m", np.full((len(range(rank, 9, 2)), 4), 5, np.uint8)),
                ("read it", np.full((3, 4), rank, np.uint8)),
            )
        }
        for rank in range(plan.RANKS)
    ]


@pytest.mark.parametrize("what", ["keys", "rows", "state m", "read it"])
def test_whatever_a_rank_holds_is_in_the_digest_of_its_table_alone(what):
    before = digests_of(parts())
    changed = parts()
    changed[1][f"word/{what}"][-1] += 100
    after = digests_of(changed)
    assert [table for table in plan.DIMS if before[table] != after[table]] == ["word"]


def test_a_digest_does_not_depend_on_which_rank_has_a_key():
    moved = parts()
    for what in ("keys", "rows", "state m"):
        one, other = (part[f"tag/{what}"] for part in moved)
        moved[0][f"tag/{what}"], moved[1][f"tag/{what}"] = other, one
    assert digests_of(moved) == digests_of(parts())


def test_a_key_on_both_ranks_is_an_error():
    both = parts()
    both[1]["tag/keys"][0] = 0
    with pytest.raises(AssertionError, match="'tag'"):
        digests_of(both)


def test_a_difference_is_told_with_its_table_and_its_first_round():
    same = digests_of(parts())
    by_round = [dict(same) for _ in range(5)]
    record = json.loads(text_of(record_of(3, by_round)))
    assert first_difference(record, by_round) is None
    assert first_difference(record, by_round[:2]) is None
    for number, table in ((2, "tag"), (2, "shop"), (3, "user")):
        by_round[number][table] = "f" * 64
    assert first_difference(record, by_round[:2]) is None
    assert "Round 2" in first_difference(record, by_round)
    assert first_difference(record, by_round).endswith("in: tag, shop.")
    assert first_difference(record, by_round, plan.EVICTING).endswith("in: tag.")
    assert "5 rounds" in first_difference(record, [same] * 6)


def test_a_round_that_comes_out_otherwise_after_a_kill_is_an_error(tmp_path):
    running = Soak(3, tmp_path, rounds=2, say=lambda text: None)
    same = digests_of(parts())
    running._take(0, same)
    running._take(0, same)
    with pytest.raises(SoakError, match="Round 0.*: tag"):
        running._take(0, {**same, "tag": "f" * 64})
    with pytest.raises(SoakError, match="Round 2 came after 1 rounds"):
        running._take(2, same)
