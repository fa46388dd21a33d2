"""The texts of string keys in a checkpoint: one file a rank, beside its file of the table.

A rank writes the texts that it has seen, whoever owns their keys; no key is in two files. Any rank
may read any file: texts are looked up on all ranks.

  keys  (t,)  I64
  ends  (t,)  I64, end of each key's text in data
  data  (b,)  U8, all texts
"""

from collections.abc import Collection

from sok_lite.engine.files.key_search import first_positions
from sok_lite.engine.files.manifest import TableFacts, TextFile, path_of, text_file_name
from sok_lite.engine.files.progress import Progress
from sok_lite.engine.files.shard import CHUNK_BYTES, NOT_WRITTEN, ShardReader, ShardWriter, Tensor
from sok_lite.engine.texts import KeyTexts


def tensors_of_texts(num_keys: int, num_bytes: int) -> list[Tensor]:
    return [
        Tensor("keys", "I64", (num_keys,)),
        Tensor("ends", "I64", (num_keys,)),
        Tensor("data", "U8", (num_bytes,)),
    ]


def write_texts(
    texts: KeyTexts, table: str, folder: str, beside: str, chunk_bytes: int, progress: Progress
) -> TextFile:
    """Writes texts and syncs them to disk; returns the manifest's entry of the file.

    Args:
      folder: of the checkpoint.
      beside: the file of the table, relative to the folder.
      chunk_bytes: bytes per checksum.
      progress: counts every byte of the tensors.
    """
    made = TextFile(text_file_name(beside), texts.keys.size, texts.data.size, NOT_WRITTEN)
    tensors, about = tensors_of_texts(made.keys, made.num_bytes), {"table": table}
    writer = ShardWriter(path_of(folder, made), tensors, about, chunk_bytes, progress)
    try:
        for array in texts:
            writer.write(array)
        return made._replace(written=writer.finish())
    finally:
        writer.close()


def read_texts(file: TextFile, table: str, folder: str) -> KeyTexts:
    """Returns all texts of a file. OSError: it cannot be read. ValueError: it is corrupt."""
    reader = _open(file, table, folder)
    tensors = tensors_of_texts(file.keys, file.num_bytes)
    texts = KeyTexts(*(next(reader.rows(t.name, iter([(0, t.shape[0])]))) for t in tensors))
    fault = texts.fault()
    if fault is not None:
        raise reader.corrupt(fault)
    return texts


def find_texts(file: TextFile, table: str, folder: str, keys: Collection[int]) -> dict[int, bytes]:
    """Returns the texts of those keys that a file has, reading it in pieces.

    Raises:
      OSError: it cannot be read. ValueError: it is corrupt.
    """
    reader, step = _open(file, table, folder), CHUNK_BYTES // 8
    pieces = ((first, min(first + step, file.keys)) for first in range(0, file.keys, step))
    found = {}
    for key, place in first_positions(reader.rows("keys", pieces), keys).items():
        (ends,) = reader.clone().rows("ends", iter([(max(0, place - 1), place + 1)]))
        begin, end = (0, *ends.tolist())[-2:]
        if not 0 <= begin <= end <= file.num_bytes:
            raise reader.corrupt(f"the text of key {key} ends where none can")
        (text,) = reader.clone().rows("data", iter([(begin, end)]))
        found[key] = text.tobytes()
    return found


def _open(file: TextFile, table: str, folder: str) -> ShardReader:
    reader = ShardReader(path_of(folder, file), file.written, table)
    for tensor in tensors_of_texts(file.keys, file.num_bytes):
        reader.expect(tensor)
    return reader


def texts_in(facts: TableFacts, folder: str, rank: int = 0, ranks: int = 1) -> dict[int, bytes]:
    """Returns the texts by key of the files that a rank reads: every `ranks`-th one.

    Raises:
      OSError: a file cannot be read. ValueError: it is corrupt.
    """
    found: dict[int, bytes] = {}
    for shard in facts.shards[rank::ranks]:
        if shard.texts is not None:
            found |= read_texts(shard.texts, facts.name, folder).as_dict()
    return found
