// The lightest kept key of every KV head by radix, 11 bits and less at a time. The first round
// computes the keys, sums of weights over the query heads, and stores them; a single query head's
// logits are their own keys. All rounds are one launch: blocks of a later round wait for those of
// the one before, which the device starts first.
#include "kernels/select/large.cuh"

namespace sluice::cuda {
namespace {

struct Shared {
  std::uint32_t bins[kMostKeyBins];
  std::uint32_t part[kWarp];
  Crossing<std::uint32_t> found;
  KeyCut cut;
  RowInfo rows[kMostGroup];
};

// A KV head as one block sees it.
struct Place {
  std::int32_t head;
  Extent extent;
  const std::int32_t* list;  // [emit] or null
  std::uint32_t* keys;       // [key_chunks * kKeyChunk] or null
  std::uint32_t* bins;       // [kMostKeyBins], of this round
};

__device__ Place place_of(const LargeCall& call, std::int32_t head, int round, Shared* shared) {
  const SelectCall& c = call.call;
  Place place;
  place.head = head;
  place.extent = call.extents[head];
  place.list = c.head_list(head);
  place.keys = call.keys == nullptr
                   ? nullptr
                   : call.keys + static_cast<std::int64_t>(head) * call.key_chunks * kKeyChunk;
  place.bins =
      call.key_bins + (static_cast<std::int64_t>(round) * c.head_count + head) * kMostKeyBins;
  if (load_infos(call, head, shared->rows)) place.extent.emit = 0;
  return place;
}

// The keys of eight entries, and which of those are always kept; these have the key 0.
__device__ void compute_keys(const SelectCall& c, const Place& place, std::int32_t i,
                             const RowInfo* rows, std::uint32_t (&keys)[8], std::uint32_t& forced) {
  const std::uint32_t allowed = allowed8(c, place.list, place.extent, i);
  forced = allowed & free8(place.extent, i);
  const __half* const first = c.row(place.head, 0);
  const auto load = [&](int g) {
    return load8_raw(c, first + g * c.stride, place.extent.total, i);
  };
  if (i < place.extent.emit) {
    keys8(c, c.group, rows, allowed & ~forced, load, keys);
    return;
  }
#pragma unroll
  for (std::uint32_t& key : keys) key = 0;
}

__device__ void load_keys(const std::uint32_t* from, std::uint32_t (&keys)[8]) {
  const uint4 low = reinterpret_cast<const uint4*>(from)[0];
  const uint4 high = reinterpret_cast<const uint4*>(from)[1];
#pragma unroll
  for (int w = 0; w < 4; ++w) {
    keys[w] = word_of(low, w);
    keys[4 + w] = word_of(high, w);
  }
}

__device__ void store_keys(const std::uint32_t (&keys)[8], std::uint32_t* to) {
  reinterpret_cast<uint4*>(to)[0] = make_uint4(keys[0], keys[1], keys[2], keys[3]);
  reinterpret_cast<uint4*>(to)[1] = make_uint4(keys[4], keys[5], keys[6], keys[7]);
}

struct Counts {
  std::uint32_t forced = 0;
  std::uint32_t available = 0;
};

__device__ void count_keys(const LargeCall& call, const Place& place, const KeyRound& view,
                           int round, std::int32_t i, Counts& counts, Shared* shared) {
  std::uint32_t keys[8];
  std::uint32_t forced = 0;
  if (round == 0 || place.keys == nullptr) {
    compute_keys(call.call, place, i, shared->rows, keys, forced);
    if (place.keys != nullptr) store_keys(keys, place.keys + i);
  } else {
    load_keys(place.keys + i, keys);
  }
  counts.forced += static_cast<std::uint32_t>(__popc(forced));
#pragma unroll
  for (int e = 0; e < 8; ++e) {
    if (!view.concerns(keys[e])) continue;
    ++counts.available;
    atomicAdd(shared->bins + view.bin(keys[e]), 1u);
  }
}

// By the last block of a head: where the wanted keys end.
__device__ void finish_round(const LargeCall& call, const Place& place, int round, Shared* shared) {
  const int group = call.call.group;
  if (threadIdx.x == 0) {
    shared->cut = call.cuts[place.head];
    if (round == 0) begin_cut(call.call, place.extent, shared->cut);
  }
  __syncthreads();
  if (shared->cut.settled == 0) {
    const int last = key_bins(group, round) - 1;
    const auto bin_of = [&](std::int32_t i) { return place.bins[last - i]; };
    find_crossing(bin_of, last + 1, shared->cut.ties, &shared->found, shared->part);
    if (threadIdx.x == 0) {
      advance_cut(shared->cut, group, round, shared->found, bin_of(shared->found.bin));
    }
  }
  if (threadIdx.x != 0) return;
  call.cuts[place.head] = shared->cut;
  __threadfence();
  *static_cast<volatile std::uint32_t*>(call.rounds_done + place.head) =
      static_cast<std::uint32_t>(shared->cut.settled != 0 ? kKeyRounds : round + 1);
}

__device__ void wait_for_round(const LargeCall& call, std::int32_t head, int round) {
  if (threadIdx.x == 0) {
    const auto* const done = static_cast<const volatile std::uint32_t*>(call.rounds_done + head);
    while (*done < static_cast<std::uint32_t>(round)) {
    }
    __threadfence();
  }
  __syncthreads();
}

__global__ void __launch_bounds__(kKeyThreads, 2)
    key_rounds_of(const __grid_constant__ LargeCall call) {
  __shared__ Shared shared;
  const std::int32_t blocks = (call.key_chunks + call.key_loops - 1) / call.key_loops;
  const std::int32_t all = blocks * call.call.head_count;
  const int round = static_cast<int>(blockIdx.x) / all;
  const std::int32_t head = static_cast<std::int32_t>(blockIdx.x) % all / blocks;
  const std::int32_t block = static_cast<std::int32_t>(blockIdx.x) % blocks;
  // In this order: what follows waits before it looks at anything, and often nothing is left to do.
  allow_next_kernel();
  wait_for_kernel_before();
  if (call.list_capacity > 0 && call.settled[head] != 0) return;
  const Place place = place_of(call, head, round, &shared);
  const std::int32_t chunks = max(1, (place.extent.emit + kKeyChunk - 1) / kKeyChunk);
  const std::int32_t active = (chunks + call.key_loops - 1) / call.key_loops;
  if (block >= active) return;
  wait_for_round(call, head, round);
  const KeyCut cut = call.cuts[head];
  if (round > 0 && cut.settled != 0) return;
  const auto thread = static_cast<std::int32_t>(threadIdx.x);
  const int bins = key_bins(call.call.group, round);
  for (std::int32_t i = thread; i < bins; i += kKeyThreads) shared.bins[i] = 0;
  __syncthreads();
  const KeyRound view(call.call.group, round, cut);
  Counts counts;
  for (std::int32_t chunk = block * call.key_loops;
       chunk < min((block + 1) * call.key_loops, chunks); ++chunk) {
    count_keys(call, place, view, round, chunk * kKeyChunk + thread * 8, counts, &shared);
  }
  __syncthreads();
  for (std::int32_t i = thread; i < bins; i += kKeyThreads) {
    if (shared.bins[i] != 0) atomicAdd(place.bins + i, shared.bins[i]);
  }
  if (round == 0) {
    const std::uint32_t forced = __reduce_add_sync(kAllLanes, counts.forced);
    const std::uint32_t available = __reduce_add_sync(kAllLanes, counts.available);
    if (thread % kWarp == 0 && forced != 0) atomicAdd(&call.cuts[head].forced, forced);
    if (thread % kWarp == 0 && available != 0) atomicAdd(&call.cuts[head].available, available);
  }
  std::uint32_t* const done =
      call.key_done + static_cast<std::int64_t>(round) * call.call.head_count + head;
  if (is_last_of(done, active)) finish_round(call, place, round, &shared);
}

}  // namespace

void run_key_rounds(const LargeCall& call, const Launch& launch) {
  const std::int64_t each = (call.key_chunks + call.key_loops - 1) / call.key_loops;
  const std::int64_t blocks = key_rounds(call.call.group) * call.call.head_count * each;
  launch_early("key_rounds", key_rounds_of, dim3(static_cast<unsigned>(blocks)), kKeyThreads, 0,
               launch, call);
}

}  // namespace sluice::cuda
