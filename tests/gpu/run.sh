#!/usr/bin/env bash
# `make gpu-test` and `make gpu-bench`: builds in place for this machine's GPU, then runs Python with the given arguments.
# Needs nvcc, g++ and a Python that has PyTorch and transformers. What the build and the tests lack besides goes into .venv-gpu,
# an environment over that Python; where nothing is lacking, nothing is installed.
set -euo pipefail
cd "$(dirname "$0")/../.."
python=$(command -v "${PYTHON:-python3}")
command -v nvcc >/dev/null || [ -n "${CUDACXX:-}" ] || { echo "nvcc is missing: put it on PATH, or set CUDACXX"; exit 1; }

lacking() {
  "$1" - <<'END'
import importlib.util, shutil

def lacks(module):
    return importlib.util.find_spec(module) is None

need = [name for name in ("numpy", "pytest", "hypothesis", "torch", "transformers") if lacks(name)]
need += [name for name in ("cmake", "ninja") if lacks(name) and shutil.which(name) is None]
if lacks("pybind11") or int(__import__("pybind11").__version__.split(".")[0]) < 3:
    need.append("pybind11>=3,<4")
print(*need)
END
}

if [ -n "$(lacking "$python")" ]; then
  [ -x .venv-gpu/bin/python ] || "$python" -m venv --system-site-packages .venv-gpu
  python=$PWD/.venv-gpu/bin/python
  read -ra packages <<<"$(lacking "$python")"
  if [ ${#packages[@]} -gt 0 ]; then
    echo "== installing ${packages[*]} into .venv-gpu"
    "$python" -m pip install --quiet --disable-pip-version-check "${packages[@]}"
  fi
fi
PATH="$("$python" -c 'import sysconfig; print(sysconfig.get_path("scripts"))'):$PATH"
echo "== building for the GPUs here (the first time some minutes)"
cmake -S . -B build-gpu -G Ninja -DMAGA_CUDA=ON -DMAGA_INPLACE=ON -DMAGA_CUDA_ARCHS="${MAGA_CUDA_ARCHS:-}" \
  -Dpybind11_DIR="$("$python" -m pybind11 --cmakedir)" -DPython_EXECUTABLE="$python" --log-level=WARNING
cmake --build build-gpu
PYTHONPATH="$PWD/python${PYTHONPATH:+:$PYTHONPATH}" exec "$python" "$@"
