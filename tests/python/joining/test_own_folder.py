"""The folder in which the ranks of a host meet is this user's alone, or an error says why not."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from gradwire._errors import RendezvousError
from gradwire._host import own_folder

OTHER = 12345  # a user id


@pytest.fixture
def shared(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """A folder that stands for /tmp; returns where this user's own is made in it."""
    monkeypatch.delenv("XDG_RUNTIME_DIR", raising=False)
    monkeypatch.setattr(own_folder, "_SHARED", str(tmp_path))
    return tmp_path / f"gradwire-{os.getuid()}"


def test_it_is_made_for_this_user_alone(shared: Path) -> None:
    assert own_folder.own_folder() == own_folder.own_folder() == str(shared)
    assert shared.stat().st_mode & 0o777 == 0o700
    assert shared.stat().st_uid == os.getuid()


def test_the_sessions_folder_goes_first(
    shared: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    session = tmp_path / "s"
    session.mkdir(mode=0o700)
    monkeypatch.setattr(own_folder, "_LONGEST", len(str(session)))
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(session))
    assert own_folder.own_folder() == str(session)
    session.chmod(0o755)
    assert own_folder.own_folder() == str(shared)
    session.chmod(0o700)
    link = tmp_path / "l"
    link.symlink_to(session)
    for useless in (link, tmp_path / "n", "relative", tmp_path / ("long" * 20)):
        monkeypatch.setenv("XDG_RUNTIME_DIR", str(useless))
        assert own_folder.own_folder() == str(shared)


def taken(shared: Path, fault: str) -> None:
    """Whoever would meet there is told what is wrong, and what to do."""
    with pytest.raises(RendezvousError, match=fault) as error:
        own_folder.own_folder()
    assert f"meet in {shared}, which" in str(error.value)
    assert "or set XDG_RUNTIME_DIR to a folder of mode 0700 of this user" in str(error.value)


def test_a_link_is_not_followed(shared: Path, tmp_path: Path) -> None:
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir(mode=0o700)
    shared.symlink_to(elsewhere)
    taken(shared, "is no folder")
    assert not list(elsewhere.iterdir())


def test_a_file_or_a_folder_that_others_may_use_is_refused(shared: Path) -> None:
    shared.touch(mode=0o700)
    taken(shared, "is no folder")
    shared.unlink()
    shared.mkdir()
    shared.chmod(0o770)
    taken(shared, "others may use [(]mode 0770[)]")


@pytest.mark.skipif(os.getuid() != 0, reason="gives a folder to another user, which root alone may")
def test_a_folder_of_another_user_is_refused(shared: Path) -> None:
    shared.mkdir(mode=0o700)
    os.chown(shared, OTHER, OTHER)
    taken(shared, f"belongs to user {OTHER}, and this is user 0")
