// The parts of the extension module; each file binds one folder of the core.
#pragma once

#include <pybind11/pybind11.h>

#include <string>
#include <variant>
#include <vector>

#include "core/dtype.h"

namespace maga {

DType parse_dtype(const std::string& text);  // fp32, fp16, bf16
// The type of keys and values in all cache layers, or in each.
using KvDTypes = std::variant<std::string, std::vector<std::string>>;
std::vector<DType> parse_kv_dtypes(const KvDTypes& text);

void bind_program(pybind11::module_& m);
void bind_backend(pybind11::module_& m);
void bind_engine(pybind11::module_& m);
void bind_testing(pybind11::module_& m);

}  // namespace maga
