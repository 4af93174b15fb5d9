// The reference backend's key index: building and estimating, fp64, plain loops. See
// lib/backend/index_ops.h for the operations.
#pragma once

#include <cstddef>
#include <functional>

#include "cpu/reference/reads.h"
#include "lib/backend.h"

namespace sluice::cpu::reference {

void build_index(const BuildIndexParams& params);
void build_batch(const BuildBatchParams& params);

// Callbacks that report the reads of an estimate: a page of an index, or bytes of a row's key.
// `pattern` is that of the backend that the reference stands for.
struct EstimateReads {
  ReadPattern pattern;
  std::function<void(const PageRead&)> on_page = [](const PageRead&) {};
  std::function<void(const std::byte*, std::size_t)> on_key = [](const std::byte*, std::size_t) {};
};
void estimate(const EstimateParams& params, const EstimateReads& reads = {});

}  // namespace sluice::cpu::reference
