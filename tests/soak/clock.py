"""Builds the clock that jumps."""

import os
import shutil
import subprocess
from pathlib import Path


def jumping_clock(folder: Path) -> Path | None:
    """The library to preload; None where there is no compiler."""
    library = folder / "clock.so"
    compiler = os.environ.get("CC") or shutil.which("gcc") or shutil.which("cc")
    if compiler is None:
        return None
    if not library.exists():
        subprocess.run([compiler, "-shared", "-fPIC", "-O1", "-o", library, Path(__file__).with_name("clock.c")], check=True)
    return library
