from __future__ import annotations

import errno
import fcntl
import os
import socket
from collections.abc import Iterator
from pathlib import Path

import pytest

from fuselora.digest import READ_BYTES
from fuselora.errors import ChangedError, CheckpointError, OutputError, ReadError
from fuselora.output.assets import Placed, SideFile, place, survey
from fuselora.specs import Assets
from tests.output.fused_folder import sha256
from tests.output.test_journal import largest_file

CONTENT = b"content of a side file"


def paths(root: Path) -> list[str]:
    return [side.path for side in survey(root, exclude=lambda path: False)]


def put(path: Path, content: bytes = CONTENT) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(content)
    return path


# survey


def test_every_side_file_is_found_in_one_order(tmp_path: Path) -> None:
    names = [
        "vae/config.json",
        "README.md",
        "scheduler/a/b.json",
        "model_index.json",
        ".gitattributes",
        "x.py",
    ]
    for name in names:
        put(tmp_path / name)
    (tmp_path / "empty").mkdir()
    assert paths(tmp_path) == sorted(names)
    found = {side.path: side for side in survey(tmp_path, exclude=lambda path: False)}
    assert found["vae/config.json"] == SideFile(
        "vae/config.json", tmp_path / "vae" / "config.json", len(CONTENT)
    )


def test_what_is_excluded_is_left_out_and_not_judged(tmp_path: Path) -> None:
    put(tmp_path / "transformer" / "config.json")
    (tmp_path / "transformer" / "model.safetensors").symlink_to("/absent")
    found = survey(tmp_path, exclude=lambda path: path == "transformer/model.safetensors")
    assert [side.path for side in found] == ["transformer/config.json"]


def test_private_folders_and_earlier_markers_are_not_taken(tmp_path: Path) -> None:
    for name in (
        ".git/config",
        "vae/.git",
        ".cache/huggingface/download/x.lock",
        "fused.json",
        "fuselora.journal",
    ):
        put(tmp_path / name)
    kept = [".cache/other", ".github/x", "vae/fused.json", "x.git/y"]
    for name in kept:
        put(tmp_path / name)
    assert paths(tmp_path) == sorted(kept)


def test_a_relative_root_gives_absolute_sources(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    put(tmp_path / "base" / "a.json")
    monkeypatch.chdir(tmp_path)
    (side,) = survey(Path("base"), exclude=lambda path: False)
    assert side.source == tmp_path / "base" / "a.json"


def hub_snapshot(cache: Path) -> Path:
    """A repository as huggingface_hub lays it out: every file a link to a blob."""
    blob = put(cache / "models--a--b" / "blobs" / "0123abcd")
    snapshot = cache / "models--a--b" / "snapshots" / "deadbeef"
    (snapshot / "vae").mkdir(parents=True)
    (snapshot / "vae" / "config.json").symlink_to(os.path.relpath(blob, snapshot / "vae"))
    return snapshot


def test_links_to_the_blobs_of_the_hub_cache_are_followed(tmp_path: Path) -> None:
    snapshot = hub_snapshot(tmp_path)
    (tmp_path / "alias").symlink_to(snapshot)
    for root in (snapshot, tmp_path / "alias"):
        (side,) = survey(root, exclude=lambda path: False)
        assert (side.path, side.n_bytes) == ("vae/config.json", len(CONTENT))
    assert paths(snapshot / "vae") == ["config.json"]


def test_links_to_other_places_of_the_hub_cache_are_refused(tmp_path: Path) -> None:
    snapshot = hub_snapshot(tmp_path)
    other = put(tmp_path / "models--c--d" / "blobs" / "4567")
    deeper = put(tmp_path / "models--a--b" / "blobs" / "deep" / "89")
    for target in (other, deeper, put(tmp_path / "models--a--b" / "refs" / "main")):
        link = snapshot / "link"
        link.symlink_to(target)
        with pytest.raises(CheckpointError, match="out of the folder"):
            survey(snapshot, exclude=lambda path: False)
        link.unlink()


def test_links_inside_are_followed(tmp_path: Path) -> None:
    put(tmp_path / "vae" / "config.json")
    (tmp_path / "copy.json").symlink_to("vae/config.json")
    (tmp_path / "vae2").symlink_to("vae")
    assert paths(tmp_path) == ["copy.json", "vae/config.json", "vae2/config.json"]


def outside_file(root: Path) -> None:
    (root / "bad").symlink_to(put(root.parent / "secret"))


def outside_folder(root: Path) -> None:
    put(root.parent / "elsewhere" / "x")
    (root / "bad").symlink_to(root.parent / "elsewhere")


def dangling(root: Path) -> None:
    (root / "bad").symlink_to("absent")


def circle(root: Path) -> None:
    (root / "bad").symlink_to("bad")


def own_parent(root: Path) -> None:
    (root / "bad").symlink_to(root)


def fifo(root: Path) -> None:
    os.mkfifo(root / "bad")


def unix_socket(root: Path) -> None:
    here = Path.cwd()
    os.chdir(root)  # the path of a socket may be 108 bytes long
    try:
        with socket.socket(socket.AF_UNIX) as made:
            made.bind("bad")
    finally:
        os.chdir(here)


def odd_name(root: Path) -> None:
    put(root / "bad\nname")


BAD = [
    (outside_file, "out of the folder"),
    (outside_folder, "out of the folder"),
    (dangling, "does not exist"),
    (circle, "does not exist"),
    (own_parent, "a folder that it lies in"),
    (fifo, "not a regular file"),
    (unix_socket, "not a regular file"),
    (odd_name, "cannot record"),
]


@pytest.mark.parametrize(("make", "reason"), BAD, ids=lambda value: getattr(value, "__name__", ""))
def test_what_cannot_be_taken_over_is_refused_by_name(tmp_path: Path, make: object, reason: str) -> None:
    root = tmp_path / "base"
    put(root / "good.json")
    assert callable(make)
    make(root)
    with pytest.raises(CheckpointError, match=f"bad.*{reason}|bad\nname.*{reason}") as caught:
        survey(root, exclude=lambda path: False)
    assert str(root) in caught.value.message


def test_a_file_that_may_not_be_read_is_refused_by_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    put(tmp_path / "secret.json")
    monkeypatch.setattr(os, "access", lambda path, mode: False)
    with pytest.raises(CheckpointError, match=r"secret\.json cannot be read: Permission denied"):
        paths(tmp_path)


def test_all_that_is_wrong_comes_in_one_message(tmp_path: Path) -> None:
    for at in range(15):
        (tmp_path / f"bad{at:02}").symlink_to("absent")
    with pytest.raises(CheckpointError, match="bad00") as caught:
        survey(tmp_path, exclude=lambda path: False)
    assert "bad11" in caught.value.message
    assert "bad12" not in caught.value.message
    assert "and 3 more" in caught.value.message
    faults = caught.value.facts["faults"]
    assert isinstance(faults, list)
    assert len(faults) == 15


def test_a_root_that_is_not_there_is_a_checkpoint_error(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="absent: cannot be read"):
        survey(tmp_path / "absent", exclude=lambda path: False)


# place


@pytest.fixture
def side(tmp_path: Path) -> SideFile:
    source = put(tmp_path / "base" / "config.json")
    return SideFile("config.json", source, len(CONTENT))


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
    linked = SideFile(side.path, tmp_path / "alias", side.n_bytes)
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
    side = SideFile("x", put(tmp_path / "x", content), n_bytes)
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
def test_a_source_that_is_gone_is_the_bases_fault(side: SideFile, target: Path, mode: Assets) -> None:
    side.source.unlink()
    with pytest.raises(ReadError, match=r"base/config\.json: cannot be read: No such file"):
        place(side, target, mode, digest=True)


def test_a_source_that_cannot_be_read_is_the_bases_fault(target: Path) -> None:
    unreadable = SideFile("mem", Path("/proc/self/mem"), 0)
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
