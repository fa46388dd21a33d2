"""docs/migration.md is true: its commands convert files of each system, its programs load them.

TFRA's files are those that TFRA has written, those of SOK and TFPlus are written here.
"""

import re
import shlex
import shutil

import numpy as np
import pytest

from sok_lite.cli.importers import sok, tfra_files
from sok_lite.cli.main import main
from sok_lite.engine.files.source import checkpoint_sources
from tests.cli.importers.arrays import whole
from tests.cli.recorded import CASES, FOLDER, expected_rows, rows_of
from tests.cli.test_tfplus import DAY, part, write
from tests.support.doc_blocks import ROOT, blocks_of, printed_by

PAGE = (ROOT / "docs" / "migration.md").read_text()
COMMANDS = [
    shlex.split(line)
    for body in re.findall(r"^```bash\n((?s:.*?))^```$", PAGE, re.MULTILINE)
    for line in body.replace("\\\n", "").splitlines()
]


@pytest.fixture
def files(tmp_path, monkeypatch):
    """A folder with what the page converts; the process is there."""
    monkeypatch.chdir(tmp_path)
    tfra = tmp_path / "tfra"
    folder = tfra / "TFRADynamicEmbedding-1000"
    folder.mkdir(parents=True)
    for name in ("user_emb", "halves"):
        for path in (FOLDER / "files_of_one_shard").glob(f"{name}_*"):
            shutil.copy(path, folder)
    for case in ("checkpoint_of_tensorflow", "checkpoint_of_a_graph"):
        for path in (FOLDER / case).iterdir():
            shutil.copy(path, tfra)
    (users,) = tfra_files.sources(folder, tables="user_emb", slots="tables")
    users.name, users.dim, users.num_keys = "item", 2, 3
    columns = {"keys": np.int64([5, 2, 9]), "values": np.float32([[1, 2], [3, 4], [5, 6]])}
    users.read = lambda column: iter([columns[column]])
    sok.write(str(tmp_path / "sok_dump"), [users])
    (tmp_path / "tfplus").mkdir()
    day = DAY << 16
    counts = {2: 5, 8: 7, 4: 65535, 6: 1, -3: 2}
    write(tmp_path / "tfplus" / "model.ckpt-100", [part([4, 2, -3], [8], counts, day)])
    delta = part([10], [], {10: 2, 6: 1}, day, delete_keys=np.array([8], np.int64))
    delta["need_full_import"] = np.array([False])
    write(tmp_path / "tfplus" / "model.ckpt-120", [delta])
    return tmp_path


def test_the_commands_and_programs_of_the_page(files):
    assert len(COMMANDS) >= 8
    for program, *arguments in COMMANDS:
        assert program == "sok-lite"
        assert main(arguments) == 0, arguments
    check_what_was_converted(files)
    blocks = blocks_of(PAGE)
    assert len(blocks) >= 4
    for block, printed in zip(blocks, printed_by(blocks, files), strict=True):
        if block.output is not None:
            assert printed == block.output, f"docs/migration.md, line {block.line}"


def check_what_was_converted(files):
    def tables(name):
        return {source.name: source for source in checkpoint_sources(files / "runs" / name)}

    expected = CASES["files_of_one_shard"]
    found = tables("from_tfra")
    assert found.keys() == {"user/emb", "halves"}
    for name, source in found.items():
        assert rows_of(source) == expected_rows(expected[name])
    assert [state.name for state in found["user/emb"].states] == ["m", "v"]
    again = tfra_files.sources("TFRADynamicEmbedding-2000")
    assert {each.name: rows_of(each) for each in again} == {
        name: rows_of(source) for name, source in found.items()
    }
    assert tables("from_tfra_checkpoint").keys() == {"ck/emb", "pair", "none"}
    assert tables("from_tfra_saver").keys() == {"v1/emb"}
    (item,) = tables("from_sok").values()
    (item_again,) = sok.sources(str(files / "sok_dump_again"))
    assert rows_of(item) == rows_of(item_again) == {5: [1, 2], 2: [3, 4], 9: [5, 6]}
    (kv,) = tables("from_tfplus").values()
    counts = dict(zip(whole(kv, "keys").tolist(), whole(kv, "scores").tolist(), strict=True))
    assert counts == {-3: 2, 2: 5, 4: 65535, 10: 2}
    assert whole(kv, "sighted_keys").tolist() == [6]
