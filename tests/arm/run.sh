#!/usr/bin/env bash
# Compiles everything for 64-bit ARM and runs the op tests of the NEON kernels under qemu-user: `make test-arm`, on Debian 12.
# cmake, ninja and a python3 with pip and pybind11 are on the PATH. All that it makes or fetches is in build-arm/.
set -euo pipefail
cd "$(dirname "$0")/../.."
build=$PWD/build-arm
say() { echo "== $*"; }

[ "$(. /etc/os-release && echo "$ID $VERSION_ID")" = "debian 12" ] \
  || { echo "This needs Debian 12, whose arm64 packages it unpacks."; exit 1; }
missing=()
command -v aarch64-linux-gnu-g++ >/dev/null || missing+=(g++-aarch64-linux-gnu)
command -v qemu-aarch64-static >/dev/null || missing+=(qemu-user-static)
if [ ${#missing[@]} -gt 0 ]; then
  install="apt-get install --no-install-recommends ${missing[*]}"
  [ "$(id -u)" = 0 ] || { echo "Packages are missing: $install"; exit 1; }
  say "$install"
  apt-get update -qq && DEBIAN_FRONTEND=noninteractive $install -y -qq >/dev/null
fi

# An arm64 Debian's Python with all it depends on, unpacked into a folder; apt's state is a private one, as on an empty system.
if [ ! -e "$build/sysroot/done" ]; then
  say "fetching Debian's arm64 Python into build-arm/sysroot"
  rm -rf "$build/apt" "$build/sysroot"
  mkdir -p "$build"/{sysroot,apt/state/lists/partial,apt/cache/archives/partial}
  : >"$build/apt/status"
  private=(-qq -o APT::Architecture=arm64 -o APT::Architectures=arm64 -o APT::Sandbox::User=
    -o Dir::State="$build/apt/state" -o Dir::State::status="$build/apt/status" -o Dir::Cache="$build/apt/cache")
  apt-get "${private[@]}" update
  apt-get "${private[@]}" install --download-only --no-install-recommends -y python3.11 libstdc++6
  (cd "$build/apt/cache/archives" && apt-get "${private[@]}" download libpython3.11-dev)
  for package in "$build"/apt/cache/archives/*.deb; do dpkg -x "$package" "$build/sysroot"; done
  touch "$build/sysroot/done"
fi
if [ ! -e "$build/site/done" ]; then
  say "fetching numpy and pytest for arm64 into build-arm/site"
  rm -rf "$build/site"
  python3 -m pip install --quiet --disable-pip-version-check --target "$build/site" --only-binary=:all: --implementation cp \
    --python-version 3.11 --platform manylinux_2_28_aarch64 --platform manylinux2014_aarch64 \
    "numpy>=1.26" "pytest>=8,<10" "pytest-timeout>=2.3,<3"
  touch "$build/site/done"
fi

say "compiling for arm64"
pybind11=$(python3 -m pybind11 --cmakedir)
CMAKE_TOOLCHAIN_FILE=$PWD/tests/arm/toolchain.cmake cmake -S . -B "$build/cmake" -G Ninja \
  -DMAGA_CUDA=OFF -DMAGA_BENCH=ON -DMAGA_WERROR=ON -Dpybind11_DIR="$pybind11" >/dev/null
cmake --build "$build/cmake"
rm -rf "$build/package"
mkdir -p "$build/package"
cp -r python/maga_transformer "$build/package"
cmake --install "$build/cmake" --prefix "$build/package" >/dev/null

# A processor of the kind that servers have: dot products, no SVE.
qemu=(qemu-aarch64-static -cpu neoverse-n1 -L "$build/sysroot")
weights=(bf16 "q4 g32 offset" "q8 g32")
if [ "${FULL:-0}" = 1 ]; then weights=(""); fi

say "matrix kernels against plain loops"
for isa in neon neon_dotprod; do
  for weight in "${weights[@]}"; do "${qemu[@]}" "$build/cmake/benchmarks/cpu_linear" check $isa 0 "$weight"; done
done

say "op tests"
PYTHONPATH=$build/package:$build/site PYTHONDONTWRITEBYTECODE=1 "${qemu[@]}" "$build/sysroot/usr/bin/python3.11" -s -m pytest \
  tests/ops -k neon -p no:cacheprovider -o timeout=3000 "$@"
