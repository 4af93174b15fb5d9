// The reference backend's key index: what is built and what is estimated from it, fp64, plain
// loops. See lib/backend/index_ops.h for what the operations do.
#pragma once

#include <cstddef>
#include <functional>

#include "cpu/reference/reads.h"
#include "lib/backend.h"

namespace sluice::cpu::reference {

void build_index(const BuildIndexParams& params);
void build_batch(const BuildBatchParams& params);

// Who is told what an estimate reads: a page of an index, and so many bytes of a row's key. The
// pattern is that of the backend that the reference stands for.
struct EstimateReads {
  ReadPattern pattern;
  std::function<void(const PageRead&)> on_page = [](const PageRead&) {};
  std::function<void(const std::byte*, std::size_t)> on_key = [](const std::byte*, std::size_t) {};
};
void estimate(const EstimateParams& params, const EstimateReads& reads = {});

}  // namespace sluice::cpu::reference
