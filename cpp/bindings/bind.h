// The parts of the extension module; each file binds one folder of the core.
#pragma once

#include <pybind11/pybind11.h>

namespace maga {

void bind_program(pybind11::module_& m);
void bind_backend(pybind11::module_& m);
void bind_engine(pybind11::module_& m);
void bind_testing(pybind11::module_& m);

}  // namespace maga
