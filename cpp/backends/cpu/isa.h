// The instruction sets that the CPU kernels are compiled for, and the choice among them.
#pragma once

#include <cstdint>
#include <string_view>
#include <vector>

namespace maga::cpu {

// In rising order within an architecture.
enum class Isa : uint8_t { generic, avx2, avx512, avx512_vnni, neon, neon_dotprod };

std::string_view name_of(Isa isa);

// Those that this machine can run, in rising order; never empty.
std::vector<Isa> usable_isas();
Isa best_isa();

// "" is the best one. A name that is unknown, or that this machine cannot run, is an Error that lists those it can.
Isa parse_isa(std::string_view name);

}  // namespace maga::cpu
