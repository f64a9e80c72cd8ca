"""The committed inputs of a fuzz target, in one archive: the same inputs make the same bytes.

    python tests/fuzz/corpus.py gather build/fuzz/work/gather-crash-…

adds inputs to corpus/gather.zip, under their names; unzip -l lists them.
"""

from __future__ import annotations

import shutil
import sys
import tempfile
import zipfile
from pathlib import Path

ARCHIVES = Path(__file__).parent / "corpus"
_TIME = (1980, 1, 1, 0, 0, 0)  # the earliest that the format knows


def unpack(archive: Path, folder: Path) -> None:
    """Makes `folder` hold the archive's inputs and nothing else; none where there is no archive."""
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    if archive.exists():
        with zipfile.ZipFile(archive) as inputs:
            inputs.extractall(folder)


def pack(folder: Path, archive: Path) -> None:
    """Writes the inputs in `folder` to the archive, in place of those that were there.

    They are not compressed, since versions of zlib differ in what they write.
    """
    with zipfile.ZipFile(archive, "w", zipfile.ZIP_STORED) as inputs:
        for path in sorted(folder.iterdir()):
            inputs.writestr(zipfile.ZipInfo(path.name, _TIME), path.read_bytes())


def main() -> None:
    """Adds inputs to the corpus of a target."""
    name, *added = sys.argv[1:]
    with tempfile.TemporaryDirectory() as made:
        folder = Path(made) / name
        unpack(ARCHIVES / f"{name}.zip", folder)
        for path in added:
            shutil.copy(path, folder)
        pack(folder, ARCHIVES / f"{name}.zip")


if __name__ == "__main__":
    main()
