// The extension module `maga_transformer._core`, and how the core's errors become Python's.
#include "bindings/bind.h"
#include "core/check.h"

namespace py = pybind11;

PYBIND11_MODULE(_core, m) {
  static py::exception<maga::Error> maga_error(m, "MagaError", PyExc_RuntimeError);
  static py::exception<maga::Error> busy_error(m, "BusyError", maga_error.ptr());
  py::register_exception_translator([](std::exception_ptr pointer) {
    try {
      if (pointer) std::rethrow_exception(pointer);
    } catch (const maga::Error& error) {
      switch (error.kind()) {
        case maga::ErrorKind::invalid: py::set_error(PyExc_ValueError, error.what()); break;
        case maga::ErrorKind::missing: py::set_error(PyExc_FileNotFoundError, error.what()); break;
        case maga::ErrorKind::busy: py::set_error(busy_error, error.what()); break;
        case maga::ErrorKind::internal: py::set_error(maga_error, error.what()); break;
      }
    }
  });
  maga::bind_program(m);
  maga::bind_backend(m);
  maga::bind_engine(m);
  maga::bind_testing(m);
}
