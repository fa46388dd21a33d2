"""What a manifest says: the tables of a checkpoint, and each of their files with its checksums."""

import os
from typing import Any, NamedTuple

from sok_lite.engine.files.shard import Written


class StateFacts(NamedTuple):
    """An optimizer state in a file: a `state_columns.State` with its tensors.

    Attributes:
      before: of an increment, its tensor in the previous file; None: the state is new.
    """

    tensor: str
    name: str
    dim: int
    initial: float
    group: int | None
    before: str | None = None


class TextFile(NamedTuple):
    """The texts that one rank wrote of a table: safetensors with `keys`, `ends` and `data`.

    Attributes:
      file: path relative to the folder of the manifest, with "/".
      keys: number of keys.
      num_bytes: bytes of their texts together.
      written: the file's size and checksums.
    """

    file: str
    keys: int
    num_bytes: int
    written: Written


class Shard(NamedTuple):
    """The part of a table that was on one rank.

    Attributes:
      file: path relative to the folder of the manifest, with "/".
      rows: number of keys with a row.
      sighted: number of pending keys: seen, but without a row yet.
      scores, slots: whether the file has those tensors.
      states: the optimizer states.
      facts: num_lookups; where it is known spans, the times of lookups; of a "hybrid" table also
        what a restore of its index needs, such as strategy, epoch and capacity.
      written: the file's size and checksums.
      changed: number of keys, the first ones, whose rows and states an increment has; those of the
        others are in the previous files. None: it is no increment, all rows are in the file.
      before: the files that an increment continues, oldest first; the first is no increment. Their
        own `before` is not used.
      texts: of keys of any rank, those that this rank wrote; None: the table keeps none.
    """

    file: str
    rows: int
    sighted: int
    scores: bool
    slots: bool
    states: tuple[StateFacts, ...]
    facts: dict[str, Any]
    written: Written
    changed: int | None = None
    before: "tuple[Shard, ...]" = ()
    texts: TextFile | None = None

    @property
    def num_rows(self) -> int:
        """The number of rows in the file."""
        return self.rows if self.changed is None else self.changed

    @property
    def chain(self) -> "tuple[Shard, ...]":
        """All files with rows of the part, oldest first."""
        return (*self.before, self)

    @property
    def written_files(self) -> list[Written]:
        """All files that the part is made of, that of texts too."""
        texts = [] if self.texts is None else [self.texts.written]
        return [part.written for part in self.chain] + texts


class TableFacts(NamedTuple):
    """A table.

    Attributes:
      name, var_type, dim, dtype, key_type: of the table.
      owner: name of the rule for the owner ranks of keys.
      options: other arguments of the table, for people: a load does not use them.
      shards: of each rank.
    """

    name: str
    var_type: str
    dim: int
    dtype: str
    key_type: str
    owner: str
    options: dict[str, Any]
    shards: tuple[Shard, ...]


class Manifest(NamedTuple):
    """The content of a checkpoint.

    Attributes:
      ranks: number of ranks that wrote it.
      tables: by name.
      extra: the `extra` of `dump`.
    """

    ranks: int
    tables: dict[str, TableFacts]
    extra: dict[str, Any]

    @property
    def files(self) -> list[str]:
        """All files that it names."""
        shards = [shard for table in self.tables.values() for shard in table.shards]
        texts = [shard.texts.file for shard in shards if shard.texts is not None]
        return [part.file for shard in shards for part in shard.chain] + texts


def path_of(folder: str, shard: Shard | TextFile) -> str:
    """Returns the path of a file."""
    return os.path.join(folder, *shard.file.split("/"))
