"""`make gpu-sanitize`: the ops under compute-sanitizer, whose tests compare every result with the reference. It slows kernels down
unevenly, so that what holds by luck of timing comes out wrong too. Options go to pytest."""

import shutil
import subprocess
import sys
from pathlib import Path

TESTS = ["tests/ops/test_cuda.py", "tests/gpu/test_draws.py"]
# Quantised weights reach the same kernels, and one type in each.
CASES = "(test_op and bf16 and not bit) or (test_program_is_reference and bf16) or test_draws"


def main() -> int:
    sanitizer = shutil.which("compute-sanitizer") or next(map(str, Path("/usr/local").glob("cuda*/bin/compute-sanitizer")), None)
    if sanitizer is None:
        print("compute-sanitizer is missing: it comes with the CUDA toolkit")
        return 1
    pytest = [sys.executable, "-m", "pytest", "-m", "gpu", "-k", CASES, *TESTS, *sys.argv[1:]]
    failed = []
    for tool in ("memcheck", "racecheck"):
        print(f"== {tool}", flush=True)
        if subprocess.run([sanitizer, "--tool", tool, "--target-processes", "all", "--error-exitcode", "2", *pytest]).returncode:
            failed.append(tool)
    print("failed: " + ", ".join(failed) if failed else "clean")
    return len(failed)


if __name__ == "__main__":
    sys.exit(main())
