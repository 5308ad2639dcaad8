# Cross-compiles for 64-bit ARM with Debian's compiler; Python's headers come from the arm64 packages that run.sh unpacks.
set(CMAKE_SYSTEM_NAME Linux)
set(CMAKE_SYSTEM_PROCESSOR aarch64)
set(CMAKE_CXX_COMPILER aarch64-linux-gnu-g++)

get_filename_component(ARM_INCLUDE ${CMAKE_CURRENT_LIST_DIR}/../../build-arm/sysroot/usr/include ABSOLUTE)
set(CMAKE_CXX_STANDARD_INCLUDE_DIRECTORIES ${ARM_INCLUDE})  # python3.11/pyconfig.h includes aarch64-linux-gnu/...
set(PYBIND11_USE_CROSSCOMPILING ON)                         # so it asks no interpreter
set(Python_INCLUDE_DIR ${ARM_INCLUDE}/python3.11)
set(PYTHON_MODULE_EXTENSION .so)
set(PYTHON_IS_DEBUG OFF)
