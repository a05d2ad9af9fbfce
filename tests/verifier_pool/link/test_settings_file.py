"""When a settings file counts as another one."""

from __future__ import annotations

import hashlib
import os
from pathlib import Path

import pytest

from policies.errors import SettingsError
from verifier_pool.link.settings_file import SettingsFile, settings_path


@pytest.fixture
def path(tmp_path: Path) -> Path:
    path = tmp_path / "countersign.yaml"
    path.write_text("a: 1")
    return path


def replace(path: Path, text: str) -> None:
    new = path.with_name("new")
    new.write_text(text)
    new.replace(path)


def test_it_is_news_once_two_looks_found_the_same(path: Path) -> None:
    file = SettingsFile(path)
    assert file.take().text == "a: 1"
    assert file.look() is None
    replace(path, "a: 2")
    assert file.look() is None
    found = file.look()
    assert found is not None
    assert (found.text, found.sha256) == ("a: 2", hashlib.sha256(b"a: 2").hexdigest())
    assert file.look() is None


def test_one_that_is_being_written_is_let_be(path: Path) -> None:
    file = SettingsFile(path)
    file.take()
    for n in range(5):
        with path.open("a") as handle:
            handle.write(f"\nb{n}: 1")
        assert file.look() is None
    found = file.look()
    assert found is not None
    assert found.text.endswith("b4: 1")


def test_the_same_text_is_no_news(path: Path) -> None:
    file = SettingsFile(path)
    file.take()
    replace(path, "a: 1")
    os.utime(path, (1, 1))
    assert [file.look(), file.look(), file.look()] == [None, None, None]


def test_what_cannot_be_read_is_said_once_and_is_news_afterwards(path: Path) -> None:
    file = SettingsFile(path)
    file.take()
    path.unlink()
    assert file.look() is None
    with pytest.raises(SettingsError, match="No such file"):
        file.look()
    assert file.look() is None
    path.write_bytes(b"\xff")
    assert file.look() is None
    with pytest.raises(SettingsError, match="UTF-8"):
        file.look()
    path.write_text("a: 1")
    assert file.look() is None
    assert file.look() is not None


def test_links_are_followed_to_the_end(path: Path, tmp_path: Path) -> None:
    for n in (1, 2):
        (tmp_path / f"..{n}").mkdir()
        (tmp_path / f"..{n}" / "c.yaml").write_text(f"n: {n}")
    (tmp_path / "..data").symlink_to("..1")
    link = tmp_path / "c.yaml"
    link.symlink_to("..data/c.yaml")
    file = SettingsFile(link)
    assert file.take().text == "n: 1"
    (tmp_path / "..tmp").symlink_to("..2")
    (tmp_path / "..tmp").replace(tmp_path / "..data")
    assert file.look() is None
    found = file.look()
    assert found is not None
    assert found.text == "n: 2"


def test_other_files_count_too(path: Path, tmp_path: Path) -> None:
    profile = tmp_path / "profile.json"
    file = SettingsFile(path, lambda: [profile])
    first = file.take()
    profile.write_text("{}")
    assert file.look() is None
    second = file.look()
    assert second is not None
    assert (second.text, second.sha256 != first.sha256) == (first.text, True)


def test_where_it_is() -> None:
    assert settings_path("a", {"COUNTERSIGN_CONFIG": "b"}) == Path("a")
    assert settings_path(None, {"COUNTERSIGN_CONFIG": "b"}) == Path("b")
    assert settings_path(None, {}) == Path("countersign.yaml")
