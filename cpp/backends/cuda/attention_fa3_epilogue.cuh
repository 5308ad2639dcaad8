// FlashInfer's epilogue for sm_90 with barriers that hold; before the header that uses it.
//
// FlashInfer 0.6.6 lets every warp arrive at the barrier between its rows' way into shared memory and the reading of all rows, and
// then wait at that same barrier: that counts a warp twice, and half of the warps can go on before the others have written. On a
// card to itself the warps stay close enough together; under compute-sanitizer they do not, and rows come out wrong.
#pragma once

#define CollectiveEpilogue UnguardedEpilogue
#include <flashinfer/attention/hopper/epilogue.cuh>
#undef CollectiveEpilogue

namespace flashinfer {

template <typename Traits>
struct CollectiveEpilogue : UnguardedEpilogue<Traits> {
  using Base = UnguardedEpilogue<Traits>;

  // out: the tile's accumulators. The sums that `lse` is made from are not asked for anywhere.
  template <typename Place, typename Shared, typename Out, typename Lse, typename Mma>
  CUTLASS_DEVICE void store(const typename Base::Params& params, const Out& out, const Lse&, Shared& shared, Mma mma, int thread,
                            const Place& place) {
    using cutlass::arch::NamedBarrier;
    const int tile = cute::get<0>(place), head = cute::get<1>(place), first_row = cute::get<3>(place), rows = cute::get<5>(place);
    auto tile_in_shared = cute::make_tensor(cute::make_smem_ptr(shared.smem_o.data()), typename Base::SmemLayoutO{});
    auto to_shared = cute::make_tiled_copy_C(typename Base::SmemCopyAtomO{}, mma).get_thread_slice(thread);
    auto narrow = convert_type<typename Base::DTypeO>(out);
    // It takes the place of the values, which other warps may still read.
    NamedBarrier::sync(Base::NUM_MMA_THREADS, static_cast<int>(NamedBarriers::kValueEmpty));
    cute::copy(typename Base::SmemCopyAtomO{}, to_shared.retile_S(narrow), to_shared.partition_D(tile_in_shared));
    cutlass::arch::fence_view_async_shared();  // the next values come by the copy engine
    NamedBarrier::sync(Base::NUM_MMA_THREADS, cutlass::arch::ReservedNamedBarriers::EpilogueBarrier);
    write_O<Base::NUM_COPY_THREADS>(params.O_ptr, typename Base::TiledCopyO{}, params.layout_O,
                                    cute::select<0, 1>(typename Base::TileShape_PDV{}), tile_in_shared, thread, tile, head,
                                    first_row, rows, 0);
  }
};

}  // namespace flashinfer
