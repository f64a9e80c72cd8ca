"""The committed inputs of the fuzz targets (tests/fuzz/corpus.py)."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest
from gradwire._bootstrap.mesh import unpack_address_info

FUZZ = Path(__file__).parents[2] / "fuzz"
SPEC = importlib.util.spec_from_file_location("fuzz_corpus", FUZZ / "corpus.py")
assert SPEC is not None
assert SPEC.loader is not None
corpus = importlib.util.module_from_spec(SPEC)
SPEC.loader.exec_module(corpus)

NAMES = sorted(path.stem for path in corpus.ARCHIVES.glob("*.zip"))


def test_every_target_has_a_corpus() -> None:
    targets = {path.stem.removesuffix("_fuzz") for path in FUZZ.glob("*_fuzz.*")}
    assert targets == set(NAMES)


@pytest.mark.parametrize("name", NAMES)
def test_a_corpus_is_packed_again_to_the_same_bytes(name: str, tmp_path: Path) -> None:
    archive, again = corpus.ARCHIVES / f"{name}.zip", tmp_path / "again.zip"
    corpus.unpack(archive, tmp_path / "inputs")
    assert any((tmp_path / "inputs").iterdir())
    corpus.pack(tmp_path / "inputs", again)
    assert again.read_bytes() == archive.read_bytes()


@pytest.mark.parametrize("name", ["address_info", "ipv6", "unknown_transport"])
def test_address_information_in_the_corpus_is_accepted(name: str, tmp_path: Path) -> None:
    corpus.unpack(corpus.ARCHIVES / "peer_info.zip", tmp_path / "inputs")
    found = unpack_address_info((tmp_path / "inputs" / name).read_bytes(), 1)
    assert found.transports
    assert found.networks


def test_inputs_of_before_are_gone(tmp_path: Path) -> None:
    folder, archive = tmp_path / "inputs", tmp_path / "one.zip"
    folder.mkdir()
    (folder / "first").write_bytes(b"1")
    corpus.pack(folder, archive)
    (folder / "second").write_bytes(b"2")
    corpus.unpack(archive, folder)
    assert [path.name for path in folder.iterdir()] == ["first"]
    corpus.unpack(tmp_path / "none.zip", folder)
    assert not list(folder.iterdir())
