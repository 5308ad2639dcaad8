// Hopper's instructions for the linears: mbarriers, clusters, tensor copies (TMA), wgmma. PTX ISA, chapters "mbarrier",
// "cp.async.bulk.tensor" and "wgmma". Device code for sm_90a only.
#pragma once

#include <cuda.h>
#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_fp8.h>

#include <cstdint>

namespace maga::cuda::hopper {

__device__ __forceinline__ uint32_t shared_address(const void* p) { return static_cast<uint32_t>(__cvta_generic_to_shared(p)); }

__device__ __forceinline__ void barrier_init(uint32_t barrier, uint32_t count) {
  asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(barrier), "r"(count) : "memory");
}
// Makes initialised barriers known to the copy engine.
__device__ __forceinline__ void barrier_init_fence() {
  asm volatile("fence.mbarrier_init.release.cluster;\n fence.proxy.async.shared::cta;" ::: "memory");
}
__device__ __forceinline__ void barrier_expect(uint32_t barrier, uint32_t bytes) {
  asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(barrier), "r"(bytes) : "memory");
}
__device__ __forceinline__ void barrier_arrive(uint32_t barrier) {
  asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(barrier) : "memory");
}
// Knows the phase under way and the one before, no further back.
__device__ __forceinline__ void barrier_wait(uint32_t barrier, uint32_t parity) {
  uint32_t done = 0;
  while (!done)
    asm volatile("{.reg .pred p;\n mbarrier.try_wait.parity.shared::cta.b64 p, [%1], %2;\n selp.u32 %0, 1, 0, p;}"
                 : "=r"(done)
                 : "r"(barrier), "r"(parity)
                 : "memory");
}

// Clusters: the same address in another CTA, and an arrival there.
__device__ __forceinline__ uint32_t cluster_rank() {
  uint32_t rank;
  asm volatile("mov.u32 %0, %%cluster_ctarank;" : "=r"(rank));
  return rank;
}
__device__ __forceinline__ uint32_t address_in(uint32_t rank, uint32_t address) {
  uint32_t there;
  asm volatile("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(there) : "r"(address), "r"(rank));
  return there;
}
// Says that something was read, and orders nothing else: with .release.cluster it would wait for memory, half a microsecond.
__device__ __forceinline__ void barrier_arrive_there(uint32_t barrier) {
  asm volatile("mbarrier.arrive.shared::cluster.b64 _, [%0];" ::"r"(barrier) : "memory");
}
// Orders nothing but what barrier_init_fence() does.
__device__ __forceinline__ void cluster_sync() {
  asm volatile("barrier.cluster.arrive.relaxed;\n barrier.cluster.wait;" ::: "memory");
}

// L2 policies, as createpolicy.fractional makes them for a fraction of 1.
constexpr uint64_t kEvictNormal = 0x1000000000000000ull;
constexpr uint64_t kEvictFirst = 0x12F0000000000000ull;
constexpr uint64_t kEvictLast = 0x14F0000000000000ull;

__device__ __forceinline__ void prefetch_map(const CUtensorMap* map) {
  asm volatile("prefetch.tensormap [%0];" ::"l"(map) : "memory");
}
__device__ __forceinline__ void copy_2d(uint32_t to, const CUtensorMap* map, int c0, int c1, uint32_t barrier, uint64_t policy) {
  asm volatile(
      "cp.async.bulk.tensor.2d.shared::cluster.global.tile.mbarrier::complete_tx::bytes.L2::cache_hint "
      "[%0], [%1, {%2, %3}], [%4], %5;" ::"r"(to),
      "l"(map), "r"(c0), "r"(c1), "r"(barrier), "l"(policy)
      : "memory");
}
// Bytes as they lie, from and to addresses of whole 16 bytes.
__device__ __forceinline__ void copy_bytes(uint32_t to, const void* from, uint32_t bytes, uint32_t barrier) {
  asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::"r"(to), "l"(from),
               "r"(bytes), "r"(barrier)
               : "memory");
}
// Coordinates (0, c1, c2).
__device__ __forceinline__ void copy_units(uint32_t to, const CUtensorMap* map, int c1, int c2, uint32_t barrier, uint64_t policy) {
  asm volatile(
      "cp.async.bulk.tensor.3d.shared::cluster.global.tile.mbarrier::complete_tx::bytes.L2::cache_hint "
      "[%0], [%1, {%2, %3, %4}], [%5], %6;" ::"r"(to),
      "l"(map), "r"(0), "r"(c1), "r"(c2), "r"(barrier), "l"(policy)
      : "memory");
}
// Coordinates (0, c1, 0, c3).
__device__ __forceinline__ void copy_paired_units(uint32_t to, const CUtensorMap* map, int c1, int c3, uint32_t barrier,
                                                  uint64_t policy) {
  asm volatile(
      "cp.async.bulk.tensor.4d.shared::cluster.global.tile.mbarrier::complete_tx::bytes.L2::cache_hint "
      "[%0], [%1, {%2, %3, %2, %4}], [%5], %6;" ::"r"(to),
      "l"(map), "r"(0), "r"(c1), "r"(c3), "r"(barrier), "l"(policy)
      : "memory");
}
// Coordinates (c0, 0, 0, c3).
__device__ __forceinline__ void copy_4d(uint32_t to, const CUtensorMap* map, int c0, int c3, uint32_t barrier, uint64_t policy) {
  asm volatile(
      "cp.async.bulk.tensor.4d.shared::cluster.global.tile.mbarrier::complete_tx::bytes.L2::cache_hint "
      "[%0], [%1, {%2, %3, %3, %4}], [%5], %6;" ::"r"(to),
      "l"(map), "r"(c0), "r"(0), "r"(c3), "r"(barrier), "l"(policy)
      : "memory");
}
// Coordinates (c0, 0, 0, c3, c4).
__device__ __forceinline__ void copy_5d(uint32_t to, const CUtensorMap* map, int c0, int c3, int c4, uint32_t barrier,
                                        uint64_t policy) {
  asm volatile(
      "cp.async.bulk.tensor.5d.shared::cluster.global.tile.mbarrier::complete_tx::bytes.L2::cache_hint "
      "[%0], [%1, {%2, %3, %3, %4, %5}], [%6], %7;" ::"r"(to),
      "l"(map), "r"(c0), "r"(0), "r"(c3), "r"(c4), "r"(barrier), "l"(policy)
      : "memory");
}

// The same to each CTA of the cluster in `ctas`, a bit each: to the same address, counted by the same barrier of that CTA.
__device__ __forceinline__ void copy_2d_to_all(uint32_t to, const CUtensorMap* map, int c0, int c1, uint32_t barrier, uint16_t ctas,
                                               uint64_t policy) {
  asm volatile(
      "cp.async.bulk.tensor.2d.shared::cluster.global.tile.mbarrier::complete_tx::bytes.multicast::cluster.L2::cache_hint "
      "[%0], [%1, {%2, %3}], [%4], %5, %6;" ::"r"(to),
      "l"(map), "r"(c0), "r"(c1), "r"(barrier), "h"(ctas), "l"(policy)
      : "memory");
}
__device__ __forceinline__ void copy_4d_to_all(uint32_t to, const CUtensorMap* map, int c0, int c3, uint32_t barrier, uint16_t ctas,
                                               uint64_t policy) {
  asm volatile(
      "cp.async.bulk.tensor.4d.shared::cluster.global.tile.mbarrier::complete_tx::bytes.multicast::cluster.L2::cache_hint "
      "[%0], [%1, {%2, %3, %3, %4}], [%5], %6, %7;" ::"r"(to),
      "l"(map), "r"(c0), "r"(0), "r"(c3), "r"(barrier), "h"(ctas), "l"(policy)
      : "memory");
}

// Registers of a warpgroup's threads, from the share that the kernel was launched with to another.
template <int kRegisters>
__device__ __forceinline__ void take_registers() {
  asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(kRegisters));
}
template <int kRegisters>
__device__ __forceinline__ void leave_registers() {
  asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(kRegisters));
}

// What this thread has stored to shared memory becomes known to wgmma.
__device__ __forceinline__ void stored_fence() { asm volatile("fence.proxy.async.shared::cta;" ::: "memory"); }
__device__ __forceinline__ void wgmma_fence() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }
__device__ __forceinline__ void wgmma_commit() { asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory"); }
template <int kGroups>
__device__ __forceinline__ void wgmma_wait() {
  asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(kGroups) : "memory");
}
// A k-major tile of 128-byte rows in the 128-byte swizzle, eight rows to an atom of 1,024 bytes. The next 32 bytes: + 2; the next
// eight rows: + 64.
__device__ __forceinline__ uint64_t wgmma_tile(uint32_t address) {
  return static_cast<uint64_t>((address & 0x3FFFF) >> 4) | 1ull << 16 | 64ull << 32 | 1ull << 62;
}

// d (64 rows, N tokens; N / 2 values a thread) = a (64, 32 bytes) · b (N, 32 bytes)ᵀ, plus d when `add`: 16 columns of bf16 or
// fp16, 32 of e4m3.
#define R4(i) "+f"(d[i]), "+f"(d[i + 1]), "+f"(d[i + 2]), "+f"(d[i + 3])
#define R8(i) R4(i), R4(i + 4)
#define R16(i) R8(i), R8(i + 8)
#define R32(i) R16(i), R16(i + 16)
#define R48(i) R32(i), R16(i + 32)
#define R64(i) R32(i), R32(i + 32)
#define R80(i) R64(i), R16(i + 64)
#define R96(i) R64(i), R32(i + 64)
#define R112(i) R96(i), R16(i + 96)
#define R128(i) R64(i), R64(i + 64)
#define S4 "%0,%1,%2,%3"
#define S8 S4 ",%4,%5,%6,%7"
#define S16 S8 ",%8,%9,%10,%11,%12,%13,%14,%15"
#define S32 S16 ",%16,%17,%18,%19,%20,%21,%22,%23,%24,%25,%26,%27,%28,%29,%30,%31"
#define S48 S32 ",%32,%33,%34,%35,%36,%37,%38,%39,%40,%41,%42,%43,%44,%45,%46,%47"
#define S64 S48 ",%48,%49,%50,%51,%52,%53,%54,%55,%56,%57,%58,%59,%60,%61,%62,%63"
#define S80 S64 ",%64,%65,%66,%67,%68,%69,%70,%71,%72,%73,%74,%75,%76,%77,%78,%79"
#define S96                                                                                                                        \
  S64 ",%64,%65,%66,%67,%68,%69,%70,%71,%72,%73,%74,%75,%76,%77,%78,%79,%80,%81,%82,%83,%84,%85,%86,%87,%88,%89,%90,%91,%92,%93,%" \
      "94,%95"
#define S112 S96 ",%96,%97,%98,%99,%100,%101,%102,%103,%104,%105,%106,%107,%108,%109,%110,%111"
#define S128 S112 ",%112,%113,%114,%115,%116,%117,%118,%119,%120,%121,%122,%123,%124,%125,%126,%127"
#define MAGA_WGMMA(T, NAME, K, MORE, N, SUMS, RESULTS, A, B, ADD)                                                             \
  __device__ __forceinline__ void wgmma(T, float (&d)[N / 2], uint64_t a, uint64_t b, int add) {                              \
    asm volatile("{.reg .pred p;\n setp.ne.b32 p, " ADD ", 0;\n wgmma.mma_async.sync.aligned.m64n" #N K ".f32." NAME "." NAME \
                 " {" SUMS "}, " A ", " B ", p, 1, 1" MORE ";}"                                                               \
                 : RESULTS                                                                                                    \
                 : "l"(a), "l"(b), "r"(add));                                                                                 \
  }
#define MAGA_WGMMA_ALL(T, NAME, K, MORE)                                   \
  MAGA_WGMMA(T, NAME, K, MORE, 8, S4, R4(0), "%4", "%5", "%6")             \
  MAGA_WGMMA(T, NAME, K, MORE, 16, S8, R8(0), "%8", "%9", "%10")           \
  MAGA_WGMMA(T, NAME, K, MORE, 32, S16, R16(0), "%16", "%17", "%18")       \
  MAGA_WGMMA(T, NAME, K, MORE, 64, S32, R32(0), "%32", "%33", "%34")       \
  MAGA_WGMMA(T, NAME, K, MORE, 96, S48, R48(0), "%48", "%49", "%50")       \
  MAGA_WGMMA(T, NAME, K, MORE, 128, S64, R64(0), "%64", "%65", "%66")      \
  MAGA_WGMMA(T, NAME, K, MORE, 160, S80, R80(0), "%80", "%81", "%82")      \
  MAGA_WGMMA(T, NAME, K, MORE, 192, S96, R96(0), "%96", "%97", "%98")      \
  MAGA_WGMMA(T, NAME, K, MORE, 224, S112, R112(0), "%112", "%113", "%114") \
  MAGA_WGMMA(T, NAME, K, MORE, 256, S128, R128(0), "%128", "%129", "%130")
MAGA_WGMMA_ALL(__nv_bfloat16, "bf16", "k16", ", 0, 0")
MAGA_WGMMA_ALL(__half, "f16", "k16", ", 0, 0")
MAGA_WGMMA_ALL(__nv_fp8_e4m3, "e4m3", "k32", "")
// The same with `a` in registers: of a warp's 16 rows and 16 columns a thread has rows g and g + 8 of columns 2 t + {0, 1}, then
// the same of columns 8 + 2 t + {0, 1}, for g = lane / 4, t = lane % 4.
#define MAGA_WGMMA_REGISTERS(T, NAME, N, SUMS, RESULTS, A, B, ADD)                                                             \
  __device__ __forceinline__ void wgmma(T, float (&d)[N / 2], const uint32_t (&a)[4], uint64_t b, int add) {                   \
    asm volatile("{.reg .pred p;\n setp.ne.b32 p, " ADD ", 0;\n wgmma.mma_async.sync.aligned.m64n" #N "k16.f32." NAME "." NAME \
                 " {" SUMS "}, {" A "}, " B ", p, 1, 1, 0;}"                                                                   \
                 : RESULTS                                                                                                     \
                 : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"(add));                                              \
  }
#define MAGA_WGMMA_ALL_REGISTERS(T, NAME)                                            \
  MAGA_WGMMA_REGISTERS(T, NAME, 8, S4, R4(0), "%4,%5,%6,%7", "%8", "%9")             \
  MAGA_WGMMA_REGISTERS(T, NAME, 16, S8, R8(0), "%8,%9,%10,%11", "%12", "%13")        \
  MAGA_WGMMA_REGISTERS(T, NAME, 32, S16, R16(0), "%16,%17,%18,%19", "%20", "%21")    \
  MAGA_WGMMA_REGISTERS(T, NAME, 64, S32, R32(0), "%32,%33,%34,%35", "%36", "%37")    \
  MAGA_WGMMA_REGISTERS(T, NAME, 128, S64, R64(0), "%64,%65,%66,%67", "%68", "%69")   \
  MAGA_WGMMA_REGISTERS(T, NAME, 192, S96, R96(0), "%96,%97,%98,%99", "%100", "%101") \
  MAGA_WGMMA_REGISTERS(T, NAME, 256, S128, R128(0), "%128,%129,%130,%131", "%132", "%133")
MAGA_WGMMA_ALL_REGISTERS(__nv_bfloat16, "bf16")
MAGA_WGMMA_ALL_REGISTERS(__half, "f16")
#undef MAGA_WGMMA_ALL_REGISTERS
#undef MAGA_WGMMA_ALL
#undef MAGA_WGMMA
#undef MAGA_WGMMA_REGISTERS
#undef R4
#undef R8
#undef R16
#undef R32
#undef R48
#undef R64
#undef R80
#undef R96
#undef R112
#undef R128
#undef S4
#undef S8
#undef S16
#undef S32
#undef S48
#undef S64
#undef S80
#undef S96
#undef S112
#undef S128

}  // namespace maga::cuda::hopper
