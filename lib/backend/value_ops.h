// What a step does with value tiles; lib/value_tiles.h says what they are.
#pragma once

#include "lib/value_tiles.h"

namespace sluice {

class ValueOps {
 public:
  virtual ~ValueOps() = default;

  virtual void build_values(const BuildValuesParams& params) = 0;
  virtual void build_values_batch(const BuildValuesBatchParams& params) = 0;
  virtual void attend_tiles(const AttendTilesParams& params) = 0;
};

}  // namespace sluice
