// Asks the processor what it can do.
#include "backends/cpu/isa.h"

#include <iterator>
#include <string>

#include "core/check.h"

#if defined(__aarch64__)
#include <asm/hwcap.h>
#include <sys/auxv.h>
#endif

namespace maga::cpu {
namespace {

constexpr std::string_view kNames[] = {"generic", "avx2", "avx512", "avx512_vnni", "neon", "neon_dotprod"};

bool usable(Isa isa) {
  switch (isa) {
    case Isa::generic: return true;
#if defined(__x86_64__)
    case Isa::avx2:
      return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && __builtin_cpu_supports("f16c") &&
             __builtin_cpu_supports("bmi2");
    case Isa::avx512:
      return usable(Isa::avx2) && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
             __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl");
    case Isa::avx512_vnni: return usable(Isa::avx512) && __builtin_cpu_supports("avx512vnni");
#elif defined(__aarch64__)
    case Isa::neon: return true;
    case Isa::neon_dotprod: return (getauxval(AT_HWCAP) & HWCAP_ASIMDDP) && (getauxval(AT_HWCAP) & HWCAP_ASIMDHP);
#endif
    default: return false;
  }
}

}  // namespace

std::string_view name_of(Isa isa) { return kNames[static_cast<int>(isa)]; }

std::vector<Isa> usable_isas() {
  std::vector<Isa> isas;
  for (size_t i = 0; i < std::size(kNames); ++i)
    if (usable(static_cast<Isa>(i))) isas.push_back(static_cast<Isa>(i));
  return isas;
}

Isa best_isa() { return usable_isas().back(); }

Isa parse_isa(std::string_view name) {
  if (name.empty()) return best_isa();
  std::string valid;
  for (const Isa isa : usable_isas()) {
    if (name_of(isa) == name) return isa;
    valid += (valid.empty() ? "" : ", ") + std::string(name_of(isa));
  }
  MAGA_REQUIRE(false, "isa: '", name, "' is not one that this machine can run; choose from: ", valid);
}

}  // namespace maga::cpu
