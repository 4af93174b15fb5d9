// What a step does with value tiles, and with partials; lib/value_tiles.h says what they are.
#pragma once

#include "lib/value_tiles.h"

namespace sluice {

class ValueOps {
 public:
  virtual ~ValueOps() = default;

  virtual void build_values(const BuildValuesParams& params) = 0;
  virtual void build_values_batch(const BuildValuesBatchParams& params) = 0;
  virtual void attend_tiles(const AttendTilesParams& params) = 0;
  // Partials may lie in host memory that the backend has allocated.
  virtual void merge_partials(const MergePartialsParams& params) = 0;
};

}  // namespace sluice
