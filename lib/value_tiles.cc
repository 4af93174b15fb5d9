#include "lib/value_tiles.h"

#include <string>

#include "lib/text.h"
#include "sluice/errors.h"

namespace sluice {

void check_value_tiles(int bits, int head_dim, float share) {
  if (bits < 1 || bits > 4) {
    throw Error(ErrorCode::usage,
                "value tiles of " + std::to_string(bits) + " bits; there are 1, 2, 3 and 4");
  }
  if (!(share > 0.0f && share <= 1.0f)) {
    throw Error(ErrorCode::usage, "reading pages that carry " + digits(share) +
                                      " of the weight; it must be above 0 and at most 1");
  }
  if (head_dim <= 0 || head_dim > 256 || head_dim % 4 != 0) {
    throw Error(ErrorCode::unsupported, "value tiles for head_dim " + std::to_string(head_dim) +
                                            "; it must be a multiple of 4 up to 256");
  }
}

}  // namespace sluice
