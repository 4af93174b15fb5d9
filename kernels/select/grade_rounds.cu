// Finds the lightest kept grade of every KV head by radix, at most 11 bits at a time. The first
// round computes the grades, sums of weights over the query heads, and stores them; a single query
// head's logits are their own grades. All rounds are one launch: a round's blocks spin until those
// of the round before are done, which ends because the device starts blocks in order.
#include "kernels/select/chain.cuh"

namespace sluice::cuda {
namespace {

struct Shared {
  std::uint32_t bins[kMostGradeBins];
  std::uint32_t part[kWarp];
  Crossing<std::uint32_t> found;
  GradeCut cut;
  RowInfo rows[kMostGroup];
};

// A KV head as one block sees it.
struct Place {
  std::int32_t head;
  Extent extent;
  std::uint32_t* grades;  // [grade_chunks * kGradeChunk] or null
  std::uint32_t* bins;    // [kMostGradeBins], of this round
};

__device__ Place place_of(const ChainCall& call, std::int32_t head, int round, Shared* shared) {
  const SelectCall& c = call.call;
  Place place;
  place.head = head;
  place.extent = call.extents[head];
  place.grades = call.grades == nullptr ? nullptr
                                        : call.grades + static_cast<std::int64_t>(head) *
                                                            call.grade_chunks * kGradeChunk;
  place.bins =
      call.grade_bins + (static_cast<std::int64_t>(round) * c.head_count + head) * kMostGradeBins;
  if (load_infos(call, head, shared->rows)) place.extent = Extent();
  return place;
}

// The grades of eight entries; 0 for those always kept.
__device__ void compute_grades(const SelectCall& c, const Place& place, std::int32_t i,
                               const RowInfo* rows, std::uint32_t (&grades)[8]) {
  const __half* const first = c.row(place.head, 0);
  const auto load = [&](int g) { return load8(first + g * c.stride, i); };
  if (i < place.extent.emit) {
    grades8(c, c.group, rows, selectable8(place.extent, i), load, grades);
    return;
  }
#pragma unroll
  for (std::uint32_t& grade : grades) grade = 0;
}

__device__ void load_grades(const std::uint32_t* from, std::uint32_t (&grades)[8]) {
  const uint4 low = reinterpret_cast<const uint4*>(from)[0];
  const uint4 high = reinterpret_cast<const uint4*>(from)[1];
#pragma unroll
  for (int w = 0; w < 4; ++w) {
    grades[w] = word_of(low, w);
    grades[4 + w] = word_of(high, w);
  }
}

__device__ void store_grades(const std::uint32_t (&grades)[8], std::uint32_t* to) {
  reinterpret_cast<uint4*>(to)[0] = make_uint4(grades[0], grades[1], grades[2], grades[3]);
  reinterpret_cast<uint4*>(to)[1] = make_uint4(grades[4], grades[5], grades[6], grades[7]);
}

// Counts eight grades in their bins; adds the number of those that the round concerns to `count`.
__device__ void count_grades(const ChainCall& call, const Place& place, const GradeRound& view,
                             int round, std::int32_t i, std::uint32_t& count, Shared* shared) {
  std::uint32_t grades[8];
  if (round == 0 || place.grades == nullptr) {
    compute_grades(call.call, place, i, shared->rows, grades);
    if (place.grades != nullptr) store_grades(grades, place.grades + i);
  } else {
    load_grades(place.grades + i, grades);
  }
#pragma unroll
  for (int e = 0; e < 8; ++e) {
    if (!view.concerns(grades[e])) continue;
    ++count;
    atomicAdd(shared->bins + view.bin(grades[e]), 1u);
  }
}

// By the last block of a head: narrows the cut to the bin where the wanted grades end.
__device__ void finish_round(const ChainCall& call, const Place& place, int round, Shared* shared) {
  const int group = call.call.group;
  if (threadIdx.x == 0) {
    shared->cut = call.cuts[place.head];
    if (round == 0) begin_cut(call.call, place.extent, shared->cut);
  }
  __syncthreads();
  if (shared->cut.settled == 0) {
    const int last = grade_bins(group, round) - 1;
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
      static_cast<std::uint32_t>(shared->cut.settled != 0 ? kGradeRounds : round + 1);
}

__device__ void wait_for_round(const ChainCall& call, std::int32_t head, int round) {
  if (threadIdx.x == 0) {
    const auto* const done = static_cast<const volatile std::uint32_t*>(call.rounds_done + head);
    while (*done < static_cast<std::uint32_t>(round)) {
    }
    __threadfence();
  }
  __syncthreads();
}

__global__ void __launch_bounds__(kGradeThreads, 2)
    grade_rounds_of(const __grid_constant__ ChainCall call) {
  __shared__ Shared shared;
  const std::int32_t blocks = (call.grade_chunks + call.grade_loops - 1) / call.grade_loops;
  const std::int32_t all = blocks * call.call.head_count;
  const int round = static_cast<int>(blockIdx.x) / all;
  const std::int32_t head = static_cast<std::int32_t>(blockIdx.x) % all / blocks;
  const std::int32_t block = static_cast<std::int32_t>(blockIdx.x) % blocks;
  // Allows first, because the next kernel makes no use of rule 4 (early_launch.cuh), and often
  // nothing is left to do here.
  allow_next_kernel();
  wait_for_kernel_before();
  if (call.shortlist_capacity > 0 && call.settled[head] != 0) return;
  const Place place = place_of(call, head, round, &shared);
  const std::int32_t chunks = max(1, (place.extent.emit + kGradeChunk - 1) / kGradeChunk);
  const std::int32_t active = (chunks + call.grade_loops - 1) / call.grade_loops;
  if (block >= active) return;
  wait_for_round(call, head, round);
  const GradeCut cut = call.cuts[head];
  if (round > 0 && cut.settled != 0) return;
  const auto thread = static_cast<std::int32_t>(threadIdx.x);
  const int bins = grade_bins(call.call.group, round);
  for (std::int32_t i = thread; i < bins; i += kGradeThreads) shared.bins[i] = 0;
  __syncthreads();
  const GradeRound view(call.call.group, round, cut);
  std::uint32_t count = 0;
  for (std::int32_t chunk = block * call.grade_loops;
       chunk < min((block + 1) * call.grade_loops, chunks); ++chunk) {
    count_grades(call, place, view, round, chunk * kGradeChunk + thread * 8, count, &shared);
  }
  __syncthreads();
  for (std::int32_t i = thread; i < bins; i += kGradeThreads) {
    if (shared.bins[i] != 0) atomicAdd(place.bins + i, shared.bins[i]);
  }
  if (round == 0) {
    const std::uint32_t available = __reduce_add_sync(kAllLanes, count);
    if (thread % kWarp == 0 && available != 0) atomicAdd(&call.cuts[head].available, available);
  }
  std::uint32_t* const done =
      call.grade_done + static_cast<std::int64_t>(round) * call.call.head_count + head;
  if (is_last_of(done, active)) finish_round(call, place, round, &shared);
}

}  // namespace

void run_grade_rounds(const ChainCall& call, const Launch& launch) {
  const std::int64_t each = (call.grade_chunks + call.grade_loops - 1) / call.grade_loops;
  const std::int64_t blocks = grade_rounds(call.call.group) * call.call.head_count * each;
  launch_early("grade_rounds", grade_rounds_of, dim3(static_cast<unsigned>(blocks)), kGradeThreads,
               0, launch, call);
}

}  // namespace sluice::cuda
