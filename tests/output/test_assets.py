"""Side files copied or linked into the output."""

from __future__ import annotations

import errno
import fcntl
import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from fuselora.digest import READ_BYTES
from fuselora.errors import ChangedError, OutputError, ReadError
from fuselora.output.assets import Placed, place
from fuselora.reading import state
from fuselora.side_files import SideFile, survey
from fuselora.specs import Assets
from tests.output.fused_folder import sha256
from tests.output.test_journal import largest_file
from tests.side_files import CONTENT, hub_snapshot, put


@pytest.fixture
def side(tmp_path: Path) -> SideFile:
    return seen("config.json", put(tmp_path / "base" / "config.json"))


def seen(path: str, source: Path) -> SideFile:
    """As ``survey`` finds it."""
    return SideFile(path, source, state(source.stat()))


@pytest.fixture
def target(tmp_path: Path) -> Path:
    return tmp_path / "stage" / "deep" / "config.json"


@pytest.fixture
def umask() -> Iterator[None]:
    before = os.umask(0o022)
    yield
    os.umask(before)


@pytest.mark.parametrize("digest", [True, False])
def test_a_copy_has_the_bytes_and_is_its_own_file(side: SideFile, target: Path, digest: bool) -> None:
    placed = place(side, target, "copy", digest=digest)
    assert placed.how in ("copy", "reflink")
    assert placed.sha256 == (sha256(CONTENT) if digest else None)
    assert target.read_bytes() == CONTENT
    assert not target.samefile(side.source)


@pytest.mark.parametrize("digest", [True, False])
def test_a_hard_link_is_the_same_file(side: SideFile, target: Path, digest: bool) -> None:
    assert place(side, target, "hardlink", digest=digest) == Placed(
        "hardlink", sha256(CONTENT) if digest else None
    )
    assert target.samefile(side.source)
    assert not target.is_symlink()


@pytest.mark.parametrize("digest", [True, False])
def test_a_symlink_leads_to_the_real_file(side: SideFile, target: Path, tmp_path: Path, digest: bool) -> None:
    (tmp_path / "alias").symlink_to(side.source)
    linked = seen(side.path, tmp_path / "alias")
    assert place(linked, target, "symlink", digest=digest) == Placed(
        "symlink", sha256(CONTENT) if digest else None
    )
    assert target.readlink() == side.source


def test_a_hard_link_to_a_blob_is_a_file_and_no_link_to_a_link(tmp_path: Path, target: Path) -> None:
    snapshot = hub_snapshot(tmp_path)
    (side,) = survey(snapshot, exclude=lambda path: False)
    assert place(side, target, "hardlink", digest=True).how == "hardlink"
    assert not target.is_symlink()
    assert target.samefile(tmp_path / "models--a--b" / "blobs" / "0123abcd")


def test_skip_places_nothing(side: SideFile, target: Path) -> None:
    assert place(side, target, "skip", digest=True) == Placed("skip", None)
    assert not target.parent.exists()


@pytest.mark.parametrize("code", [errno.EXDEV, errno.EPERM, errno.EMLINK, errno.EOPNOTSUPP])
def test_a_hard_link_that_cannot_be_is_a_copy_and_says_so(
    side: SideFile, target: Path, monkeypatch: pytest.MonkeyPatch, code: int
) -> None:
    def refused(*_: object) -> None:
        raise OSError(code, os.strerror(code))

    monkeypatch.setattr(os, "link", refused)
    placed = place(side, target, "hardlink", digest=True)
    assert placed.how in ("copy", "reflink")
    assert placed.sha256 == sha256(CONTENT)
    assert not target.samefile(side.source)


def test_a_hard_link_that_fails_otherwise_is_an_output_error(
    side: SideFile, target: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refused(*_: object) -> None:
        raise OSError(errno.EROFS, os.strerror(errno.EROFS))

    monkeypatch.setattr(os, "link", refused)
    with pytest.raises(OutputError, match="Read-only"):
        place(side, target, "hardlink", digest=True)


@pytest.mark.parametrize("digest", [True, False])
def test_a_clone_is_used_where_the_file_system_has_them(
    side: SideFile, target: Path, monkeypatch: pytest.MonkeyPatch, digest: bool
) -> None:
    asked: list[int] = []

    def clone(to: int, request: int, source: int) -> int:
        asked.append(request)
        os.write(to, os.pread(source, 1000, 0))
        return 0

    monkeypatch.setattr(fcntl, "ioctl", clone)
    assert place(side, target, "copy", digest=digest) == Placed(
        "reflink", sha256(CONTENT) if digest else None
    )
    assert target.read_bytes() == CONTENT
    assert asked == [0x40049409]


@pytest.mark.parametrize("n_bytes", [0, READ_BYTES, 2 * READ_BYTES + 1])
def test_a_copy_is_whole_at_any_length(tmp_path: Path, target: Path, n_bytes: int) -> None:
    content = os.urandom(1000) * (n_bytes // 1000) + b"x" * (n_bytes % 1000)
    side = seen("x", put(tmp_path / "x", content))
    assert place(side, target, "copy", digest=True).sha256 == sha256(content)
    assert target.read_bytes() == content


@pytest.mark.parametrize(
    ("source", "copied"),
    [(0o644, 0o644), (0o755, 0o755), (0o444, 0o644), (0o666, 0o644), (0o600, 0o600), (0o4555, 0o755)],
)
def test_the_sources_permissions_are_kept(
    side: SideFile, target: Path, umask: None, source: int, copied: int
) -> None:
    side.source.chmod(source)
    side = seen(side.path, side.source)
    place(side, target, "copy", digest=False)
    assert target.stat().st_mode & 0o7777 == copied
    assert side.source.stat().st_mode & 0o7777 == source


@pytest.mark.parametrize("mode", ["copy", "hardlink", "symlink"])
def test_a_link_left_at_the_target_is_replaced_and_its_target_unharmed(
    side: SideFile, target: Path, tmp_path: Path, mode: Assets
) -> None:
    precious = put(tmp_path / "precious", b"mine")
    target.parent.mkdir(parents=True)
    target.symlink_to(precious)
    place(side, target, mode, digest=False)
    assert precious.read_bytes() == b"mine"
    assert target.read_bytes() == CONTENT


@pytest.mark.parametrize("mode", ["copy", "hardlink", "symlink"])
def test_a_source_that_changed_since_the_survey_is_refused(
    side: SideFile, target: Path, mode: Assets
) -> None:
    side.source.write_bytes(b"short")
    with pytest.raises(ChangedError, match=r"config\.json: was changed"):
        place(side, target, mode, digest=True)


def test_a_source_written_during_the_copy_is_refused(
    side: SideFile, target: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def edit(*_: object) -> int:
        status = side.source.stat()
        os.utime(side.source, ns=(status.st_atime_ns, status.st_mtime_ns + 1_000_000))
        raise OSError(errno.EOPNOTSUPP, "no clones")

    monkeypatch.setattr(fcntl, "ioctl", edit)
    with pytest.raises(ChangedError, match="was changed"):
        place(side, target, "copy", digest=True)


@pytest.mark.parametrize("mode", ["copy", "hardlink", "symlink"])
def test_a_source_that_was_edited_since_it_was_found(side: SideFile, target: Path, mode: Assets) -> None:
    """Of the same size: the plan was made by what it said before."""
    side.source.write_bytes(CONTENT[::-1])
    os.utime(side.source, ns=(0, side.state.mtime_ns + 1))
    with pytest.raises(ChangedError, match=r"config\.json: was changed"):
        place(side, target, mode, digest=True)
    assert not target.exists()


@pytest.mark.parametrize("mode", ["copy", "hardlink", "symlink"])
def test_hard_links_to_a_source_may_come_and_go(
    side: SideFile, target: Path, tmp_path: Path, mode: Assets
) -> None:
    """As another merge of the same base makes them, or as its output is removed."""
    os.link(side.source, tmp_path / "other")
    place(side, target, mode, digest=True)
    (tmp_path / "other").unlink()
    place(side, target, mode, digest=True)
    assert target.read_bytes() == CONTENT


@pytest.mark.parametrize("mode", ["copy", "hardlink", "symlink"])
def test_a_source_that_is_gone_is_the_bases_fault(side: SideFile, target: Path, mode: Assets) -> None:
    side.source.unlink()
    with pytest.raises(ReadError, match=r"base/config\.json: cannot be read: No such file"):
        place(side, target, mode, digest=True)


def test_a_source_that_cannot_be_read_is_the_bases_fault(target: Path) -> None:
    unreadable = seen("mem", Path("/proc/self/mem"))
    with pytest.raises(ReadError, match="/proc/self/mem: cannot be read: Input/output error"):
        place(unreadable, target, "copy", digest=True)


@pytest.mark.parametrize("mode", ["copy", "hardlink", "symlink"])
def test_a_source_that_cannot_be_opened_is_the_bases_fault(
    side: SideFile, target: Path, monkeypatch: pytest.MonkeyPatch, mode: Assets
) -> None:
    def refused(self: Path, *_: object, **__: object) -> None:
        raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))

    monkeypatch.setattr(Path, "open", refused)
    with pytest.raises(ReadError, match=r"base/config\.json: cannot be read: Permission denied"):
        place(side, target, mode, digest=True)


def test_a_copy_that_does_not_fit_is_an_output_error(side: SideFile, target: Path) -> None:
    with largest_file(10), pytest.raises(OutputError, match="File too large") as caught:
        place(side, target, "copy", digest=True)
    assert str(target) in caught.value.message
    assert caught.value.facts["needed"] == len(CONTENT)


def test_a_copy_is_on_disk_when_it_is_placed(
    side: SideFile, target: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    synced: list[tuple[int, int]] = []

    def note(descriptor: int) -> None:
        status = os.fstat(descriptor)
        synced.append((status.st_ino, status.st_size))

    monkeypatch.setattr(os, "fsync", note)
    place(side, target, "copy", digest=True)
    assert synced == [(target.stat().st_ino, len(CONTENT))]
