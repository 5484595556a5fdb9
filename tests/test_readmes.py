"""Every code block of every README, run as it is written, from a folder that looks like the repository's root."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
import urllib.error
import urllib.request
from pathlib import Path
from typing import NamedTuple

import pytest

ROOT = Path(__file__).parent.parent
BLOCK = re.compile(r"^```(python|bash)\n(.*?)^```", re.M | re.S)
#: lines of a shell block that set up environments or start the suite itself
SET_UP = (
    "pip install",
    "pip wheel",
    "bash scripts/demo.sh",
    "bash scripts/test.sh",
    "pytest",
    "ruff",
    "python -m lfm2_cb.integrations.ray",
)
#: blocks that take longer than the rest together
SLOW = ("trl", "ray", "accelerate")


class Block(NamedTuple):
    readme: Path
    number: int
    language: str
    text: str

    @property
    def name(self) -> str:
        return f"{self.readme.parent.as_posix()}-{self.number}-{self.language}"


def blocks() -> list[Block]:
    found = []
    for folder in ("", "lfm2_cb", "integrations", "scripts"):
        pattern = "README.md" if not folder else "**/README.md"
        for path in sorted((ROOT / folder).glob(pattern)):
            for number, match in enumerate(BLOCK.finditer(path.read_text("utf-8"))):
                found.append(Block(path.relative_to(ROOT), number, *match.groups()))
    return found


def is_server(block: Block) -> bool:
    return "lfm2-cb serve" in block.text or "import serve" in block.text


def is_client(block: Block) -> bool:
    return "127.0.0.1:8000" in block.text


def commands(block: Block) -> str:
    """A shell block without what sets up environments."""
    joined = block.text.replace("\\\n", " ")
    return "\n".join(line for line in joined.splitlines() if not line.strip().startswith(SET_UP))


ORDINARY = [
    pytest.param(block, id=block.name, marks=[pytest.mark.slow] if block.readme.parent.name in SLOW else [])
    for block in blocks()
    if not is_server(block) and not is_client(block) and (block.language == "python" or commands(block).strip())
]
CLIENTS = [block for block in blocks() if is_client(block)]


@pytest.fixture
def folder(tmp_path):
    """The repository's folders under their names, and the command on the path."""
    for name in ("lfm2_cb", "integrations", "scripts"):
        (tmp_path / name).symlink_to(ROOT / name)
    command = tmp_path / "bin" / "lfm2-cb"
    command.parent.mkdir()
    command.write_text(f'#!/bin/sh\nexec {sys.executable} -m lfm2_cb "$@"\n')
    command.chmod(0o755)
    return tmp_path


def environment(folder: Path) -> dict[str, str]:
    paths = [str(folder / "bin"), os.path.dirname(sys.executable), os.environ["PATH"]]
    return {**os.environ, "PATH": os.pathsep.join(paths), "PYTHONPATH": str(ROOT)}


def argv(block: Block, folder: Path) -> list[str]:
    if block.language == "bash":
        return ["bash", "-euc", commands(block)]
    script = folder / "block.py"
    script.write_text(block.text)
    if "torchrun" in block.text:
        return [sys.executable, "-m", "torch.distributed.run", "--nproc_per_node", "2", str(script)]
    return [sys.executable, str(script)]


@pytest.mark.parametrize("block", ORDINARY)
def test_a_block_runs_as_written(block, folder):
    done = subprocess.run(
        argv(block, folder), cwd=folder, env=environment(folder), capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, done.stderr[-3000:]
    assert done.stdout.strip() or block.language == "bash"


@pytest.mark.parametrize("client", CLIENTS, ids=lambda block: block.name)
def test_a_client_talks_to_the_server_before_it(client, folder):
    server = max(b for b in blocks() if b.readme == client.readme and is_server(b) and b.number < client.number)
    where = {"cwd": folder, "env": environment(folder)}
    with subprocess.Popen(argv(server, folder), start_new_session=True, **where) as running:
        try:
            deadline = time.monotonic() + 120
            while not answers():
                assert running.poll() is None and time.monotonic() < deadline
                time.sleep(0.2)
            done = subprocess.run(argv(client, folder), capture_output=True, text=True, timeout=120, **where)
            assert done.returncode == 0 and done.stdout.strip(), done.stderr[-3000:]
        finally:
            os.killpg(running.pid, signal.SIGKILL)


def answers() -> bool:
    try:
        return urllib.request.urlopen("http://127.0.0.1:8000/health", timeout=1).status == 200
    except (urllib.error.URLError, OSError):
        return False


def test_every_readme_is_linked_from_the_top():
    top = (ROOT / "README.md").read_text("utf-8")
    others = {block.readme for block in blocks()} - {Path("README.md")}
    assert len(others) > 5
    assert all(str(path) in top for path in others)


def test_links_lead_somewhere():
    for path in {block.readme for block in blocks()}:
        for target in re.findall(r"\]\((?!https?:)([^)#]+)\)", (ROOT / path).read_text("utf-8")):
            assert (ROOT / path.parent / target).exists(), f"{path}: {target}"
