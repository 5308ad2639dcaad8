// Python's view of cpp/backends: packing weights, loading a program, running a step by hand (tests and benchmarks).
#include <pybind11/numpy.h>
#include <pybind11/stl.h>

#include <optional>

#include "backends/backend.h"
#include "bindings/bind.h"
#include "program/quantize.h"

namespace py = pybind11;

namespace maga {

namespace {

using FloatRows = py::array_t<float, py::array::c_style | py::array::forcecast>;
using Ids = std::vector<int32_t>;

// What numpy calls the elements of a weight; bf16, which it lacks, travels as its bits.
const char* numpy_name(DType dtype) {
  switch (dtype) {
    case DType::f32: return "float32";
    case DType::f16: return "float16";
    case DType::bf16: return "uint16";
    case DType::u8: return "uint8";
    default: MAGA_CHECK(false, "no part of a weight is ", name_of(dtype));
  }
}

// A tensor over a numpy array's memory. It keeps the array alive and lets go of it under the GIL, on whatever thread.
Tensor view_of(const py::array& array, DType dtype, std::string_view name, std::string_view part) {
  const py::dtype found = array.dtype();  // a type of the other byte order differs too
  MAGA_REQUIRE(found.equal(py::dtype(numpy_name(dtype))), name, ": ", part, " has the type ", py::str(found).cast<std::string>(),
               " where ", numpy_name(dtype), " is needed");
  MAGA_REQUIRE(array.flags() & py::array::c_style, name, ": ", part, " is not contiguous");
  MAGA_REQUIRE(array.flags() & py::detail::npy_api::NPY_ARRAY_ALIGNED_, name, ": ", part, " is not aligned");
  Tensor tensor{.data = static_cast<const std::byte*>(array.data()), .dtype = dtype, .shape = {}, .owner = nullptr};
  for (py::ssize_t i = 0; i < array.ndim(); ++i) tensor.shape.push_back(array.shape(i));
  auto* held = new py::object(array);
  tensor.owner = std::shared_ptr<const void>(held, [](py::object* object) {
    py::gil_scoped_acquire gil;
    delete object;
  });
  return tensor;
}

std::shared_ptr<const Weight> pack_released(Backend& backend, const WeightSpec& spec, const Canonical& weight) {
  py::gil_scoped_release release;
  return backend.pack(spec, weight);
}

Dense dense_of(const py::array& values, const std::string& dtype, std::string_view name) {
  return {view_of(values, parse_dtype(dtype), name, "values")};
}

struct AffineNumbers {
  int bits;
  int64_t group;
  int zero;
};

Affine affine_of(const py::array& codes, const AffineNumbers& numbers, const py::array& scale,
                 const std::optional<py::array>& offset, std::string_view name) {
  return {.codes = view_of(codes, DType::u8, name, "codes"),
          .bits = numbers.bits,
          .group = numbers.group,
          .scale = view_of(scale, DType::f32, name, "scale"),
          .offset = offset ? view_of(*offset, DType::f32, name, "offset") : Tensor{},
          .zero = numbers.zero};
}

Float8 float8_of(const py::array& codes, std::pair<int64_t, int64_t> block, const py::array& scale, std::string_view name) {
  return {.codes = view_of(codes, DType::u8, name, "codes"),
          .high = block.first,
          .wide = block.second,
          .scale = view_of(scale, DType::f32, name, "scale")};
}

// A stack with its name for messages.
struct NamedStack {
  std::string name;
  std::unique_ptr<WeightStack> stack;

  void add(const Canonical& matrix) {
    py::gil_scoped_release release;
    stack->add(matrix);
  }
};

// An array over a tensor's memory, which it keeps alive.
template <typename T>
py::array_t<T> array_of(const Tensor& tensor) {
  py::capsule owner(new std::shared_ptr<const void>(tensor.owner),
                    [](void* held) { delete static_cast<std::shared_ptr<const void>*>(held); });
  return py::array_t<T>(tensor.shape, tensor.as<T>(), owner);
}

void bind_quantize(py::module_& m) {
  m.def(
      "quantize",
      [](const py::array& values, const std::string& dtype, int bits, int64_t group, const std::string& name) {
        const Dense dense = dense_of(values, dtype, name);
        Affine affine;
        {
          py::gil_scoped_release release;
          affine = quantize(dense.values, bits, group, name);
        }
        return py::make_tuple(array_of<uint8_t>(affine.codes), array_of<float>(affine.scale), affine.zero);
      },
      py::arg("values"), py::arg("dtype"), py::kw_only(), py::arg("bits"), py::arg("group"), py::arg("name"));
  m.def(
      "quantize_fp8",
      [](const py::array& values, const std::string& dtype, const std::string& name) {
        const Dense dense = dense_of(values, dtype, name);
        Float8 rounded;
        {
          py::gil_scoped_release release;
          rounded = quantize_fp8(dense.values, name);
        }
        return py::make_tuple(array_of<uint8_t>(rounded.codes), array_of<float>(rounded.scale));
      },
      py::arg("values"), py::arg("dtype"), py::kw_only(), py::arg("name"));
}

void bind_stack(py::module_& m) {
  py::class_<NamedStack>(m, "WeightStack")
      .def(
          "add_dense",
          [](NamedStack& s, const py::array& values, const std::string& dtype) { s.add(dense_of(values, dtype, s.name)); },
          py::arg("values"), py::arg("dtype"))
      .def(
          "add_affine",
          [](NamedStack& s, const py::array& codes, int bits, int64_t group, const py::array& scale,
             const std::optional<py::array>& offset,
             int zero) { s.add(affine_of(codes, {bits, group, zero}, scale, offset, s.name)); },
          py::arg("codes"), py::kw_only(), py::arg("bits"), py::arg("group"), py::arg("scale"), py::arg("offset"), py::arg("zero"))
      .def(
          "add_float8",
          [](NamedStack& s, const py::array& codes, std::pair<int64_t, int64_t> block, const py::array& scale) {
            s.add(float8_of(codes, block, scale, s.name));
          },
          py::arg("codes"), py::kw_only(), py::arg("block"), py::arg("scale"))
      .def("finish", [](NamedStack& s) { return std::const_pointer_cast<Weight>(s.stack->finish()); });
}

// What a step's spans point into.
struct StepArrays {
  Ids ids, positions, sequence_start, kv_length, page_start, pages, logit_rows;
  std::optional<Ids> prompt_length;  // none: kv_length
  std::vector<uint64_t> tree;
  Ids context, block_positions;

  Step step() const {
    return {.ids = ids,
            .positions = positions,
            .sequence_start = sequence_start,
            .kv_length = kv_length,
            .prompt_length = prompt_length ? *prompt_length : kv_length,
            .page_start = page_start,
            .pages = pages,
            .logit_rows = logit_rows,
            .tree = tree,
            .context = context,
            .block_positions = block_positions};
  }
};

void bind_limits(py::module_& m) {
  py::class_<Limits>(m, "Limits")
      .def_readonly("tokens", &Limits::tokens)
      .def_readonly("sequences", &Limits::sequences)
      .def_readonly("logit_rows", &Limits::logit_rows)
      .def_readonly("pages", &Limits::pages)
      .def_readonly("page_tokens", &Limits::page_tokens);
}

void bind_draw(py::module_& m) {
  py::class_<Draw>(m, "Draw").def(py::init([](int32_t row, float temperature, int32_t top_k, float top_p, float min_p,
                                              uint64_t seed, uint64_t stream, uint64_t index) {
                                    return Draw{.row = row,
                                                .temperature = temperature,
                                                .top_k = top_k,
                                                .top_p = top_p,
                                                .min_p = min_p,
                                                .seed = seed,
                                                .stream = stream,
                                                .index = index};
                                  }),
                                  py::kw_only(), py::arg("row"), py::arg("temperature") = 0.0f, py::arg("top_k") = 0,
                                  py::arg("top_p") = 1.0f, py::arg("min_p") = 0.0f, py::arg("seed") = 0, py::arg("stream") = 0,
                                  py::arg("index") = 0);
}

void bind_executable(py::module_& m) {
  py::class_<Executable, py::smart_holder>(m, "Executable")
      .def(
          "run",
          [](Executable& e, Ids ids, Ids positions, Ids sequence_start, Ids kv_length, Ids page_start, Ids pages, Ids logit_rows,
             std::optional<Ids> prompt_length, std::vector<uint64_t> tree, Ids context, Ids block_positions) {
            const StepArrays arrays{std::move(ids),        std::move(positions),      std::move(sequence_start),
                                    std::move(kv_length),  std::move(page_start),     std::move(pages),
                                    std::move(logit_rows), std::move(prompt_length),  std::move(tree),
                                    std::move(context),    std::move(block_positions)};
            py::gil_scoped_release release;
            e.run(arrays.step());
          },
          py::kw_only(), py::arg("ids"), py::arg("positions"), py::arg("sequence_start"), py::arg("kv_length"),
          py::arg("page_start"), py::arg("pages"), py::arg("logit_rows"), py::arg("prompt_length") = py::none(),
          py::arg("tree") = std::vector<uint64_t>{}, py::arg("context") = Ids{}, py::arg("block_positions") = Ids{})
      .def(
          "enqueue",
          [](Executable& e, const std::vector<Draw>& draws, Ids ids, Ids positions, Ids sequence_start, Ids kv_length,
             Ids page_start, Ids pages, Ids logit_rows, std::optional<Ids> prompt_length, std::vector<uint64_t> tree, Ids context,
             Ids block_positions) {
            const StepArrays arrays{std::move(ids),        std::move(positions),      std::move(sequence_start),
                                    std::move(kv_length),  std::move(page_start),     std::move(pages),
                                    std::move(logit_rows), std::move(prompt_length),  std::move(tree),
                                    std::move(context),    std::move(block_positions)};
            py::gil_scoped_release release;
            e.enqueue(arrays.step(), draws);
          },
          py::arg("draws"), py::kw_only(), py::arg("ids"), py::arg("positions"), py::arg("sequence_start"), py::arg("kv_length"),
          py::arg("page_start"), py::arg("pages"), py::arg("logit_rows"), py::arg("prompt_length") = py::none(),
          py::arg("tree") = std::vector<uint64_t>{}, py::arg("context") = Ids{}, py::arg("block_positions") = Ids{})
      .def("collect",
           [](Executable& e) {
             std::vector<std::pair<int32_t, bool>> drawn;
             py::gil_scoped_release release;
             for (const Drawn& each : e.collect()) drawn.emplace_back(each.token, each.finite != 0);
             return drawn;
           })
      .def_property_readonly("asynchronous", &Executable::asynchronous)
      .def_property_readonly("limits", [](const Executable& e) { return e.limits(); })
      .def("logits",
           [](Executable& e) {
             const auto logits = e.logits();
             const int64_t width = e.program().logits_width();
             return py::array_t<float>({static_cast<int64_t>(logits.size()) / width, width}, logits.data());
           })
      .def(
          "fill_pages",
          [](Executable& e, int32_t layer, const FloatRows& keys, const FloatRows& values) {
            e.fill_pages(layer, {keys.data(), static_cast<size_t>(keys.size())},
                         {values.data(), static_cast<size_t>(values.size())});
          },
          py::arg("layer"), py::arg("keys"), py::arg("values"))
      .def("copy_page", &Executable::copy_page, py::arg("source"), py::arg("target"))
      .def(
          "write_value",
          [](Executable& e, ValueId value, const FloatRows& rows) {
            e.write_value(value, {rows.data(), static_cast<size_t>(rows.size())});
          },
          py::arg("value"), py::arg("rows"))
      .def(
          "read_value",
          [](Executable& e, ValueId value, int64_t rows) {
            const std::vector<float> data = e.read_value(value, rows);
            return py::array_t<float>({rows, rows ? static_cast<int64_t>(data.size()) / rows : 0}, data.data());
          },
          py::arg("value"), py::arg("rows"))
      .def_property_readonly("program", [](const Executable& e) { return e.program(); })
      .def_property_readonly("buffer_bytes", &Executable::buffer_bytes)
      .def_property_readonly("op_seconds", &Executable::op_seconds);
}

void bind_cuda(py::module_& m) {
  py::class_<CudaDevice>(m, "CudaDevice")
      .def_readonly("name", &CudaDevice::name)
      .def_readonly("total_bytes", &CudaDevice::total_bytes)
      .def_readonly("free_bytes", &CudaDevice::free_bytes)
      .def_readonly("capability", &CudaDevice::capability)
      .def_readonly("bytes_per_second", &CudaDevice::bytes_per_second)
      .def_readonly("flops_per_second", &CudaDevice::flops_per_second);
  m.def("cuda_devices", [] {
    std::string why;
    std::vector<CudaDevice> devices = cuda_devices(&why);
    return std::make_pair(std::move(devices), std::move(why));
  });
  m.def(
      "cuda_backend",
      [](int device, const std::string& compute, double memory_utilization, std::vector<std::string> library_folders) {
        const DType dtype = parse_dtype(compute);
        py::gil_scoped_release release;
        return make_cuda_backend({.device = device,
                                  .compute = dtype,
                                  .memory_utilization = memory_utilization,
                                  .library_folders = std::move(library_folders)});
      },
      py::arg("device") = 0, py::arg("compute") = "bf16", py::arg("memory_utilization") = 0.9,
      py::arg("library_folders") = std::vector<std::string>{});
}

}  // namespace

void bind_backend(py::module_& m) {
  py::class_<Weight, std::shared_ptr<Weight>>(m, "Weight")
      .def_property_readonly("bytes", &Weight::bytes)
      .def_property_readonly("widened", &Weight::widened);
  bind_limits(m);
  bind_draw(m);
  bind_executable(m);
  bind_quantize(m);
  bind_stack(m);

  py::class_<Backend, std::shared_ptr<Backend>>(m, "Backend")
      .def("describe", &Backend::describe)
      .def(
          "pack_dense",
          [](Backend& b, const std::string& name, std::vector<int64_t> shape, const py::array& values, const std::string& dtype) {
            const Dense dense = dense_of(values, dtype, name);
            return std::const_pointer_cast<Weight>(pack_released(b, {name, {}, std::move(shape)}, dense));
          },
          py::arg("name"), py::arg("shape"), py::arg("values"), py::arg("dtype"))
      .def(
          "pack_affine",
          [](Backend& b, const std::string& name, std::vector<int64_t> shape, const py::array& codes, int bits, int64_t group,
             const py::array& scale, const std::optional<py::array>& offset, int zero) {
            const Affine affine = affine_of(codes, {bits, group, zero}, scale, offset, name);
            return std::const_pointer_cast<Weight>(pack_released(b, {name, {}, std::move(shape)}, affine));
          },
          py::arg("name"), py::arg("shape"), py::arg("codes"), py::kw_only(), py::arg("bits"), py::arg("group"), py::arg("scale"),
          py::arg("offset"), py::arg("zero"))
      .def(
          "pack_float8",
          [](Backend& b, const std::string& name, std::vector<int64_t> shape, const py::array& codes,
             std::pair<int64_t, int64_t> block, const py::array& scale) {
            const Float8 weight = float8_of(codes, block, scale, name);
            return std::const_pointer_cast<Weight>(pack_released(b, {name, {}, std::move(shape)}, weight));
          },
          py::arg("name"), py::arg("shape"), py::arg("codes"), py::kw_only(), py::arg("block"), py::arg("scale"))
      .def(
          "stack",
          [](Backend& b, const std::string& name, std::vector<int64_t> shape) {
            return NamedStack{name, b.stack({name, {}, std::move(shape)})};
          },
          py::arg("name"), py::arg("shape"))
      .def(
          "load",
          [](Backend& b, const Program& program, const std::vector<std::shared_ptr<Weight>>& weights, int64_t tokens,
             int64_t sequences, int64_t logit_rows, int64_t pages, int64_t page_tokens, const KvDTypes& kv_dtype) {
            const Limits limits{.tokens = tokens,
                                .sequences = sequences,
                                .logit_rows = logit_rows,
                                .pages = pages,
                                .page_tokens = page_tokens,
                                .kv_dtypes = parse_kv_dtypes(kv_dtype)};
            py::gil_scoped_release release;  // a device measures its largest step and captures graphs
            return b.load(program, {weights.begin(), weights.end()}, limits);
          },
          py::arg("program"), py::arg("weights"), py::kw_only(), py::arg("tokens"), py::arg("sequences"), py::arg("logit_rows"),
          py::arg("pages"), py::arg("page_tokens"), py::arg("kv_dtype"))
      .def("fused_ops", [](const Backend& b) {
        const FusedOps fused = b.fused_ops();
        return py::dict(py::arg("linear_residual") = fused.linear_residual, py::arg("gated_linear") = fused.gated_linear,
                        py::arg("prepare_qkv") = fused.prepare_qkv);
      });

  m.def(
      "cpu_backend",
      [](int threads, bool quantize_activations, std::string isa) {
        return make_cpu_backend({.threads = threads, .quantize_activations = quantize_activations, .isa = std::move(isa)});
      },
      py::arg("threads") = 0, py::arg("quantize_activations") = true, py::arg("isa") = "");
  m.def("reference_backend", &make_reference_backend);
  bind_cuda(m);
}

}  // namespace maga
