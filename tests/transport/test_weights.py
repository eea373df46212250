"""Weights between learner and generators: what arrives is what was published, or an error."""

import pytest
import torch

from sao.errors import WeightsError
from sao.transport.weights import WeightsRef, fingerprint, load, publish


def tensors(dtype=torch.float32):
    torch.manual_seed(0)
    return {"a": torch.randn(3, 4).to(dtype), "b.c": torch.randn(5).to(dtype), "n": torch.arange(6)}


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_round_trip_is_bit_exact(tmp_path, dtype):
    sent = tensors(dtype)
    ref = publish(sent, tmp_path, 7)
    got = load(ref)
    assert ref.version == 7 and len(ref.fingerprint) == 32
    assert got.keys() == sent.keys()
    assert all(torch.equal(got[name], sent[name]) and got[name].dtype == sent[name].dtype for name in sent)


def test_fingerprint_sees_every_fact_and_no_accident():
    base = tensors()
    mark = fingerprint(base)
    assert fingerprint(dict(reversed(base.items()))) == mark
    strided = dict(base, a=base["a"].t().contiguous().t())
    assert fingerprint(strided) == mark
    changed = base["a"].clone()
    changed[2, 3] = changed[2, 3].nextafter(torch.tensor(9.0))
    renamed = {("z" if name == "a" else name): tensor for name, tensor in base.items()}
    dropped = {name: tensor for name, tensor in base.items() if name != "n"}
    others = [
        dict(base, a=changed),
        dict(base, a=base["a"].t()),
        dict(base, a=base["a"].reshape(4, 3)),
        renamed,
        dropped,
    ]
    others.append(dict(base, a=base["a"].view(torch.int32)))
    assert len({mark, *map(fingerprint, others)}) == len(others) + 1


def test_the_fingerprint_is_the_same_in_every_release():
    values = {"b.a": torch.arange(6).reshape(2, 3), "scalar": torch.tensor(3.5, dtype=torch.bfloat16)}
    assert fingerprint(values | {"empty": torch.zeros(0, 4)}) == "ebdac27620cc7bbf517efc3c397f85e9"


def test_tied_tensors_are_published_as_two(tmp_path):
    weight = torch.randn(4, 4)
    got = load(publish({"a": weight, "b": weight, "row": weight[0]}, tmp_path, 1))
    assert torch.equal(got["a"], weight) and torch.equal(got["b"], weight) and torch.equal(got["row"], weight[0])


def test_only_the_newest_are_kept_and_a_pruned_one_is_an_error(tmp_path):
    refs = [publish(tensors(), tmp_path, version, keep=2) for version in (8, 9, 10)]
    assert sorted(path.name for path in tmp_path.iterdir()) == [
        "weights-0000000009.safetensors",
        "weights-0000000010.safetensors",
    ]
    assert load(refs[-1])
    with pytest.raises(WeightsError, match="version 8"):
        load(refs[0])


@pytest.mark.parametrize("damage", ["flip", "cut", "garbage", "empty"])
def test_damaged_file_is_refused(tmp_path, damage):
    ref = publish(tensors(), tmp_path, 3)
    path = next(tmp_path.iterdir())
    data = bytearray(path.read_bytes())
    if damage == "flip":
        data[-3] ^= 0x10
    data = {"flip": data, "cut": data[:-5], "garbage": b"\xff" * 64, "empty": b""}[damage]
    path.write_bytes(data)
    with pytest.raises(WeightsError, match=r"version 3|fingerprint"):
        load(ref)


def test_a_newer_file_under_an_old_reference_is_refused(tmp_path):
    ref = publish(tensors(), tmp_path, 3)
    other = publish({"a": torch.zeros(2)}, tmp_path, 4)
    with pytest.raises(WeightsError, match="holds version 4, expected 3"):
        load(WeightsRef(3, other.path, ref.fingerprint))
    with pytest.raises(WeightsError, match="fingerprint"):
        load(WeightsRef(4, other.path, ref.fingerprint))


def test_failed_write_leaves_nothing(tmp_path):
    with pytest.raises(WeightsError, match="cannot write"):
        publish(tensors(), tmp_path / "missing", 1)
    with pytest.raises(WeightsError, match="no tensors"):
        publish({}, tmp_path, 1)
    with pytest.raises(WeightsError, match="version -1"):
        publish(tensors(), tmp_path, -1)
    assert list(tmp_path.iterdir()) == []


def test_no_temporary_name_is_ever_taken_for_a_version(tmp_path):
    publish(tensors(), tmp_path, 1)
    assert [path.name for path in tmp_path.iterdir()] == ["weights-0000000001.safetensors"]
