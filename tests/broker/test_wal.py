"""The log: what was flushed is there again, wherever the file was cut; damage is named; the disk is bounded."""

import os
import random

import pytest

from sao.broker.wal import HEAD_BYTES, Kind, Log
from sao.errors import LedgerError


def fill(log: Log, count: int, size: int = 100, first: int = 0) -> list[bytes]:
    bodies = [bytes([ordinal % 251]) * size for ordinal in range(first, first + count)]
    for ordinal, body in enumerate(bodies, first):
        log.append(Kind.TRAJECTORY, ordinal, 0, 0, b"head", body, lives=True)
    log.flush()
    return bodies


def found(log: Log) -> list[tuple[int, bytes]]:
    return [(record.ordinal, bytes(record.payload)) for _, record in log.found.records]


def test_what_was_flushed_is_found_and_what_was_not_is_not(tmp_path):
    log = Log(tmp_path / "wal", sync=True)
    bodies = fill(log, 5)
    log.append(Kind.TRAJECTORY, 9, 0, 0, b"never", b"written", lives=True)
    again = Log(tmp_path / "wal", sync=False)
    assert found(again) == list(enumerate(bodies)) and not again.found.damage
    assert (tmp_path / "wal").stat().st_mode & 0o077 == 0


def test_a_tail_that_is_torn_at_any_byte_costs_only_the_last_record(tmp_path):
    log = Log(tmp_path / "wal", sync=False)
    bodies = fill(log, 3, size=20)
    log.close()
    (path,) = (tmp_path / "wal").iterdir()
    whole = path.read_bytes()
    one = len(whole) // 3
    for cut in range(2 * one, 3 * one):
        path.write_bytes(whole[:cut])
        again = Log(tmp_path / "wal", sync=False)
        assert found(again) == list(enumerate(bodies))[:2] and not again.found.damage
        assert again.found.cut_bytes == cut - 2 * one
        again.close()
        for other in (tmp_path / "wal").iterdir():
            if other != path:
                other.unlink()


@pytest.mark.parametrize("seed", range(20))
def test_a_damaged_byte_anywhere_is_named_and_costs_one_record(tmp_path, seed):
    log = Log(tmp_path / "wal", sync=False)
    bodies = fill(log, 4, size=30)
    log.roll()  # a torn tail is only looked for in the newest segment
    log.close()
    path = min((tmp_path / "wal").iterdir())
    data = bytearray(path.read_bytes())
    place = random.Random(seed).randrange(len(data))
    data[place] ^= 0x55
    path.write_bytes(data)
    again = Log(tmp_path / "wal", sync=False)
    hit = place // (HEAD_BYTES + 34)
    assert found(again) == [pair for pair in enumerate(bodies) if pair[0] != hit]
    (text,) = again.found.damage
    assert str(path) in text and f"byte {hit * (HEAD_BYTES + 34)}" in text
    if place % (HEAD_BYTES + 34) >= HEAD_BYTES:
        assert f"trajectory of task {hit} attempt 0" in text


def test_the_disk_is_bounded_by_what_lives(tmp_path):
    log = Log(tmp_path / "wal", sync=False, segment_bytes=10_000)
    rng, alive, largest = random.Random(1), {}, 0
    for ordinal in range(3000):
        (alive[ordinal],) = fill(log, 1, size=rng.randrange(1, 400), first=ordinal)
        while len(alive) > 20:
            gone = rng.choice(list(alive)[1:])  # the first one lives for ever
            log.forget(Kind.TRAJECTORY, gone)
            del alive[gone]
        log.tidy()
        if log.full:
            log.roll()
        largest = max(largest, sum(path.stat().st_size for path in (tmp_path / "wal").iterdir()))
    assert largest == pytest.approx(log.n_bytes, abs=60_000) and largest < 60_000
    log.close()
    again = Log(tmp_path / "wal", sync=False)
    there = dict(found(again))
    assert {ordinal: there[ordinal] for ordinal in alive} == alive and 0 in alive


def test_a_disk_that_cannot_be_written_is_an_error_with_the_files_name(tmp_path):
    log = Log(tmp_path / "wal", sync=False)
    os.close(log._file)
    log._file = os.open("/dev/full", os.O_WRONLY)
    log.append(Kind.TRAJECTORY, 1, 0, 0, b"a", b"b", lives=True)
    with pytest.raises(LedgerError, match=r"00000001\.wal: cannot be written: .*No space left"):
        log.flush()
    log.append(Kind.TRAJECTORY, 2, 0, 0, b"a", b"b", lives=True)
    for again in (log.flush, log.roll):
        with pytest.raises(LedgerError, match="No space left"):
            again()
    log.close()


def test_a_file_that_is_no_segment_is_left_alone(tmp_path):
    stray = tmp_path / "wal" / "00000001 (copy).wal"
    stray.parent.mkdir()
    stray.write_bytes(b"not ours")
    log = Log(tmp_path / "wal", sync=False)
    assert not log.found.damage and log.n_segments == 1
    log.close(remove=True)
    assert stray.read_bytes() == b"not ours"
